"""Progress in bytes: a bar on a terminal, a line now and then in a file."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

LINES = 10  # of a run whose output is not a terminal


class BytesProgress:
    """A context manager that shows how much text is done.

    Args:
        total: bytes, roughly; None if not known.
        done: bytes of an earlier run.
    """

    def __init__(self, total: int | None, done: int):
        self.total, self.first, self.done = total, done, done
        self.started, self.shown = time.monotonic(), 0
        console = Console(stderr=True)
        columns = (
            TextColumn("tokenising"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        self.bar = Progress(*columns, console=console) if console.is_terminal else None

    def __enter__(self) -> BytesProgress:
        if self.bar is not None:
            self.bar.start()
            self.task = self.bar.add_task("", total=self.total, completed=self.done)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def advance(self, num_bytes: int) -> None:
        """Counts text that is done."""
        self.done += num_bytes
        if self.bar is not None:
            self.bar.advance(self.task, num_bytes)
        elif self.total and self.done * LINES // self.total > self.shown:
            self.shown = self.done * LINES // self.total
            speed = (self.done - self.first) / 1e6 / (time.monotonic() - self.started)
            print(f"{self.done / 1e6:.1f} of {self.total / 1e6:.1f} MB, {speed:.1f} MB/s", file=sys.stderr, flush=True)
