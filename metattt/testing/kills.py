"""Runs that are killed at random moments and go on: `python -m metattt.testing.kills kills=60 folder=/tmp/kills`.

Tiny runs, in one process and in two, are killed while they start, train, validate and write, are stopped by SIGTERM, or
find the disk full. The same command is given again, with nothing done by hand, until the run is complete; then its log
and weights must be, bit by bit, those of a run that nobody disturbed.
"""

from __future__ import annotations

import csv
import multiprocessing
import os
import random
import resource
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from metattt.metrics_file import CLOCK

KINDS = {"plain": (), "ddp": ("trainer=ddp", "trainer.devices=2"), "fsdp": ("trainer=fsdp", "trainer.devices=2")}
WAYS = ("kill", "term", "full")
STEPS = 24
TINY = (
    "dim=16", "num_heads=2", "model.num_layers=1", "optimizer.mini_batch_size=8", "data.context_length=32", "data.batch_size=4",
    f"trainer.max_steps={STEPS}", "trainer.val_check_interval=8", "trainer.log_every_n_steps=1", "trainer.accelerator=cpu",
    "callbacks.checkpoint.every_steps=3", "~callbacks.loss_curve", "sample=false", "resume=auto",
)  # fmt: skip
DISTURBED = 4  # times that one run is disturbed, before it may end
STOP_SECONDS = 60  # within which the other processes stop when one is killed
LIMIT_SECONDS = 600  # of one life of a run; more is a hang


class Case(NamedTuple):
    """One run that was disturbed a few times and went on.

    Attributes:
        kind, way: what ran, and what happened to it.
        disturbed: how often.
        writing: how often while a checkpoint was being written.
        seconds: the longest that the others needed to stop, when one process of several was killed.
        fault: what was not as it should be; empty: nothing.
    """

    kind: str
    way: str
    disturbed: int
    writing: int
    seconds: float
    fault: str


class Life:
    """A run from one start to its end, in as many processes as its kind has.

    Args:
        kind: of `KINDS`.
        run: the folder of the run.
        full_after: seconds after which the disk is full; None: never.
    """

    def __init__(self, kind: str, run: Path, full_after: float | None = None):
        self.run, self.output = run, run.parent / f"{run.name}.txt"
        arguments = ["train", *TINY, *KINDS[kind], f"data.path={run.parent / 'text'}", f"output_dir={run}"]
        world = 2 if KINDS[kind] else 1
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["metattt.training.train"])  # so that not every life imports everything
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.output.write_text("")
        self.began = time.time()
        self.processes: list[BaseProcess] = [
            context.Process(target=_live, args=(rank, world, port, str(self.output), arguments, full_after))
            for rank in range(world)
        ]
        for process in self.processes:
            process.start()

    def wait(self, seconds: float = LIMIT_SECONDS) -> list[int | None]:
        """The exit codes; None: a process had not ended by then, or a minute after another had failed, and was killed, as
        whoever starts processes does."""
        end = time.monotonic() + seconds
        while any(process.exitcode is None for process in self.processes) and time.monotonic() < end:
            if any(process.exitcode for process in self.processes):
                end = min(end, time.monotonic() + STOP_SECONDS)
            time.sleep(0.05)
        codes = [process.exitcode for process in self.processes]
        self.kill()
        return codes

    def kill(self) -> None:
        """Ends all processes."""
        for process in self.processes:
            process.kill()
            process.join()

    def alive(self) -> bool:
        """Whether all processes are there."""
        return all(process.is_alive() for process in self.processes)

    def is_under_way(self) -> bool:
        """Whether it has logged something. Before, its processes may not have found one another, and it is whoever
        started them (torchrun, SLURM) that ends them all when one dies."""
        log = self.run / "metrics.csv"
        return log.exists() and log.stat().st_mtime > self.began

    def is_writing(self) -> bool:
        """Whether a checkpoint is being written."""
        folder = self.run / "checkpoints"
        try:
            return any(entry.name.endswith(".part") for entry in os.scandir(folder))
        except OSError:
            return False


