"""Runs that are killed at random moments, stopped by SIGTERM, or find the disk full, and go on.

    python tests/robustness/kills.py --kills 50 --others 10 --folder /tmp/kills

The same command is given again, with nothing done by hand, until the run is complete; then its log and weights must be,
bit by bit, those of a run that nobody disturbed. Runs are plain, or of two processes as torchrun starts them.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from metattt.checkpoints.trained import load_model
from metattt.metrics_file import STEP, read_rows

sys.path.append(str(Path(__file__).parent.parent))
from processes_for_tests import Program
from runs_for_tests import log, steps

KINDS = {"plain": "", "ddp": "trainer=ddp trainer.devices=2", "fsdp": "trainer=fsdp trainer.devices=2"}
WAYS = ("SIGKILL", "SIGTERM", "full disk")
STEPS = 24
TINY = (
    "dim=16 num_heads=2 model.num_layers=1 optimizer.mini_batch_size=8 data.context_length=32 data.batch_size=4 "
    f"trainer.max_steps={STEPS} trainer.val_check_interval=8 trainer.log_every_n_steps=1 trainer.accelerator=cpu "
    "callbacks.checkpoint.every_steps=3 ~callbacks.loss_curve sample=false resume=auto"
)
DISTURBED = 4  # times that one run is disturbed, before it may end
STOP_SECONDS = 60  # within which the other processes stop when one has ended; whoever starts processes kills them then
LIMIT_SECONDS = 600  # of one life of a run; more is a hang


class Case(NamedTuple):
    """One run: how often it was disturbed, and of these while it wrote a checkpoint; what was wrong; empty: nothing."""

    kind: str
    way: str
    disturbed: int
    writing: int
    fault: str


class Life:
    """A run from one start to its end, in as many processes as its kind has, each as torchrun starts it."""

    def __init__(self, kind: str, run: Path):
        self.run, self.began, self.done = run, time.time(), max(steps(run), default=0)
        given = f"train {TINY} {KINDS[kind]} data.path={run.parent / 'text'} output_dir={run}"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        world = 2 if KINDS[kind] else 1
        self.processes = []
        for rank in range(world):
            names = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
            names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "kills"}
            variables = os.environ | {name: str(value) for name, value in names.items() if world > 1}
            folder = run.parent / f"{run.name}.{rank}"
            folder.mkdir(exist_ok=True)
            self.processes.append(Program("-m", "metattt", *given.split(), folder=folder, environment=variables))

    def wait(self) -> list[int | None]:
        """The exit codes; None: a process had not ended by then, or long after another had failed, and was killed."""
        end = time.monotonic() + LIMIT_SECONDS
        while None in (codes := [process.poll() for process in self.processes]) and time.monotonic() < end:
            if any(codes):
                end = min(end, time.monotonic() + STOP_SECONDS)
            if any(codes) and not self.is_under_way():  # they do not know each other: torchrun and SLURM end the others
                for process in self.processes:
                    process.send_signal(signal.SIGTERM)
            time.sleep(0.05)
        for process in self.processes:
            process.kill()
        return codes

    def disturb(self, way: str, draw: random.Random) -> None:
        """Kills, stops, or fills the disk. One process of several is killed or told where they know each other; before,
        whoever started them tells them all, as SLURM and torchrun do."""
        one = way != "full disk" and self.is_under_way() and draw.random() < 0.7
        for process in [draw.choice(self.processes)] if one else self.processes:
            if way != "full disk":
                process.send_signal(signal.Signals[way])
            elif process.poll() is None:
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))

    def alive(self) -> bool:
        """Whether all processes are there."""
        return all(process.poll() is None for process in self.processes)

    def is_under_way(self) -> bool:
        """Whether it has logged a step of its own: before, its processes may not have found one another. (A run that
        goes on first cuts its log to the steps of its checkpoint.)"""
        file = self.run / "metrics.csv"
        changed = file.exists() and file.stat().st_mtime > self.began
        return changed and any(int(row[STEP]) > self.done for row in read_rows(file)[0])

    def is_writing(self) -> bool:
        """Whether a checkpoint is being written, under another name than it will have."""
        folder = self.run / "checkpoints"
        return folder.is_dir() and any("." in name for name in os.listdir(folder))

    def printed(self) -> str:
        """What its processes have printed; one that was killed at once may have no files yet."""
        files = (file for process in self.processes for file in (process.out, process.err))
        return "".join(file.read_text() for file in files if file.exists())


def campaign(folder: Path, kinds: Sequence[str], kills: int, others: int, seed: int = 0) -> Iterator[Case]:
    """Disturbs runs until there are enough of every kind and way, and compares what they come to.

    Args:
        folder: a new folder for the runs.
        kinds: of `KINDS`.
        kills: SIGKILLs, over all kinds; half of them while a checkpoint is being written.
        others: SIGTERMs, and full disks.
        seed: of the moments.
    """
    draw = random.Random(seed)
    (folder / "text").mkdir(parents=True)
    for number in range(20):
        (folder / "text" / f"{number}.txt").write_text(f"document {number}\n" + "alpha beta gamma delta " * 30)
    for kind in kinds:
        whole = folder / kind
        for run in (whole, folder / f"{kind}_again"):  # the second knows how long it takes when all is imported
            began = time.monotonic()
            codes = Life(kind, run).wait()
            seconds = 0.9 * (time.monotonic() - began)
            if fault := f"exit codes {codes}" if any(codes) else difference(run, whole):
                raise RuntimeError(f"undisturbed, {run} ended with {fault}")
        for way in WAYS:
            wanted, number = -(-(kills if way == "SIGKILL" else others) // len(kinds)), 0
            while wanted > 0:
                number += 1
                run = folder / f"{kind}_{way[-4:]}_{number}"
                case = _disturb(kind, way, run, whole, min(wanted, DISTURBED), seconds, draw)
                wanted -= max(case.disturbed, case.fault != "")
                if case.disturbed or case.fault:  # else it was complete before its moment
                    yield case


def _disturb(kind: str, way: str, run: Path, whole: Path, times: int, seconds: float, draw: random.Random) -> Case:
    """One run, disturbed at most so many times."""
    disturbed = writing = 0
    fault = ""
    while disturbed < times and not fault:
        life = Life(kind, run)
        in_a_write, was_alive = _wait_for_moment(life, seconds, draw), life.alive()
        if was_alive:  # else what is still there of it would be killed at its end, as if by itself
            life.disturb(way, draw)
        codes = life.wait()
        if not was_alive or (way == "full disk" and not any(codes)):  # it was complete before
            fault = f"undisturbed, it ended with {codes}" if any(codes) else ""
            break
        disturbed += 1
        writing += in_a_write
        fault = fault_of(way, codes, life.printed())
    if not fault:
        codes = Life(kind, run).wait()
        fault = f"went on and ended with {codes}" if any(codes) else difference(run, whole)
    return Case(kind, way, disturbed, writing, fault)


def _wait_for_moment(life: Life, seconds: float, draw: random.Random) -> bool:
    """Until a random moment, or until a checkpoint is being written; whether one is."""
    in_a_write, skipped = draw.random() < 0.5, draw.randrange(4)  # not always the first checkpoint after the start
    until, was_writing = time.monotonic() + draw.uniform(0, seconds), False
    while life.alive() and (skipped >= 0 if in_a_write else time.monotonic() < until):
        is_writing = life.is_writing()
        skipped -= is_writing and not was_writing
        was_writing = is_writing
        time.sleep(1e-4)
    return life.is_writing()


def fault_of(way: str, codes: Sequence[int | None], output: str) -> str:
    """What is wrong with how processes ended; empty: nothing. One that is killed takes the others with it; SIGTERM stops
    all, with a checkpoint; a full disk is one line and exit code 2."""
    if None in codes:
        return f"a process did not stop: {codes}"
    early = -signal.SIGTERM in codes  # before the run listens
    if way == "SIGTERM" and not early and not set(codes) <= {0, 128 + signal.SIGTERM}:
        return f"SIGTERM ended with {codes}: {output[-500:]!r}"
    if way == "full disk" and (codes[0] != 2 or "error: " not in output):
        return f"a full disk ended with {codes}: {output[-500:]!r}"
    return f"a traceback: {output[-500:]!r}" if "Traceback" in output else ""


def difference(run: Path, whole: Path) -> str:
    """What a run has other than one that nobody disturbed: rows of its log, or weights, which a state of the optimizer
    that is not the same would change."""
    if log(run) != log(whole):
        return "another log"
    found, wanted = (load_model(one)[0].state_dict() for one in (run, whole))
    same = found.keys() == wanted.keys() and all(found[name].equal(wanted[name]) for name in wanted)
    return "" if same else "other weights"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--kills", type=int, default=50, help="SIGKILLs, over all kinds")
    parser.add_argument("--others", type=int, default=10, help="SIGTERMs, and full disks")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--folder", type=Path, required=True, help="a new folder for the runs")
    given = parser.parse_args()
    cases = []
    for case in campaign(given.folder.resolve(), given.kinds, given.kills, given.others, given.seed):
        cases.append(case)
        print(*case, flush=True)
    faults = [case for case in cases if case.fault]
    print(f"{len(cases)} runs, disturbed {sum(case.disturbed for case in cases)} times, {len(faults)} with a fault")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
