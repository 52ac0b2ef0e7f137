"""One cell of a sweep: the command with its overrides, in a process of its own, and what is told to the sweeper."""

from __future__ import annotations

import importlib.util
import math
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from unittest import mock

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from metattt.errors import MetaTTTError
from metattt.metrics_file import of_validation, read_rows
from metattt.sweeps.record import OUTPUT, Cell, read_cell, same, write_cell

STOPPED = {130: "Ctrl-C", 143: "SIGTERM", 138: "SIGUSR1"}  # exit codes of a run that has written a checkpoint
GRACE_SECONDS = 5  # after Ctrl-C, which the cell's process may have had as well


class CellFailed(MetaTTTError):
    """A cell that did not finish, for a sweeper that has to know."""


@dataclass(frozen=True)
class RunCell:
    """What Hydra's launchers call for every cell, in this process or in others.

    Attributes:
        command: of metattt.
        module: that it is in, with all it imports.
        fixed: overrides that all cells have, as they were typed.
        fixed_keys: the keys of these.
        own: keys of the command that the sweep sets: `output_dir`, `resume`.
        trust: modules with classes that the overrides name.
        objective: what the sweeper is told: a column of `metrics.csv`.
        raises: the sweeper takes an exception for a cell that failed, and goes on.
        sweeper: process that the sweep was started in.
    """

    command: str
    module: str
    fixed: list[str]
    fixed_keys: list[str]
    own: tuple[str, ...]
    trust: str | None
    objective: str
    raises: bool
    sweeper: int

    def __call__(self, cfg: DictConfig) -> float:
        """Runs the cell, unless it has finished before; returns the last value of the objective, or NaN.

        Raises:
            CellFailed: it has not finished, and `raises`.
        """
        hydra = HydraConfig.get()
        folder = Path(hydra.runtime.output_dir)
        swept = sorted(one for one in hydra.overrides.task if key_of(one) not in self.fixed_keys)
        before = read_cell(folder)
        if before is not None and not (same(before.swept, swept) and same(before.fixed, self.fixed)):
            return self._end(
                Cell(swept, self.fixed, "failed", f"{folder} holds another cell: choose another hydra.sweep.dir"),
                folder,
            )
        if before is not None and before.state == "finished":
            print(f"cell    {_title(swept)}: finished before", flush=True)
            return last_value(folder, self.objective)
        print(f"cell    {_title(swept)} -> {folder}", flush=True)
        began, starter = time.monotonic(), os.getppid()
        write_cell(folder, Cell(swept, self.fixed, "running"))
        try:
            code = self._process(folder, [*self.fixed, *swept, *self._settings(folder)])
        except KeyboardInterrupt:
            write_cell(folder, Cell(swept, self.fixed, "stopped", "Ctrl-C", time.monotonic() - began))
            raise
        seconds = round(time.monotonic() - began, 1)
        cell = Cell(swept, self.fixed, "finished", "", seconds)
        if code in STOPPED:
            cell = cell._replace(state="stopped", message=STOPPED[code])
        elif code:
            cell = cell._replace(state="failed", message=reason(folder, code))
        write_cell(folder, cell)
        if self._is_orphan(starter):
            os._exit(1)  # nobody waits for more
        return self._end(cell, folder)

    def _end(self, cell: Cell, folder: Path) -> float:
        if cell.state == "finished":
            value = last_value(folder, self.objective)
            told = "" if math.isnan(value) else f": {self.objective} {value:.4f}"
            print(f"cell    {_title(cell.swept)} finished in {cell.seconds:.0f} s{told}", flush=True)
            if not math.isnan(value) or not self.raises:
                return value
            raise CellFailed(
                f"{folder} has no {self.objective} to tell the sweeper: set objective=<a column of its metrics.csv>"
            )
        line = f"{_title(cell.swept)} {cell.state}: {cell.message}"
        print(f"cell    {line}", flush=True)
        if self.raises:
            raise CellFailed(line)
        return math.nan

    def _settings(self, folder: Path) -> list[str]:
        """The folder, and that a run in it goes on."""
        values = {"output_dir": str(folder), "resume": "auto", "trust": self.trust}
        return [f"{key}={values[key]}" for key in self.own if values[key] is not None]

    def _process(self, folder: Path, words: Sequence[str]) -> int:
        """Runs the command in a process that is forked from a server which has imported it; its exit code.

        A cell that crashes, or takes all memory, takes nothing else with it, and begins without importing torch anew.
        """
        starter = os.getppid()
        process = start(self.command, self.module, words, folder / OUTPUT)
        try:
            while process.exitcode is None:
                process.join(0.5)
                if self._is_orphan(starter):
                    process.terminate()
        except KeyboardInterrupt:
            process.join(GRACE_SECONDS)
            process.terminate()
            process.join()
            raise
        return process.exitcode

    def _is_orphan(self, starter: int) -> bool:
        """Whether this is a worker whose sweep was killed. `starter`: the parent of this process when the cell began."""
        return starter == self.sweeper != os.getppid()


def start(command: str, module: str, words: Sequence[str], output: Path) -> ForkServerProcess:
    """Starts a command in a process that is forked from a server which has imported it, and does not wait for it.

    Args:
        command: of metattt.
        module: that it is in; the first of a server's life is imported beforehand.
        words: its overrides.
        output: file that what it writes is added to.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    arguments = (command, list(words), str(output), dict(os.environ), os.getcwd())
    process = context.Process(target=_live, args=arguments, name="cell")
    with mock.patch(
        "multiprocessing.spawn.get_start_method", return_value="forkserver"
    ):  # joblib's own one stands there
        process.start()
    return process


def _live(command: str, words: list[str], output: str, environment: dict[str, str], cwd: str) -> None:
    """In the cell's process: the command line, with what it writes in a file."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    with open(output, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.argv = ["metattt", command, *words]  # with which a run starts the other processes of trainer=ddp
    sys.modules["__main__"].__spec__ = importlib.util.find_spec("metattt.cli")
    threading.Thread(target=_follow_the_sweep, daemon=True, name="sweep").start()
    from metattt.cli import main

    sys.exit(main([command, *words]))


def _follow_the_sweep() -> None:
    """When the process that started the cell has died, the run writes a checkpoint and stops."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def key_of(override: str) -> str:
    """The key of an override, or its group."""
    return override.partition("=")[0].lstrip("+~").partition("@")[0]


def last_value(folder: Path, column: str) -> float:
    """The last value of a column of a run's `metrics.csv`; of those of validation only, that after the last step. NaN if
    there is none."""
    file = folder / "metrics.csv"
    rows = read_rows(file)[0] if file.is_file() else []
    if column.startswith("validation/"):
        rows = [row for row in rows if of_validation(row)]
    values = [row[column] for row in rows if row.get(column)]
    return float(values[-1]) if values else math.nan


def _title(swept: Sequence[str]) -> str:
    return " ".join(swept) or "(one)"


def reason(folder: Path, code: int) -> str:
    """Why a cell failed: the last line of its output that says so."""
    if code < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"killed by {names.get(-code, -code)}"
    try:
        text = (folder / OUTPUT).read_text(errors="replace")
    except OSError:
        return f"exit code {code}"
    errors = re.findall(r"^error: (.*)$", text, flags=re.MULTILINE)
    lines = [line for line in text.splitlines() if line.strip()]
    said: str = errors[-1] if errors else lines[-1].strip() if lines else ""
    return f"{said[:300]} ({folder / OUTPUT})" if said else f"exit code {code}"
