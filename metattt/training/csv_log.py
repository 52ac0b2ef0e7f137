"""`metrics.csv`: rows are appended one by one; a kill at any moment loses no row before the last checkpoint."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning import Trainer
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

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

    name, version = "csv_log", ""  # which Lightning asks of every logger

    def __init__(self, path: str):
        super().__init__()
        self.path = Path(path)
        self.columns: list[str] = []  # of the file; none: it is not there yet
        self._file: io.TextIOWrapper | None = None

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """They are in `run.yaml`."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Adds a row."""
        plain = {name: value.item() if isinstance(value, Tensor) else value for name, value in metrics.items()}
        row = {STEP: str(step), **{name: str(value) for name, value in plain.items()}}
        if not set(row) <= set(self.columns):
            self._write_anew(sorted({*self.columns, *row}), read_rows(self.path)[0] if self.columns else [])
        if self._file is None:
            self._file = self.path.open("a", newline="", encoding="utf-8")
        csv.DictWriter(self._file, self.columns).writerow(row)
        self._file.flush()

    def sync(self) -> None:
        """Writes all rows to the disk, before a checkpoint is written."""
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
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns)
        writer.writeheader()
        writer.writerows(rows)
        write_whole(self.path, text.getvalue().encode())
        self.columns = list(columns)


def logs_of(trainer: Trainer) -> list[CSVLog]:
    """Our CSV loggers among the loggers of a run."""
    return [logger for logger in trainer.loggers if isinstance(logger, CSVLog)]
