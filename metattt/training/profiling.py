"""`trainer.profiler`: where the time of a run goes, in a file, and its first lines on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.profilers import AdvancedProfiler, Profiler, PyTorchProfiler, SimpleProfiler
from rich.console import Console

from metattt.errors import check_choice

NAME = "profile"
KINDS: dict[str, Any] = {"simple": SimpleProfiler, "advanced": AdvancedProfiler, "pytorch": PyTorchProfiler}
LINES = 40  # that are shown


def profiler(name: object, folder: Path) -> Profiler | None:
    """Lightning's profiler of a name, which writes to the folder of a run.

    Raises:
        MetaTTTError: another name.
    """
    if name is None:
        return None
    check_choice("trainer.profiler", name, KINDS)
    for old in folder.glob(f"*-{NAME}*.txt"):  # Lightning would write behind what is there
        old.unlink()
    made: Profiler = KINDS[str(name)](dirpath=folder, filename=NAME)
    return made


def show(console: Console, folder: Path) -> None:
    """Prints the first lines of what a profiler has written to the folder of a run."""
    for file in sorted(folder.glob(f"fit-{NAME}*.txt")):
        lines = [line.rstrip() for line in file.read_text(errors="replace").splitlines() if line.strip()]
        for line in lines[:LINES]:
            console.print(line, markup=False)
        rest = f" ({len(lines) - LINES:,} more lines)" if len(lines) > LINES else ""
        console.print(f"profile     {file}{rest}", markup=False)
