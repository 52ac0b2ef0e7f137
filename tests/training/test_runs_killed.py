"""Runs in processes of their own that are killed, stopped and interrupted, as a user's are."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from kills import STEPS, TINY, campaign
from processes_for_tests import Program

from metattt.checkpoints.rolling import steps

pytestmark = pytest.mark.slow
SLOW_STEP = """
import sys, time
from metattt.cli import main
from metattt.training.text_module import LanguageModeling
step = LanguageModeling.training_step
def slow(self, *rest):
    if self.global_step == 4:
        open({marker!r}, "w").close()
        {what}
    return step(self, *rest)
LanguageModeling.training_step = slow
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


class Run:
    """`metattt train` in processes of its own, whose fifth step begins with a statement, `what`; `folder` is for their files."""

    def __init__(self, folder: Path, what: str, *overrides: str):
        (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
        self.folder, self.marker = folder / "run", folder / "marker"
        script = folder / "script.py"
        script.write_text(SLOW_STEP.format(marker=str(self.marker), what=what))
        arguments = ["train", *TINY.split(), f"data.path={folder / 'text.txt'}", f"output_dir={self.folder}", *overrides]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        self.process = Program(str(script), *arguments, folder=folder, environment=environment)
        self.errors = self.process.err

    def child(self) -> int:
        """The process that the run has started."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    def until(self, condition: Callable[[], bool], seconds: float = 500) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end and self.process.poll() is None, self.errors.read_text()
            time.sleep(0.05)


def is_gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_second_ctrl_c_stops_at_once_and_says_what_is_kept(tmp_path: Path) -> None:
    """Also in a call that Python cannot interrupt: here a lock, as a process waits for another."""
    run = Run(tmp_path, "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()")
    run.until(run.marker.exists)
    run.process.send_signal(signal.SIGINT)
    run.until(lambda: "stopping after this step; Ctrl-C again stops at once" in run.errors.read_text())
    time.sleep(1)
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(10) == 130
    assert f"stopped at once; the last checkpoint is {run.folder}/checkpoints/step-00000003" in run.errors.read_text()
    assert [step for step, _ in steps(run.folder)] == [3]


@pytest.mark.parametrize(
    ("strategy", "number", "which"), [("ddp", signal.SIGKILL, 1), ("ddp", signal.SIGSTOP, 1), ("fsdp", signal.SIGKILL, 0)]
)
def test_when_a_process_dies_or_hangs_the_others_stop(strategy: str, number: int, which: int, tmp_path: Path) -> None:
    run = Run(
        tmp_path, "time.sleep(0.2)", f"trainer={strategy}", "trainer.devices=2", "trainer.strategy.timeout_minutes=1",
        "trainer.max_steps=100000", "trainer.val_check_interval=100000",
    )  # fmt: skip
    run.until(run.marker.exists)
    child = run.child()
    began = time.monotonic()
    os.kill(child if which else run.process.pid, number)
    if which:
        assert run.process.wait(150)
    while not is_gone(child):
        assert time.monotonic() - began < 150
        time.sleep(0.1)
    said = run.errors.read_text()
    assert "Traceback" not in said
    if which and number == signal.SIGKILL and "Forcefully terminating all other processes" in said:
        return  # Lightning looks at the processes that it started every five seconds, and may have seen the dead one first
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and errors[0].startswith("error: another process of the run has died or hangs"), errors
    assert f"to resume: metattt train resume={run.folder}" in errors[0]


def test_sigterm_of_one_of_two_processes_stops_both_with_a_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path, "time.sleep(0.5)", "trainer=ddp", "trainer.devices=2")
    run.until(run.marker.exists)
    os.kill(run.child(), signal.SIGTERM)
    assert run.process.wait(60) == 143
    (last, _), *_ = steps(run.folder)
    assert 4 < last < STEPS
    assert f"stopped at step {last} (SIGTERM)" in run.process.out.read_text()


def test_killed_at_random_moments_nothing_is_lost(tmp_path: Path) -> None:
    """The campaign in small; `python tests/robustness/kills.py` runs it in full."""
    cases = [*campaign(tmp_path / "kills", kinds=["plain"], kills=2, others=1)]
    cases += campaign(tmp_path / "more", kinds=["ddp", "fsdp"], kills=2, others=0)
    assert not [case for case in cases if case.fault], cases
    assert sum(case.disturbed for case in cases) >= 4
