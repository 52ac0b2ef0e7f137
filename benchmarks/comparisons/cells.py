"""Cells of a claim: commands with overrides, each in a process and a folder of its own, run once and never again,
unless what their overrides are composed to has changed."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from common import Say
from omegaconf import OmegaConf

from metattt.composition.compose import compose
from metattt.composition.overrides import quoted
from metattt.errors import MetaTTTError
from metattt.io import digest, read_object, write_whole

RECORD, LOG = "cell.json", "output.txt"
PROCESSES = multiprocessing.get_context("forkserver")  # libraries are imported once
PROCESSES.set_forkserver_preload(["metattt.training.train", "metattt.evaluation.evaluate"])


class Cell(NamedTuple):
    """One command.

    Attributes:
        name: what it is, in words: for people, and the beginning of its folder's name.
        command: `train` or `eval` of metattt.
        overrides: all that it is given but `output_dir`.
        of: the cell whose run it is about: it gets `checkpoint=` that run, and a folder inside of that one's.
    """

    name: str
    command: str
    overrides: tuple[str, ...]
    of: Cell | None = None

    @property
    def place(self) -> Path:
        """Its folder, relative to that of the claim; with other overrides it is another cell."""
        own = digest(json.dumps([self.command, *self.overrides]).encode())[:8]
        if self.of is not None:
            return self.of.place / f"{self.command}-{own}"
        return Path(f"{re.sub(r'[^A-Za-z0-9.=_-]+', '-', self.name)[:80]}-{own}")

    @property
    def composed(self) -> str:
        """A checksum of what the overrides are composed to: the same words are another run where a configuration file
        has changed."""
        return digest(OmegaConf.to_yaml(compose(*self.overrides, job=self.command)).encode())


class Result(NamedTuple):
    """What became of a cell: its files, whether it has all of them, why not, and the seconds that it took."""

    cell: Cell
    folder: Path
    finished: bool
    message: str
    seconds: float


class Runner:
    """Runs cells, several at a time if asked; those that are finished are not run again.

    Args:
        folder: of the claim's cells.
        jobs: processes at a time.
        total: number of cells, for people.
        say: shows a line.
    """

    def __init__(self, folder: Path, jobs: int, total: int, say: Say):
        self.folder, self.jobs, self.total, self.say = folder.absolute(), jobs, total, say
        self.results: dict[Cell, Result] = {}
        self._running: set[multiprocessing.process.BaseProcess] = set()
        self._lock = threading.Lock()

    def run(self, cells: Sequence[Cell]) -> list[Result]:
        """The results of cells, in order. A cell that fails stops no other but those that are about its run.

        Raises:
            KeyboardInterrupt: Ctrl-C; the cells have stopped, with a checkpoint where their command writes one.
        """
        pool = ThreadPoolExecutor(self.jobs)
        try:
            list(pool.map(self._take, [cell for cell in dict.fromkeys(cells) if cell not in self.results]))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(self._running):
                process.terminate()  # of training: it finishes the step and writes a checkpoint
            raise
        finally:
            pool.shutdown()
        return [self.results[cell] for cell in cells]

    def _take(self, cell: Cell) -> None:
        folder, words = self.folder / cell.place, list(cell.overrides)
        record = folder / RECORD
        try:
            composed = cell.composed
        except MetaTTTError as error:  # what the same words have made before stays
            return self._set(Result(cell, folder, False, str(error), 0.0), "failed")
        known = read_object(record) if record.is_file() else {}
        if known.get("composed") != composed:
            shutil.rmtree(folder, ignore_errors=True)
            known = {}
        if "seconds" in known:
            return self._set(Result(cell, folder, True, "", known["seconds"]), "finished before")
        if cell.of is not None:
            if not self.results[cell.of].finished:
                return self._set(Result(cell, folder, False, f"{cell.of.name} has not finished", 0.0), "left out")
            words.append(f"checkpoint={quoted(str(self.folder / cell.of.place))}")
        if cell.command == "train":
            words.append("resume=auto")
        elif folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        known = {"overrides": cell.overrides, "composed": composed}
        write_whole(record, json.dumps(known).encode())
        began = time.monotonic()
        words.append(f"output_dir={quoted(str(folder))}")
        process = PROCESSES.Process(target=_work, args=(cell.command, words, str(folder / LOG)))
        self._running.add(process)
        process.start()
        process.join()
        self._running.discard(process)
        seconds = round(time.monotonic() - began, 1)
        if process.exitcode:
            log = folder / LOG
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
            told = next((line for line in reversed(lines) if line.startswith("error: ")), (lines or ["no output"])[-1])
            return self._set(Result(cell, folder, False, f"exit code {process.exitcode}: {told}", seconds), "failed")
        write_whole(record, json.dumps(known | {"seconds": seconds}).encode())
        return self._set(Result(cell, folder, True, "", seconds), f"finished in {seconds:.0f} s")

    def _set(self, result: Result, how: str) -> None:
        with self._lock:
            self.results[result.cell] = result
            place = f"cell {len(self.results)}/{self.total} {result.cell.name}"
            self.say(f"{place}: {how} {result.message}".rstrip())


def _work(command: str, words: list[str], log: str) -> None:
    """In a process of its own: what it says goes to a file."""
    with open(log, "a", encoding="utf-8") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    from metattt.cli import main

    sys.exit(main([command, *words]))
