"""`python -m metattt.testing.attack [reads=1500] [malicious=all] [commands=all] [seed=0] [folder=<folder>] [report=<file>]`"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from metattt.testing.attack.artifacts import STEPS, Artifacts
from metattt.testing.attack.child import Outcome, run
from metattt.testing.attack.commands import run_commands
from metattt.testing.attack.damage import Damage, of_file
from metattt.testing.attack.malice import malicious

COLUMNS = ("reads", "clear error", "same result", "older one, said", "silently wrong", "traceback", "hang", "code run")
WORST = COLUMNS[4:]
READ_BY = {
    "run": ("eval", "generate", "convert", "resume", "init_from"), "sharded": ("eval", "generate", "convert", "resume in one process"),
    "converted": ("eval", "generate", "convert", "init_from"), "published": ("eval", "generate", "convert"),
    "shards": ("train on", "eval on"),
}  # fmt: skip
"""Artifact -> the commands that read it."""

FOREIGN = {"run": "foreign run", "shards": "foreign shards"}
ALWAYS_RESUMED = 6  # one of so many reads goes on with a run, which takes seconds


SLOW = ("resume", "init_from", "train on")


TAKEN = "is taken instead"  # what a run says that goes on from an older checkpoint


class Read(NamedTuple):
    """One command on one damaged file."""

    thing: str
    file: Path
    damage: int
    name: str
    command: str


class Tally:
    """Counts by row, and what was bad."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {}
        self.bad: list[str] = []

    def add(self, row: str, column: str, what: str) -> None:
        """Counts an outcome; keeps what must not be."""
        counts = self.counts.setdefault(row, Counter())
        counts["reads"] += 1
        counts[column] += 1
        if column in WORST:
            self.bad.append(f"{row}: {column}: {what}")


def classify(outcome: Outcome, expected: str | None, older: str | None = None) -> str:
    """The column of an outcome.

    Args:
        outcome: of a command.
        expected: the result of the undamaged thing; None if any result is allowed.
        older: the result from the checkpoint before, which is allowed if it is said.
    """
    if outcome.kind == "result":
        if TAKEN in outcome.printed and outcome.detail == older:
            return "older one, said"
        return "same result" if expected is None or outcome.detail == expected else "silently wrong"
    return {"error": "clear error", "code": "code run", "hang": "hang"}.get(outcome.kind, "traceback")


def files(artifacts: Artifacts, thing: str) -> list[Path]:
    """The files of an artifact, relative to it; of a run, the older checkpoint is left out."""
    home = artifacts.home / thing
    found = [file.relative_to(home) for file in sorted(home.rglob("*")) if file.is_file() and file.stat().st_size]
    return [
        file for file in found if "step-00000002" not in file.parts and file.suffix != ".png" and file.name != ".lock"
    ]


def damages(artifacts: Artifacts, thing: str, file: Path, seed: int) -> list[Damage]:
    """The damages to one file of the copy that lies in its place."""
    foreign = artifacts.home / FOREIGN[thing] / file if thing in FOREIGN else None
    return list(of_file(artifacts.it / file, foreign, seed))


