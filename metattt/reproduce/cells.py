"""Cells of a claim: commands with overrides, each in a process and a folder of its own, run once and never again, unless what
their overrides are composed to has changed."""

from __future__ import annotations

import json
import multiprocessing.connection
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from omegaconf import OmegaConf

from metattt.composition.compose import compose
from metattt.errors import MetaTTTError
from metattt.io import digest
from metattt.reproduce.progress import Progress
from metattt.sweeps.cell import GRACE_SECONDS, STOPPED, reason, start
from metattt.sweeps.record import CELL, OUTPUT, read_cell, write_cell
from metattt.sweeps.record import Cell as Record

MODULES = {  # what the processes are forked with
    "train": "metattt.training.train",
    "eval": "metattt.evaluation.evaluate",
    "bench": "metattt.bench.run",
}
GOES_ON = ("train",)  # commands that find their own checkpoint; the others begin anew in an empty folder
FIGURES = (".csv", ".json")  # of the files that commands leave in their folder
LOOK_SECONDS = 0.5


class Cell(NamedTuple):
    """One command.

    Attributes:
        name: what it is, in words: for people, and the beginning of its folder's name.
        command: of metattt.
        overrides: all that it is given but `output_dir`.
        of: the cell whose run it is about: it gets `checkpoint=` that run, and a folder inside of that one's.
    """

    name: str
    command: str
    overrides: tuple[str, ...]
    of: Cell | None = None

    @property
    def place(self) -> Path:
        """Its folder, relative to that of the claim. The name holds a checksum of the overrides: with others it is
        another cell."""
        own = digest(json.dumps([self.command, *self.overrides]).encode())[:8]
        if self.of is not None:
            return self.of.place / f"{self.command}-{own}"
        return Path(f"{re.sub(r'[^A-Za-z0-9.=_-]+', '-', self.name)[:80]}-{own}")


def made_of(cell: Cell) -> str:
    """A checksum of what a cell's overrides are composed to: the same words are another run where a configuration file has
    changed. Empty where they cannot be composed, which the cell will say."""
    try:
        return digest(OmegaConf.to_yaml(compose(*cell.overrides, job=cell.command)).encode())
    except MetaTTTError:
        return ""


def left_in(folder: Path) -> dict[str, str]:
    """Name -> checksum of the files that a cell's figures are read from."""
    files = (file for file in sorted(folder.iterdir()) if file.suffix in FIGURES and file.name != CELL and file.is_file())
    return {file.name: digest(file.read_bytes()) for file in files}


class Result(NamedTuple):
    """What became of a cell.

    Attributes:
        cell: the cell.
        folder: its files.
        finished: it has all of them.
        message: why it has not.
        seconds: that it took.
    """

    cell: Cell
    folder: Path
    finished: bool
    message: str
    seconds: float


@dataclass
class _Running:
    cell: Cell
    folder: Path
    process: multiprocessing.process.BaseProcess
    began: float
    fixed: list[str]  # of its record


