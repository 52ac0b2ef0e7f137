"""Loss by position, from what `metattt eval` writes; and curves of several seeds in a picture."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from metattt.reproduce.compare import Compared, bits_per_byte
from metattt.reproduce.report import Record
from metattt.reproduce.seeds import order, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Bin(NamedTuple):
    """Positions `first` … `last` (tokens of context, counted from 1), and the bits per byte over them."""

    first: int
    last: int
    bits_per_byte: float


def by_position(folder: Path) -> list[Bin]:
    """The bins of one evaluation; none where it wrote none."""
    file = folder / "by_position.csv"
    if not file.is_file():
        return []
    with file.open(newline="", encoding="utf-8") as stream:
        return [Bin(int(row["first"]), int(row["last"]), float(row["bits_per_byte"])) for row in csv.DictReader(stream)]


def curves_of(compared: Compared) -> dict[str, list[list[Bin]]]:
    """Row -> the curve of every seed; rows without any are left out."""
    found: dict[str, list[list[Bin]]] = {}
    for one in compared.scored:
        if one.finished and one.test is not None and (bins := by_position(one.test.folder)):
            found.setdefault(one.row.name, []).append(bins)
    return found


def records_of(compared: Compared) -> list[Record]:
    """Every bin of every curve, for the CSV."""
    return [
        {"row": one.row.name, "seed": one.seed, "learning_rate": one.learning_rate, **bin._asdict()}
        for one in compared.scored
        if one.finished and one.test is not None
        for bin in by_position(one.test.folder)
    ]


def table_of(compared: Compared, places: Sequence[int]) -> list[Record]:
    """A row of a table for every row of the claim: all positions, and the bins that end at some of them."""
    table: list[Record] = []
    for name in dict.fromkeys(one.row.name for one in compared.scored):
        ones = [one for one in compared.scored if one.row.name == name and one.finished and one.test]
        rate = next((one.learning_rate for one in ones), None)
        values: Record = {"layer": f"`{name}`", "learning rate": "" if rate is None else f"{rate:g}", "seeds": len(ones)}
        values["all positions"] = spread([bits_per_byte(one.test) for one in ones if one.test])
        for place in places:
            bins = [bin for one in ones if one.test for bin in by_position(one.test.folder) if bin.last == place]
            title = f"{bins[0].first:,}–{place:,}" if bins else f"to {place:,}"
            values[title] = spread([bin.bits_per_byte for bin in bins])
        table.append(values)
    titles = list(dict.fromkeys(title for values in table for title in values))
    return [{title: values.get(title, "–") for title in titles} for values in table]


def at(curves: Sequence[Sequence[Bin]], last: int) -> list[float]:
    """The bits per byte of the bin that ends at a position, by seed."""
    return [bin.bits_per_byte for curve in curves for bin in curve if bin.last == last]


def change(curves: Sequence[Sequence[Bin]], before: int, after: int) -> str:
    """What the bins that end at `after` are against those that end at `before`, over seeds: in words and figures."""
    first, last = at(curves, before), at(curves, after)
    if not first or len(first) != len(last):
        return "not known"
    steps = [b - a for a, b in zip(first, last, strict=True)]  # of the same run, so the spread of runs plays no part
    word = {True: "rises", False: "falls"}
    same = all(step > 0 for step in steps) or all(step < 0 for step in steps)
    how = word[steps[0] > 0] if same else "differs between seeds"
    return f"{how} ({spread(first)} to {spread(last)}, by {spread(steps)})"


def ranked(values: Mapping[str, Sequence[float]]) -> str:
    """Rows from the lowest to the highest: `<` where every seed is apart from every one of the next, `≈` where not."""
    names = sorted((name for name in values if values[name]), key=lambda name: statistics.fmean(values[name]))
    told = []
    for place, name in enumerate(names):
        apart = place and order(values[names[place - 1]], values[name]) == "better"
        told.append(f"{' < ' if apart else ' ≈ ' if place else ''}`{name}` {spread(values[name])}")
    return "".join(told)


def draw_curves(axes: Axes, curves: Mapping[str, Sequence[Sequence[tuple[float, float]]]]) -> None:
    """The mean over seeds of every curve, and a band from the least to the largest.

    Args:
        axes: to draw on.
        curves: name -> curve of every seed, each (x, y) at the same x.
    """
    for number, (name, seeds) in enumerate(curves.items()):
        columns = [list(column) for column in zip(*seeds, strict=True)]
        x = [column[0][0] for column in columns]
        values = [[y for _, y in column if math.isfinite(y)] or [math.nan] for column in columns]
        colour = f"C{number % 10}"
        axes.plot(x, [statistics.fmean(ones) for ones in values], color=colour, label=name, linewidth=1.6, marker="o", markersize=3)
        axes.fill_between(x, list(map(min, values)), list(map(max, values)), color=colour, alpha=0.12, linewidth=0)
    axes.grid(alpha=0.3)


def middles(bins: Sequence[Bin]) -> list[tuple[float, float]]:
    """The points of a curve on a logarithmic axis of positions."""
    return [(math.sqrt(bin.first * bin.last), bin.bits_per_byte) for bin in bins]


def positions(axes: Axes, trained: int | None) -> None:
    """A logarithmic axis of positions, with the training length marked."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("position (tokens of context)")
    if trained is not None:
        axes.axvline(trained, linestyle=":", color="gray", linewidth=1.2)
        axes.annotate(
            "training length", (trained, 0.98), xycoords=("data", "axes fraction"), rotation=90, ha="right", va="top", fontsize=8,
            color="gray",
        )  # fmt: skip
    axes.legend(fontsize="small")


def value_of(overrides: Sequence[str], key: str) -> int | None:
    """The integer that overrides give a key, the last of several; None if they do not."""
    given = [one.partition("=")[2] for one in overrides if one.partition("=")[0] == key]
    return int(given[-1]) if given and given[-1].isdecimal() else None