def reads(artifacts: Artifacts, count: int, seed: int) -> list[Read]:
    """So many commands on damaged files, drawn evenly from all."""
    every: list[Read] = []
    for thing, commands in READ_BY.items():
        if not (artifacts.home / thing).is_dir():
            continue
        artifacts.fresh(thing)
        for file in files(artifacts, thing):
            for index, (name, _) in enumerate(damages(artifacts, thing, file, seed)):
                every += [Read(thing, file, index, name, command) for command in commands]
    drawn = random.Random(seed)
    slow = [read for read in every if read.command.startswith(SLOW)]
    quick = [read for read in every if read not in set(slow)]
    few = min(len(slow), count // ALWAYS_RESUMED)
    return drawn.sample(slow, few) + drawn.sample(quick, min(len(quick), count - few))


def read_damaged(artifacts: Artifacts, count: int, seed: int, table: Tally, seconds: float) -> None:
    """Damages files one at a time, and has the commands read them."""
    expected: dict[tuple[str, str], str] = {}
    older: dict[tuple[str, str], str] = {}
    writable = [artifacts.work, Path(tempfile.gettempdir())]
    for one in track(reads(artifacts, count, seed), "damaged files", console=Console(stderr=True)):
        key = one.thing, one.command
        if key not in expected:
            expected[key] = _result(artifacts, one.thing, one.command, writable, seconds)
            if "resume" in one.command and one.thing in ("run", "sharded"):
                older[key] = _result(artifacts, one.thing, one.command, writable, seconds, without_newest=True)
        artifacts.fresh(one.thing)
        damages(artifacts, one.thing, one.file, seed)[one.damage][1]()
        outcome = run(artifacts.commands[one.command], writable, seconds)
        what = f"{one.file} {one.name}, {one.command}: {outcome.detail[-600:]}"
        table.add(f"{one.thing}, damaged", classify(outcome, expected[key], older.get(key)), what)


def _result(
    artifacts: Artifacts, thing: str, command: str, writable: list[Path], seconds: float, without_newest: bool = False
) -> str:
    """What a command makes of an undamaged thing, or of one without its newest checkpoint."""
    copy = artifacts.fresh(thing)
    if without_newest:
        shutil.rmtree(copy / "checkpoints" / f"step-{STEPS:08}")
    found = run(artifacts.commands[command], writable, seconds)
    if found.kind != "result":
        raise RuntimeError(f"the undamaged {thing} cannot be read by {command}: {found.detail}")
    return found.detail


def read_malicious(artifacts: Artifacts, most: int | None, seed: int, table: Tally, seconds: float) -> None:
    """Has the commands read files that are made to harm."""
    every = list(malicious())
    drawn = random.Random(seed).sample(every, min(len(every), most)) if most is not None else every
    canary = artifacts.home / "canary"
    payload = artifacts.home / "payload.py"
    payload.write_text(f"open({str(canary)!r}, 'w').close()\nclass Learner: ...\ndef run(): ...\n")
    sys.path.append(str(artifacts.home))
    for one in track(drawn, "malicious files", console=Console(stderr=True)):
        commands = READ_BY[one.thing]
        chosen = commands if one.thing != "run" else ("eval", "resume")
        for command in chosen:
            one.make(artifacts.fresh(one.thing), canary)
            outcome = run(artifacts.commands[command], [artifacts.work, Path(tempfile.gettempdir())], seconds)
            if canary.exists():
                canary.unlink()
                outcome = Outcome("code", outcome.detail)
            table.add(
                f"malicious: {one.kind}", classify(outcome, None), f"{one.name}, {command}: {outcome.detail[-600:]}"
            )


def bad_commands(home: Path, most: int | None, seed: int, table: Tally, seconds: float) -> None:
    """Runs commands that are wrong. One that is taken counts as silently wrong."""
    for group, words, outcome in run_commands(home / "commands", most, seed, seconds):
        table.add(f"command: {group}", classify(outcome, ""), f"{words}: {outcome.detail[-600:]}")


def attack(
    home: Path,
    count: int = 1500,
    most_malicious: int | None = None,
    most_commands: int | None = None,
    seed: int = 0,
    sharded: bool = True,
    seconds: float = 60,
) -> Tally:
    """All attacks.

    Args:
        home: folder for what is attacked, ours alone.
        count: commands on damaged files.
        most_malicious: malicious files at most; None: all.
        most_commands: bad commands at most; None: all.
        seed: of what is drawn.
        sharded: also the checkpoint of two processes.
        seconds: that a command may take.
    """
    torch.set_num_threads(1)  # a forked child has no other threads
    os.environ["OMP_NUM_THREADS"] = "1"
    table = Tally()
    artifacts = Artifacts(home.resolve() / "attack", sharded)
    if count:
        read_damaged(artifacts, count, seed, table, seconds)
    if most_malicious != 0:
        read_malicious(artifacts, most_malicious, seed, table, seconds)
    if most_commands != 0:
        bad_commands(home.resolve(), most_commands, seed, table, seconds)
    return table


def lines(table: Tally) -> Iterator[str]:
    """The table in Markdown."""
    yield "| attack | " + " | ".join(COLUMNS) + " |"
    yield "|---" * (len(COLUMNS) + 1) + "|"
    total: Counter[str] = Counter()
    for row, counts in table.counts.items():
        total.update(counts)
        yield f"| {row} | " + " | ".join(str(counts[column]) for column in COLUMNS) + " |"
    yield "| **all** | " + " | ".join(str(total[column]) for column in COLUMNS) + " |"


def show(table: Tally, console: Console) -> None:
    """Prints the table, and what was bad."""
    shown = Table("attack", *COLUMNS)
    for line in list(lines(table))[2:]:
        shown.add_row(*(cell.strip() for cell in line.strip("|").split("|")))
    console.print(shown)
    for one in table.bad:
        console.print(one, markup=False, highlight=False)


def main(words: list[str]) -> int:
    """Runs the attacks and prints the table; 1 if anything was wrong."""
    given = dict(word.partition("=")[::2] for word in words)
    number: Callable[[str], int | None] = lambda key: None if given.get(key, "all") == "all" else int(given[key])  # noqa: E731
    count, seed = int(given.get("reads", 1500)), int(given.get("seed", 0))
    with tempfile.TemporaryDirectory() as folder:
        home = Path(given.get("folder", folder))
        table = attack(home, count, number("malicious"), number("commands"), seed)
    show(table, Console(soft_wrap=True))
    if "report" in given:
        text = f"# Attacks\n\n`python -m metattt.testing.attack {' '.join(words)}`\n\n" + "\n".join(lines(table)) + "\n"
        Path(given["report"]).write_text(text + "".join(f"\n- {one}" for one in table.bad), encoding="utf-8")
    return 1 if table.bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
