"""The files of an evaluation, which do not write over those before them."""

from __future__ import annotations

import csv
import io
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from metattt.errors import MetaTTTError, NotFinite, printable
from metattt.io import path_of, replaced, write_whole
from metattt.optional import absence

T = TypeVar("T")


class Report:
    """Takes the first free number for `<name><number>.csv` in a folder: nothing, `-2`, `-3`, …, which all files of the
    report then have; another process at the same time takes another one. It is not one that a file of the names `more`
    has, which other reports write, too.

    Attributes:
        written: the files, in their order.
        missing: why a picture was not written; None if none is missing.
    """

    def __init__(self, folder: Path, name: str, *more: str):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.written = folder, list[Path]()
        self.missing: str | None = None
        self.number = ""
        for count in itertools.count(2):
            try:
                if not any((folder / f"{one}{self.number}.csv").exists() for one in more):
                    (folder / f"{name}{self.number}.csv").touch(exist_ok=False)
                    break
            except FileExistsError:
                pass
            self.number = f"-{count}"

    def path(self, name: str, suffix: str) -> Path:
        """Where a file is to be written."""
        self.written.append(self.folder / f"{name}{self.number}{suffix}")
        return self.written[-1]

    def csv(self, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Writes a table."""
        text = io.StringIO(newline="")
        csv.writer(text).writerows([columns, *rows])
        write_whole(self.path(name, ".csv"), text.getvalue().encode(errors="backslashreplace"))

    def plot(
        self, name: str, where: Sequence[float], curves: Mapping[str, Sequence[float]], title: str,
        labels: Sequence[str], log: bool = True, marks: Iterable[int] = (),
    ) -> None:  # fmt: skip
        """Draws curves over token positions into a PNG file, where matplotlib is installed.

        Args:
            name: of the file.
            where: positions (tokens) of the points.
            curves: values at these by label.
            title: of the picture.
            labels: of the axes, x and y.
            log: positions on a logarithmic axis.
            marks: lengths of contexts in training (tokens), drawn as vertical lines.
        """
        if (missing := absence("matplotlib", extra="train", what="writing pictures")) is not None:
            self.missing = missing
            return
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter

        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        for label, values in curves.items():
            axes.plot(
                where, values, label=label, linewidth=1.5, marker="o" if len(values) <= 64 else None, markersize=3.5,
            )  # fmt: skip
        for length in marks:
            axes.axvline(length, linestyle=":", color="gray", linewidth=1.2, label=f"trained context: {length:,}")
        if log:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.set(xlabel=labels[0], ylabel=labels[1], title=title)
        axes.grid(alpha=0.3)
        axes.legend()
        with replaced(self.path(name, ".png")) as part:
            figure.savefig(part, format="png")


def writable(output_dir: str | None, default: Path) -> Path:
    """The folder of a report, `output_dir` or else `default`, which need not exist: asked for before the work.

    Raises:
        MetaTTTError: it cannot be written.
    """
    folder = path_of(output_dir, "output_dir") if output_dir else default
    there = next(one for one in (folder, *folder.absolute().parents) if os.path.exists(one))
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise MetaTTTError(f"{folder} cannot be written: set output_dir=<a folder of yours>")
    return folder


@contextmanager
def report(folder: Path, name: str, console: Console, *more: str) -> Iterator[Report]:
    """A `Report` in a folder; afterwards its files are named on the console. `more`: names that others write, too."""
    made = Report(folder, name, *more)
    yield made
    for path in made.written:
        console.print(f"written  {path}")
    if made.missing is not None:
        console.print(made.missing)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1) -> Table:
    """A table for the console, whose first `left` columns are texts and the others numbers: integers with separators,
    others with four digits behind the point."""
    made = Table(title=title, title_justify="left")
    for place, name in enumerate(columns):
        made.add_column(name, justify="left" if place < left else "right")
    for row in rows:
        cells = (f"{one:,}" if isinstance(one, int) else f"{one:.4f}" if isinstance(one, float) else one for one in row)
        made.add_row(*map(printable, map(str, cells)))
    return made


def tracked(batches: Iterable[T], what: str) -> Iterable[T]:
    """Batches, with a bar on the terminal, or in a notebook, while they are read; elsewhere nothing is written."""
    console = Console(stderr=True)
    shown = console.is_terminal or console.is_jupyter
    return track(batches, what, console=console, transient=True, disable=not shown)


def finite(predictions: Tensor) -> Tensor:
    """The predictions of a model; those that are not finite raise an error."""
    if not predictions.isfinite().all():
        raise NotFinite("the model's predictions are not finite: its run diverged, or it is damaged")
    return predictions


def check_same(
    sources: Mapping[str, dict[str, Any]], ignored: Sequence[str], what: str, changes: Sequence[str] = (),
    advice: str = "evaluate them one after the other",
) -> None:  # fmt: skip
    """Refuses to compare models on different data.

    Args:
        sources: label of a model -> the fields of its data.
        ignored: fields that do not choose the data.
        what: the data are, in the message.
        changes: fields that the command line can set.
        advice: for the others.

    Raises:
        MetaTTTError: naming the first field that differs.
    """
    (first, known), *others = sources.items()
    for name, source in others:
        for key in sorted(known.keys() | source.keys()):
            if key not in ignored and known.get(key) != source.get(key):
                raise MetaTTTError(
                    f"{first} and {name} have different {what}, data.{key} is {known.get(key)} and {source.get(key)}: "
                    f"{f'set data.{key}' if key in changes else advice}"
                )


@contextmanager
def drawn_alike(model: Any) -> Iterator[None]:
    """What layers draw meanwhile (`optimizer.sampling=sgd` permutes tokens) is the same every time, as in a
    validation of the training; torch's global generators are left as they were."""
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        yield
