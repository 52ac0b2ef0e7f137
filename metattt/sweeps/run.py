"""One run of a sweep: the command with its overrides, in a process of its own, and what is told to the sweeper."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from metattt.composition.overrides import in_full, key_of, quoted
from metattt.errors import MetaTTTError
from metattt.sweeps.record import OUTPUT, State, Status, read_status, write_status
from metattt.sweeps.table import read_run

STOPPED = {130: "Ctrl-C", 143: "SIGTERM", 138: "SIGUSR1"}  # exit codes of a run that has written a checkpoint
STOPPING = ".stopping"
"""A file in the folder of a sweep that was told to stop: its runs stop as well."""
GRACE_SECONDS = 5  # after Ctrl-C, which the run's process may have had as well


@dataclass(frozen=True)
class SweptRun:
    """What Hydra's launchers call for every run, in this process or in others."""

    command: str  # of metattt
    fixed: list[str]  # overrides that all runs have, as they were typed
    own: list[str]  # settings of the command beside them, such as `resume=auto`
    foldered: bool  # the command has an `output_dir`
    objective: str  # what the sweeper is told: a column of `metrics.csv`
    raises: bool  # the sweeper takes an exception for a run that failed, and continues
    sweeper: int  # process that the sweep was started in
    # processes of runs that this very object has started; empty in the sweep if its launcher uses others
    here: list[int] = field(default_factory=list)

    def __call__(self, cfg: DictConfig) -> float:
        """Runs the command, unless it has finished before; returns the last value of the objective, or NaN.

        Raises:
            MetaTTTError: it has not finished, and `raises`.
        """
        hydra = HydraConfig.get()
        folder, fixed_keys = Path(hydra.runtime.output_dir), {key_of(in_full(one)) for one in self.fixed}
        fixed = [f"metattt {self.command}", *self.fixed]
        swept = sorted(one for one in hydra.overrides.task if key_of(one) not in fixed_keys)
        before, title = read_status(folder), re.sub(r"(?<!\S)\++", "", " ".join(swept)) or "(one)"
        if before is not None and (before.swept, sorted(before.fixed)) != (swept, sorted(fixed)):
            return self._end(f"{title} failed: {folder} holds another run: choose another hydra.sweep.dir", math.nan)
        missing = f"{folder} has no {self.objective} for the sweeper: set objective=<a column of its metrics.csv>"
        if before is not None and before.state == "finished":
            return self._end(f"{title}: finished before", read_run(folder).final(self.objective), missing)
        stopping = Path(hydra.sweep.dir) / STOPPING
        if stopping.exists():
            raise KeyboardInterrupt
        print(f"run     {title} -> {folder}", flush=True)
        began, status = time.monotonic(), Status(swept, fixed, "running")
        write_status(folder, status)
        place = [f"output_dir={quoted(str(folder))}"] if self.foldered else []
        try:
            code = self._process(folder, status, stopping, [*self.fixed, *swept, *self.own, *place])
        except BaseException as stop:  # Ctrl-C, and that of a launcher whose time is over
            why: Any = getattr(stop, "code", type(stop).__name__)
            write_status(folder, status._replace(state="stopped", message=STOPPED.get(why, str(why))))
            raise
        seconds = round(time.monotonic() - began, 1)
        state: State = "finished" if code == 0 else "stopped" if code in STOPPED else "failed"
        said = "" if code == 0 else STOPPED.get(code) or reason(folder, code)
        write_status(folder, status._replace(state=state, message=said, seconds=seconds))
        if code:
            return self._end(f"{title} {state}: {said}", math.nan)
        value = read_run(folder).final(self.objective)
        told = "" if math.isnan(value) else f": {self.objective} {value:.4f}"
        return self._end(f"{title} finished in {seconds:.0f} s{told}", value, missing)

    def _end(self, line: str, value: float, missing: str = "") -> float:
        print(f"run     {line}", flush=True)
        if self.raises and math.isnan(value):
            raise MetaTTTError(missing or line)
        return value

    def _process(self, folder: Path, status: Status, stopping: Path, words: Sequence[str]) -> int:
        """Runs the command in a process of its own (`metattt.sweeps.__main__`); its exit code. A run that crashes, or
        takes all memory, takes nothing else with it."""
        starter = os.getppid()
        places = os.pathsep.join(one or os.getcwd() for one in sys.path)  # it sees the modules that the sweep sees
        with (folder / OUTPUT).open("a") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", "-u", "-m", "metattt.sweeps", self.command, *words],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=os.environ | {"PYTHONPATH": places},
            )  # fmt: skip
        self.here.append(process.pid)
        try:
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.5)
                if stopping.exists():
                    raise KeyboardInterrupt
                if starter == self.sweeper != os.getppid():  # a worker whose sweep was killed
                    process.terminate()
                    process.wait()
                    write_status(folder, status._replace(state="stopped", message="SIGKILL"))
                    os._exit(1)  # nobody waits for more
        except BaseException as stop:
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS if isinstance(stop, KeyboardInterrupt) else 0)
            process.terminate()
            process.wait()
            raise
        return process.returncode


def reason(folder: Path, code: int) -> str:
    """Why a run failed: the last line of its output that says so."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    text = (folder / OUTPUT).read_text(errors="replace")
    errors = re.findall(r"^error: (.*)$", text, flags=re.MULTILINE)
    said = (errors or [line.strip() for line in text.splitlines() if line.strip()] or [""])[-1]
    return f"{said[:300]} ({folder / OUTPUT})" if said else f"exit code {code}"