def _live(rank: int, world: int, port: int, output: str, arguments: list[str], full_after: float | None) -> None:
    """In a process of its own: the command line, as torchrun starts it."""
    if world > 1:
        names = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ |= {name: str(value) for name, value in names.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "kills"}
    with open(output, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if full_after is not None:
        threading.Timer(full_after, resource.setrlimit, (resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))).start()
    import torch

    from metattt.cli import main

    torch.set_num_threads(1)
    code = main(arguments)
    sys.stdout.flush()
    os._exit(code)  # the timer need not be waited for


def campaign(
    folder: Path, kinds: Sequence[str] = tuple(KINDS), kills: int = 60, others: int = 10, seed: int = 0
) -> list[Case]:
    """Disturbs runs of every kind until there are enough of it, and compares what they come to.

    Args:
        folder: an empty folder for the runs.
        kinds: of `KINDS`.
        kills: SIGKILLs, over all kinds; half of them while a checkpoint is being written.
        others: SIGTERMs, and full disks.
        seed: of the moments.
    """
    draw = random.Random(seed)
    (folder / "text").mkdir(parents=True)
    for number in range(20):
        (folder / "text" / f"{number}.txt").write_text(f"document {number}\n" + "alpha beta gamma delta " * 30)
    cases = []
    for kind in kinds:
        whole = folder / kind
        for run in (whole, folder / f"{kind}_again"):  # the second knows how long it takes when all is imported
            began = time.monotonic()
            codes = Life(kind, run).wait()
            seconds = 0.9 * (time.monotonic() - began)
            if any(codes):
                raise RuntimeError(f"undisturbed, it ended with {codes}: {(folder / f'{run.name}.txt').read_text()}")
        if difference := _difference(run, whole):
            raise RuntimeError(f"two runs that nobody disturbs have {difference}")
        for way in WAYS:
            wanted = -(-(kills if way == "kill" else others) // len(kinds))
            while wanted > 0:
                case = _disturb(kind, way, folder / f"{kind}_{way}", whole, min(wanted, DISTURBED), seconds, draw)
                if not case.disturbed and not case.fault:  # it was complete before its moment
                    continue
                wanted -= max(1, case.disturbed)
                cases.append(case)
                print(*case, flush=True)
                if case.fault and (run := folder / f"{kind}_{way}").exists():
                    run.rename(folder / f"fault-{len(cases)}")
    return cases


def _disturb(kind: str, way: str, run: Path, whole: Path, times: int, seconds: float, draw: random.Random) -> Case:
    """One run, disturbed at most so many times."""
    shutil.rmtree(run, ignore_errors=True)
    disturbed = writing = 0
    slowest, fault = 0.0, ""
    while disturbed < times and not fault:
        life = Life(kind, run, draw.uniform(0, 0.8 * seconds) if way == "full" else None)
        if way == "full":
            codes = life.wait()
            if codes[0] == 0:
                break
            disturbed += 1
            fault = _fault_of_full(codes, life.output.read_text())
            continue
        in_a_write = draw.random() < 0.5
        until = time.monotonic() + draw.uniform(0, seconds)
        skipped = draw.randrange(4)  # not always the first checkpoint after the start
        while life.alive() and (in_a_write or time.monotonic() < until):
            if in_a_write and life.is_writing():
                if not skipped:
                    break
                skipped -= 1
                while life.alive() and life.is_writing():
                    time.sleep(1e-4)
            time.sleep(1e-4)
        if not life.alive():
            codes = life.wait()
            fault = f"undisturbed, it ended with {codes}" if any(codes) else ""
            break
        disturbed += 1
        writing += life.is_writing()
        began = time.monotonic()
        hit = draw.choice(life.processes)
        assert hit.pid is not None
        if way == "kill" and (len(life.processes) == 1 or not life.is_under_way() or draw.random() < 0.5):
            life.kill()
        else:
            # before the processes know each other, whoever started them tells them all, as SLURM and torchrun do
            told = [hit] if way == "kill" or life.is_under_way() else life.processes
            for process in told:
                assert process.pid is not None
                os.kill(process.pid, signal.SIGKILL if way == "kill" else signal.SIGTERM)
            codes = life.wait(STOP_SECONDS if way == "kill" else LIMIT_SECONDS)
            slowest = max(slowest, time.monotonic() - began)
            fault = _fault_of_signal(way, codes, life.output.read_text())
    if not fault:
        codes = Life(kind, run).wait()
        fault = f"went on and ended with {codes}" if any(codes) else _difference(run, whole)
    return Case(kind, way, disturbed, writing, round(slowest, 1), fault)


def _fault_of_full(codes: Sequence[int | None], output: str) -> str:
    """A full disk is one line, and exit code 2."""
    lines = output.count("error: ")
    if codes[0] != 2 or lines < 1 or "Traceback" in output:
        return f"a full disk ended with {codes} and {lines} lines of error: {output[-500:]!r}"
    return ""


def _fault_of_signal(way: str, codes: Sequence[int | None], output: str) -> str:
    """A process that is killed takes the others with it, in a line; SIGTERM stops all, with a checkpoint."""
    if None in codes:
        return f"a process did not stop: {codes}"
    if "Traceback" in output:
        return f"a traceback: {output[-500:]!r}"
    early = -signal.SIGTERM in codes  # before the run listens
    if way == "term" and not early and not set(codes) <= {0, 128 + signal.SIGTERM}:
        return f"SIGTERM ended with {codes}: {output[-500:]!r}"
    return ""


def _difference(run: Path, whole: Path) -> str:
    """What a run has other than one that nobody disturbed."""
    import torch

    from metattt.checkpoints.trained import read_checkpoint

    if _log(run) != _log(whole):
        return "another log"
    found, wanted = (read_checkpoint(one) for one in (run, whole))
    if found["global_step"] != wanted["global_step"]:
        return f"it ended at step {found['global_step']}"
    if not _equal(torch, found["state_dict"], wanted["state_dict"]):
        return "other weights"
    if not _equal(torch, found["optimizer_states"], wanted["optimizer_states"]):
        return "another state of the optimizer"
    return ""


def _equal(torch: Any, found: Any, wanted: Any) -> bool:
    if isinstance(wanted, torch.Tensor):
        return bool(torch.equal(found, wanted))
    if isinstance(wanted, Mapping):
        return found.keys() == wanted.keys() and all(_equal(torch, found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list | tuple):
        return len(found) == len(wanted) and all(map(_equal, [torch] * len(wanted), found, wanted))
    return bool(found == wanted)


def _log(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="") as file:
        return [{name: value for name, value in row.items() if name not in CLOCK} for row in csv.DictReader(file)]


def table(cases: Sequence[Case]) -> str:
    """The cases as a table in Markdown."""
    columns = (
        "run", "disturbed by", "runs", "times", "while writing a checkpoint", "others stopped within (s)",
        "went on, log and weights the same",
    )  # fmt: skip
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    names = {"kill": "SIGKILL", "term": "SIGTERM", "full": "full disk"}
    for kind in KINDS:
        for way in WAYS:
            found = [case for case in cases if (case.kind, case.way) == (kind, way)]
            if found:
                good = sum(not case.fault for case in found)
                slowest = max(case.seconds for case in found)
                times, writing = sum(case.disturbed for case in found), sum(case.writing for case in found)
                within = f"{slowest:.1f}" if KINDS[kind] and way == "kill" else ""
                lines.append(
                    f"| {kind} | {names[way]} | {len(found)} | {times} | {writing or ''} | {within} | {good} of {len(found)} |"
                )
    return "\n".join(lines)


def _main(arguments: Sequence[str]) -> int:
    given = dict(argument.split("=", 1) for argument in arguments)
    folder = Path(given.pop("folder", "kills"))
    kinds = given.pop("kinds", ",".join(KINDS)).split(",")
    cases = campaign(folder, kinds, **{key: int(value) for key, value in given.items()})
    print(f"\n{table(cases)}")
    return int(any(case.fault for case in cases))


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
