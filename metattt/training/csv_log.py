"""`metrics.csv`: rows are appended one by one; a kill at any moment loses no row before the last checkpoint."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from metattt.checkpoints.rolling import set_aside
from metattt.io import write_whole
from metattt.metrics_file import STEP, Row, of_validation, read_rows
from metattt.registry import register


@register(group="logger", name="csv_log")
class CSVLog(Logger):
    """A row for every step and every validation that is logged, with `step` and the metrics as columns, by name.

    Rows are only appended in place. A new column, or resuming before the last rows, replaces the file by a new one. Of
    several processes the first one writes.

    Args:
        path: the file.
    """

    def __init__(self, path: str):
        super().__init__()
        self.path = Path(path)
        self.columns: list[str] = []  # of the file; none: it is not there yet
        self._file: io.TextIOWrapper | None = None

    @property
    def name(self) -> str:
        return "csv_log"

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """They are in `run.yaml`."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Adds a row.

        Raises:
            OSError: it cannot be written.
        """
        row = {STEP: str(step), **{name: str(_number(value)) for name, value in metrics.items()}}
        if not set(row) <= set(self.columns):
            self._write_anew(sorted({*self.columns, *row}), read_rows(self.path)[0] if self.columns else [])
        if self._file is None:
            self._file = self.path.open("a", newline="", encoding="utf-8")
        self._file.write(_line([row.get(name, "") for name in self.columns]))
        self._file.flush()

    def sync(self) -> None:
        """Writes all rows to the disk, before a checkpoint is written.

        Raises:
            OSError: the disk is full.
        """
        if self._file is not None:
            os.fsync(self._file.fileno())

    def finalize(self, status: str) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    @rank_zero_only
    def go_on_from(self, step: int, validate_again: bool = False) -> str | None:
        """Truncates the log to the resume step: rows after `step` are dropped and will be written again, and the
        validation at it with `validate_again`. A damaged file is renamed, its readable rows are kept, and a line
        for the user is returned."""
        if not os.path.lexists(self.path):
            return None
        rows, damage = read_rows(self.path)
        last = [row for row in rows if int(row[STEP]) == step and not (validate_again and of_validation(row))]
        kept = [row for row in rows if int(row[STEP]) < step] + last
        note = None
        if damage:
            aside = set_aside(self.path)
            note = (
                f"log     {self.path} was damaged ({damage}) and is now {aside.name}; {len(kept)} rows of it are kept"
            )
        self.columns = []
        if kept:
            self._write_anew(list(kept[0]), kept)
        elif not damage:
            self.path.unlink()
        return note

    def _write_anew(self, columns: Sequence[str], rows: Sequence[Row]) -> None:
        """Replaces the file by a new one."""
        self.finalize("")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = [_line(columns), *(_line([row.get(name, "") for name in columns]) for row in rows)]
        write_whole(self.path, "".join(lines).encode())
        self.columns = list(columns)


def logs_of(trainer: lightning.Trainer) -> list[CSVLog]:
    """Our CSV loggers among the loggers of a run."""
    return [logger for logger in trainer.loggers if isinstance(logger, CSVLog)]


def logged_rows(trainer: lightning.Trainer) -> list[Row]:
    """The rows of a run's CSV log so far; empty without one."""
    return next((read_rows(log.path)[0] for log in logs_of(trainer)), [])


def _number(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _line(values: Sequence[str]) -> str:
    line = io.StringIO(newline="")
    csv.writer(line).writerow(values)
    return line.getvalue()
