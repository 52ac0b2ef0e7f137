"""How far a claim is: cells done, time left, and the last figures of those that run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from metattt.metrics_file import STEP, read_rows

SHOWN = ("validation/bits_per_byte", "validation/top1", "validation/loss", "train/loss")


class Progress:
    """A bar on a terminal, and a line for every cell elsewhere; a context manager.

    Args:
        total: cells.
        jobs: that run at a time.
        minutes: what the claim says that all of them take, until there is something to go by.
    """

    def __init__(self, total: int, jobs: int, minutes: float):
        self.total, self.jobs, self.minutes = total, jobs, minutes
        self.done, self.seconds = 0, 0.0
        self.console = Console(highlight=False, soft_wrap=True)
        columns = (
            BarColumn(), MofNCompleteColumn(), TextColumn("cells, {task.fields[left]}"), TextColumn("{task.description}"),
        )  # fmt: skip
        self.bar = Bar(*columns, console=self.console, disable=not self.console.is_terminal)
        self.task = self.bar.add_task("", total=total, left=self.left)

    def __enter__(self) -> Progress:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    @property
    def left(self) -> str:
        """How long it still takes, from the cells that are done."""
        cells = self.total - self.done
        whole = self.seconds / self.done * self.total if self.seconds and self.done else self.minutes * 60
        seconds = whole * cells / max(1, self.total) / self.jobs
        return "done" if cells <= 0 else f"about {seconds / 60:.0f} min left" if seconds > 90 else f"about {seconds:.0f} s left"

    def say(self, line: str) -> None:
        """Shows a line above the bar."""
        self.console.print(line, markup=False)

    def ended(self, name: str, seconds: float, message: str, before: bool) -> None:
        """A cell has its result. `before`: it needed no run."""
        self.done, self.seconds = self.done + 1, self.seconds + seconds
        what = f"failed: {message}" if message else "finished before" if before else f"finished in {seconds:.0f} s"
        self.bar.update(self.task, completed=self.done, left=self.left)
        if message or not self.console.is_terminal:
            self.say(f"cell    {self.done}/{self.total} {name} {what}, {self.left}")

    def look(self, running: Sequence[tuple[str, Path]]) -> None:
        """Shows the last figures of the cells that run: names and folders."""
        if self.console.is_terminal:
            told = "; ".join(f"{name}{_figure(folder)}" for name, folder in running)
            self.bar.update(self.task, description=told.replace("[", "\\["), left=self.left)


def _figure(folder: Path) -> str:
    """The last row of a run's log, in a few words."""
    log = folder / "metrics.csv"
    rows = read_rows(log)[0] if log.is_file() else []
    for column in SHOWN:
        found = [row for row in rows if row.get(column)]
        if found:
            return f": step {rows[-1][STEP]}, {column} {float(found[-1][column]):.3f}"
    return ""