class Runner:
    """Runs cells, several at a time if asked; those that are finished are not run again.

    Args:
        folder: of the claim's cells; it exists.
        jobs: processes at a time.
        progress: is told of everything.
    """

    def __init__(self, folder: Path, jobs: int, progress: Progress):
        self.folder, self.jobs, self.progress = folder, jobs, progress
        self.results: dict[Cell, Result] = {}

    def run(self, cells: Sequence[Cell]) -> list[Result]:
        """The results of cells, in order. A cell that fails stops no other but those that are about its run.

        Raises:
            KeyboardInterrupt: Ctrl-C; the cells have stopped, with a checkpoint where their command writes one.
        """
        waiting = [cell for cell in dict.fromkeys(cells) if cell not in self.results]
        running: list[_Running] = []
        try:
            while waiting or running:
                while len(running) < self.jobs:
                    pending = {*waiting, *(one.cell for one in running)}
                    ready = next((cell for cell in waiting if cell.of not in pending), None)
                    if ready is None:
                        break
                    waiting.remove(ready)
                    begun = self._begin(ready)
                    running += [] if begun is None else [begun]
                multiprocessing.connection.wait([one.process.sentinel for one in running], LOOK_SECONDS)
                for one in [one for one in running if one.process.exitcode is not None]:
                    running.remove(one)
                    self._end(one, one.process.exitcode or 0)
                self.progress.look([(one.cell.name, one.folder) for one in running])
        except BaseException:
            self._stop(running)
            raise
        return [self.results[cell] for cell in cells]

    def _begin(self, cell: Cell) -> _Running | None:
        """Starts a cell; None if it has its result already."""
        folder = self.folder / cell.place
        overrides = list(cell.overrides)
        if cell.of is not None:
            run = self.folder / cell.of.place
            trained = read_cell(run)
            if trained is None or trained.state != "finished":
                self._set(Result(cell, folder, False, f"{cell.of.name} has not finished", 0.0), True)
                return None
            overrides.append(f"checkpoint={_quoted(run)}")
        record, fixed = self._record(cell, folder), [cell.command, made_of(cell)]
        known = record is not None and record.fixed == fixed
        if record is not None and known and record.state == "finished":
            self._set(Result(cell, folder, True, "", record.seconds), True)
            return None
        if folder.exists() and not (known and cell.command in GOES_ON):
            shutil.rmtree(folder)
        if cell.command in GOES_ON:
            overrides.append("resume=auto")
        folder.mkdir(parents=True, exist_ok=True)
        write_cell(folder, Record(list(cell.overrides), fixed, "running"))
        words = [*overrides, f"output_dir={_quoted(folder)}"]
        process = start(cell.command, MODULES.get(cell.command, MODULES["train"]), words, folder / OUTPUT)
        return _Running(cell, folder, process, time.monotonic(), fixed)

    def _record(self, cell: Cell, folder: Path) -> Record | None:
        """What is known of a cell; None where its record or its figures are not as they were written, which is said."""
        try:
            record = read_cell(folder)
            damaged = CELL if record is None and folder.exists() else None
        except MetaTTTError:
            record, damaged = None, CELL
        if record is not None and record.state == "finished" and record.files is not None:
            found = left_in(folder)
            damaged = next((name for name, checksum in record.files.items() if found.get(name) != checksum), None)
        if damaged is None:
            return record
        self.progress.say(f"cell    {cell.name}: {folder / damaged} is not as it was written: run again")
        return None

    def _end(self, one: _Running, code: int) -> None:
        seconds = round(time.monotonic() - one.began, 1)
        state, message = "finished", ""
        if code in STOPPED:
            state, message = "stopped", STOPPED[code]
        elif code:
            state, message = "failed", reason(one.folder, code).replace(f" ({one.folder / OUTPUT})", "")
        files = left_in(one.folder) if state == "finished" else None
        record = Record(list(one.cell.overrides), one.fixed, state, message, seconds, files)  # type: ignore[arg-type]
        write_cell(one.folder, record)
        self._set(Result(one.cell, one.folder, state == "finished", message, seconds), False)

    def _set(self, result: Result, before: bool) -> None:
        self.results[result.cell] = result
        self.progress.ended(result.cell.name, result.seconds, result.message, before)

    def _stop(self, running: Sequence[_Running]) -> None:
        """Ctrl-C may have reached the cells as well: they get the time to write a checkpoint."""
        until = time.monotonic() + GRACE_SECONDS
        for one in running:
            one.process.join(max(0.0, until - time.monotonic()))
            if one.process.exitcode is None:
                one.process.terminate()
        for one in running:
            one.process.join()
            write_cell(one.folder, Record(list(one.cell.overrides), one.fixed, "stopped", "Ctrl-C"))


def _quoted(path: Path) -> str:
    """A path as a value of an override."""
    text = str(path).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"
