"""The files of an evaluation, which do not write over those before them."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from metattt.errors import MetaTTTError
from metattt.io import path_of
from metattt.optional import absence


class Report:
    """Takes the first free number for `<name><number>.csv` in a folder: nothing, `-2`, `-3`, …, which all files of the
    report then have; another process at the same time takes another one.

    Attributes:
        written: the files, in their order.
        no_pictures: why no picture is written; None if they are.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, name: str):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.written = folder, list[Path]()
        self.no_pictures = absence("matplotlib", extra="train", what="writing pictures")
        for count in itertools.count(1):
            self.number = f"-{count}" if count > 1 else ""
            try:
                (folder / f"{name}{self.number}.csv").touch(exist_ok=False)
            except FileExistsError:
                continue
            break

    def path(self, name: str, suffix: str) -> Path:
        """Where a file is to be written."""
        self.written.append(self.folder / f"{name}{self.number}{suffix}")
        return self.written[-1]

    def csv(self, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Writes a table."""
        with self.path(name, ".csv").open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(rows)


@contextmanager
def report(output_dir: str | None, default: Path, name: str, console: Console) -> Iterator[Report]:
    """A `Report` in `output_dir`, or in the folder `default`; afterwards its files are named on the console.

    Raises:
        MetaTTTError: the folder cannot be written.
    """
    folder = path_of(output_dir, "output_dir") if output_dir else default
    try:
        made = Report(folder, name)
        yield made
    except OSError as error:
        raise MetaTTTError(
            f"{folder} cannot be written ({error.strerror}): set output_dir=<a folder of yours>"
        ) from error
    for path in made.written:
        console.print(f"written  {path}", markup=False)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> Table:
    """A table for the console, whose first `left` columns are texts and the others numbers."""
    made = Table(title=title, title_justify="left")
    for place, name in enumerate(columns):
        made.add_column(name, justify="left" if place < left else "right")
    for row in rows:
        made.add_row(*row)
    return made


def check_same(
    names: Sequence[str], sources: Sequence[dict[str, Any]], ignored: Sequence[str], what: str,
    changes: Sequence[str] = (),
    advice: str = "evaluate them one after the other",
) -> None:  # fmt: skip
    """Refuses to compare models on different data.

    Args:
        names: of the models.
        sources: the fields of their data.
        ignored: fields that do not choose the data.
        what: the data are, in the message.
        changes: fields that the command line can set.
        advice: for the others.

    Raises:
        MetaTTTError: naming the first field that differs.
    """
    for name, source in zip(names[1:], sources[1:], strict=True):
        for key in sorted(sources[0].keys() | source.keys()):
            if key not in ignored and sources[0].get(key) != source.get(key):
                raise MetaTTTError(
                    f"{names[0]} and {name} have different {what}, data.{key} is {sources[0].get(key)} and "
                    f"{source.get(key)}: "
                    f"{f'set data.{key}' if key in changes else advice}"
                )
