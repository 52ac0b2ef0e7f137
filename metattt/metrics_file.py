"""`metrics.csv`, the log of a run, as it is read: a row for every step and every validation that was logged."""

from __future__ import annotations

import csv
from pathlib import Path

LOG = "metrics.csv"
STEP = "step"
Row = dict[str, str]

CLOCK = ("tokens_per_second", "images_per_second", "model_tflops_per_second", "peak_memory_gib")
"""Columns about the machine: they differ between equal runs."""


def read_rows(path: Path) -> tuple[list[Row], str]:
    """The readable rows of a log, and why the others are not readable (empty if all are).

    A last line that was cut off by a kill is left out without a reason.
    """
    if not path.is_file():  # a folder, or a link that leads nowhere
        return [], "it is not a file"
    content = path.read_bytes()
    content = content[: content.rfind(b"\n") + 1]
    text, damage = content.decode("utf-8", "replace"), ""
    lines = [line for line in csv.reader(text.replace("\0", "\ufffd").splitlines()) if line]
    if not lines:
        return [], ""
    columns, rows = lines[0], []
    if STEP not in columns or len(set(columns)) < len(columns):
        return [], "its first line does not name the columns"
    for number, line in enumerate(lines[1:], 2):
        row = dict(zip(columns, line, strict=False))
        if len(line) == len(columns) and row[STEP].isdecimal() and all(_is_number(value) for value in line):
            rows.append(row)
        else:
            damage = damage or f"line {number} is not a row of it"
    return rows, damage


def of_validation(row: Row) -> bool:
    """Whether a row is of a validation: a step has metrics of the training, a validation none."""
    return not any(value for name, value in row.items() if name.startswith("train/"))


def larger_is_better(column: str) -> bool:
    """Whether the larger one of two values is the better one: of accuracies, PSNR and speeds."""
    return column.endswith(("top1", "top5", "accuracy", "_per_second")) or "/psnr_" in column


def _is_number(value: str) -> bool:
    try:
        return not value or float(value) is not None
    except ValueError:
        return False
