"""One cell of a sweep: the command with its overrides, in a process of its own, and what is told to the sweeper."""

from __future__ import annotations

import importlib.util
import math
import multiprocessing
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

from metattt.composition.overrides import key_of, quoted
from metattt.errors import MetaTTTError
from metattt.metrics_file import of_validation, read_rows
from metattt.sweeps.record import OUTPUT, Cell, read_cell, write_cell

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
        own: settings of the command beside them, such as `resume=auto`.
        foldered: the command has an `output_dir`.
        objective: what the sweeper is told: a column of `metrics.csv`.
        raises: the sweeper takes an exception for a cell that failed, and goes on.
        sweeper: process that the sweep was started in.
    """

    command: str
    module: str
    fixed: list[str]
    own: list[str]
    foldered: bool
    objective: str
    raises: bool
    sweeper: int

    def __call__(self, cfg: DictConfig) -> float:
        """Runs the cell, unless it has finished before; returns the last value of the objective, or NaN.

        Raises:
            CellFailed: it has not finished, and `raises`.
        """
        hydra = HydraConfig.get()
        folder, fixed_keys = Path(hydra.runtime.output_dir), {key_of(one) for one in self.fixed}
        fixed = [f"metattt {self.command}", *self.fixed]
        swept = sorted(one for one in hydra.overrides.task if key_of(one) not in fixed_keys)
        before, title = read_cell(folder), " ".join(swept) or "(one)"
        if before is not None and (before.swept, sorted(before.fixed)) != (swept, sorted(fixed)):
            return self._end(f"{title} failed: {folder} holds another cell: choose another hydra.sweep.dir", math.nan)
        if before is not None and before.state == "finished":
            print(f"cell    {title}: finished before", flush=True)
            return last_value(folder, self.objective)
        print(f"cell    {title} -> {folder}", flush=True)
        began, cell = time.monotonic(), Cell(swept, fixed, "running")
        write_cell(folder, cell)
        place = [f"output_dir={quoted(str(folder))}"] if self.foldered else []
        try:
            code = self._process(folder, [*self.fixed, *swept, *self.own, *place])
        except BaseException as stop:  # Ctrl-C, and that of a launcher whose time is over
            write_cell(folder, cell._replace(state="stopped", message=type(stop).__name__))
            raise
        seconds, said = round(time.monotonic() - began, 1), ""
        state = "finished" if code == 0 else "stopped" if code in STOPPED else "failed"
        if code:
            said = STOPPED.get(code) or reason(folder, code)
        write_cell(folder, cell._replace(state=state, message=said, seconds=seconds))  # type: ignore[arg-type]
        if code:
            return self._end(f"{title} {state}: {said}", math.nan)
        value = last_value(folder, self.objective)
        told = "" if math.isnan(value) else f": {self.objective} {value:.4f}"
        missing = f"{folder} has no {self.objective} to tell the sweeper: set objective=<a column of its metrics.csv>"
        return self._end(f"{title} finished in {seconds:.0f} s{told}", value, missing)

    def _end(self, line: str, value: float, missing: str = "") -> float:
        print(f"cell    {line}", flush=True)
        if self.raises and math.isnan(value):
            raise CellFailed(missing or line)
        return value

    def _process(self, folder: Path, words: Sequence[str]) -> int:
        """Runs the command in a process that is forked from a server which has imported it; its exit code.

        A cell that crashes, or takes all memory, takes nothing else with it, and begins without importing torch anew.
        """
        starter = os.getppid()
        process = start(self.command, self.module, words, folder / OUTPUT)
        try:
            while process.exitcode is None:
                process.join(0.5)
                if starter == self.sweeper != os.getppid():  # a worker whose sweep was killed
                    process.terminate()
                    process.join()
                    write_cell(folder, read_cell(folder)._replace(state="stopped", message="SIGKILL"))  # type: ignore[union-attr]
                    os._exit(1)  # nobody waits for more
        except BaseException as stop:
            process.join(GRACE_SECONDS if isinstance(stop, KeyboardInterrupt) else 0)
            process.terminate()
            process.join()
            raise
        return process.exitcode


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


def last_value(folder: Path, column: str) -> float:
    """The last value of a column of a run's `metrics.csv`; of those of validation only, that after the last step. NaN
    if there is none."""
    file = folder / "metrics.csv"
    rows = read_rows(file)[0] if file.is_file() else []
    values = [
        row[column] for row in rows if row.get(column) and (of_validation(row) or not column.startswith("validation/"))
    ]
    return float(values[-1]) if values else math.nan


def reason(folder: Path, code: int) -> str:
    """Why a cell failed: the last line of its output that says so."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    try:
        text = (folder / OUTPUT).read_text(errors="replace")
    except OSError:
        return f"exit code {code}"
    errors = re.findall(r"^error: (.*)$", text, flags=re.MULTILINE)
    said = (errors or [line.strip() for line in text.splitlines() if line.strip()] or [""])[-1]
    return f"{said[:300]} ({folder / OUTPUT})" if said else f"exit code {code}"
