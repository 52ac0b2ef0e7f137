"""Rows compared in quality: each at its own best learning rate, with all seeds, on data that played no part in the
choice."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from common import Row as Record
from common import some
from omegaconf import MISSING
from report import Report

from comparisons.jobs import Job, Result, Runner
from metattt.metrics_file import read_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Values = Mapping[str, Sequence[float]]  # row -> figures by seed


class Row(NamedTuple):
    """A row of a claim's table: what makes it, and the figure in the paper, if it has one."""

    name: str
    overrides: tuple[str, ...]
    reported: float | None


@dataclass(kw_only=True)
class AtASize:
    """What a claim's file has for a size.

    Attributes:
        minutes: of computing that all jobs take together, about.
        rows: names of those that are compared; None: all.
        overrides: of every run.
        evaluate: of every evaluation.
        seeds: of the runs that are reported; the learning rate is chosen with the first.
        learning_rates: that are tried for every row; none leaves that of the rows.
        conditions: name -> overrides; every row is tuned, run and evaluated anew under each.
    """

    minutes: float = 0.0
    rows: Any = None
    overrides: list[str] = field(default_factory=list)
    evaluate: list[str] = field(default_factory=list)
    seeds: list[int] = some(0)
    learning_rates: list[float] = field(default_factory=list)
    conditions: dict[str, list[str]] = field(default_factory=dict)


@dataclass(kw_only=True)
class Asked:
    """What a claim has at all sizes.

    Attributes:
        title, asked: of the page, as Markdown.
        objective, lower_is_better: column of a run's log that learning rates are compared by.
        options: what only some kinds of claims have.
    """

    title: str = MISSING
    asked: str = MISSING
    objective: str = "validation/bits_per_byte"
    lower_is_better: bool = True
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Claim(Asked, AtASize):
    """A claim at one size, with the rows that are compared."""

    name: str
    size: str
    rows: list[Row]

    def jobs(self) -> int:
        """How many there are."""
        runs = max(len(self.learning_rates), 1) + len(self.seeds) - 1
        return len(self.rows) * max(len(self.conditions), 1) * (runs + len(self.seeds))

    def report(
        self, compared: Compared, seen: Sequence[str], tables: Mapping[str, Sequence[Record]],
        records: Sequence[Record], draw: Callable[[Figure], None], *notes: str,
    ) -> Report:  # fmt: skip
        """The page: sentences, tables, and how the runs were made. Jobs that failed are named."""
        settings = [f"every run: `{' '.join(self.overrides)}`"]
        settings.append(f"every evaluation: `metattt eval {' '.join(self.evaluate)}`")
        settings.append(f"seeds {', '.join(map(str, self.seeds))}; ± is the standard deviation over them")
        if self.learning_rates:
            rates = ", ".join(f"{rate:g}" for rate in self.learning_rates)
            best = "lowest" if self.lower_is_better else "highest"
            told = f"peak learning rates {rates} were tried for every row with seed {self.seeds[0]}"
            settings.append(f"{told}; that with the {best} {self.objective} is the row's")
        several = {name: tried for name, tried in compared.tried.items() if len(tried) > 1}
        edges = [name for name, tried in several.items() if compared.best(name) in (min(tried), max(tried))]
        if edges:
            names = ", ".join(f"`{name}`" for name in edges)
            seen = [*seen, f"The best learning rate was the smallest or the largest of those tried for {names}."]
        failed = [one for scored in compared.scored for one in (scored.run, scored.test) if not one.finished]
        told = "\n".join(f"- {one}" for one in seen)
        lines = [f"- {one.job.name} did not finish: {one.message}" for one in dict.fromkeys(failed)]
        return Report(
            self.title, f"**Asked.** {self.asked.strip()}\n\n**Seen.**\n\n{told}", tables, (), {"size": self.size},
            draw if records else None, records, [*lines, *(f"- {one}" for one in (*settings, *notes))],
        )  # fmt: skip


class Scored(NamedTuple):
    """A run of a row under a condition, and its evaluation."""

    row: Row
    condition: str
    seed: int
    learning_rate: float | None
    run: Result
    test: Result


class Compared(NamedTuple):
    """What the runs of a claim came to.

    Attributes:
        scored: of every row, one for each seed.
        tried: row -> learning rate -> the objective on the validation data; NaN where the run failed.
        lower_is_better: of the objective.
    """

    scored: list[Scored]
    tried: dict[str, dict[float, float]]
    lower_is_better: bool

    def of(self, row: str, condition: str = "") -> list[Scored]:
        """The runs of a row by seed, if one of them has finished; the figure of one that has not is NaN."""
        found = [one for one in self.scored if (one.row.name, one.condition) == (row, condition)]
        return found if any(one.test.finished for one in found) else []

    def best(self, name: str) -> float | None:
        """The learning rate of a row (`condition, row`); None: none was tried, or none finished."""
        tried = {rate: value for rate, value in self.tried.get(name, {}).items() if not math.isnan(value)}
        return (min if self.lower_is_better else max)(tried, key=lambda rate: tried[rate]) if tried else None

    def values(self, claim: Claim, score: Callable[[Result], float]) -> dict[str, list[float]]:
        """Row -> its figures by seed."""
        return {row.name: [score(one.test) for one in self.of(row.name)] for row in claim.rows}


def compare(claim: Claim, runner: Runner, judge: Callable[[Path], float] | None = None) -> Compared:
    """Tries the learning rates with the first seed, runs every row at its best with all seeds, and evaluates.

    Args:
        claim, runner: what is run, and by whom.
        judge: what a run's learning rate is judged by, from its folder; None: the last `claim.objective`.
    """
    value = judge or (lambda folder: last_value(folder, claim.objective))
    pairs = [(row, condition) for condition in claim.conditions or {"": []} for row in claim.rows]

    def name(row: Row, condition: str) -> str:
        return f"{condition}, {row.name}" if condition else row.name

    def training(row: Row, condition: str, seed: int, rate: float | None) -> Job:
        chosen = () if rate is None else (f"training.lr={rate:g}",)
        words = (*row.overrides, *claim.conditions.get(condition, ()), *claim.overrides, *chosen, f"seed={seed}")
        return Job(" ".join([name(row, condition), *(f"lr={rate:g}" for _ in chosen), f"seed={seed}"]), "train", words)

    first = claim.seeds[0]
    tries = [(row, condition, rate) for row, condition in pairs for rate in claim.learning_rates]
    results = runner.run([training(row, condition, first, rate) for row, condition, rate in tries])
    compared = Compared([], {}, claim.lower_is_better)
    for (row, condition, rate), result in zip(tries, results, strict=True):
        found = value(result.folder) if result.finished else math.nan
        compared.tried.setdefault(name(row, condition), {})[rate] = found
    wanted = []
    for row, condition in pairs:
        best = compared.best(name(row, condition))
        chosen = best or next(iter(claim.learning_rates), None)
        # a row that no learning rate was good for has failed: its other seeds would as well
        seeds = claim.seeds if best or not claim.learning_rates else (first,)
        wanted += [(row, condition, seed, chosen) for seed in seeds]
    runs = runner.run([training(*one) for one in wanted])
    tests = runner.run([Job(f"{run.job.name} test", "eval", tuple(claim.evaluate), run.job) for run in runs])
    compared.scored.extend(Scored(*one, run, test) for one, run, test in zip(wanted, runs, tests, strict=True))
    return compared


# -- what jobs have written -------------------------------------------------------------------------------------------


def column(folder: Path, name: str) -> list[float]:
    """The values of a column of a run's log that were written."""
    file = folder / "metrics.csv"
    rows = read_rows(file)[0] if file.is_file() else []
    return [float(row[name]) for row in rows if row.get(name)]


def last_value(folder: Path, name: str) -> float:
    return (column(folder, name) or [math.nan])[-1]


def table(result: Result, name: str) -> list[dict[str, str]]:
    """The rows of a CSV that a job has written; none if it has not."""
    file = result.folder / name
    if not result.finished or not file.is_file():
        return []
    with file.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def bits_per_byte(test: Result) -> float:
    """Over all positions, from the table by position that `metattt eval` writes. NaN without one."""
    rows = table(test, "by_position.csv")
    nats = [float(row["loss"]) * int(row["tokens"]) for row in rows]
    num_bytes = [one / math.log(2) / float(row["bits_per_byte"]) for one, row in zip(nats, rows, strict=True)]
    return sum(nats) / math.log(2) / sum(num_bytes) if rows else math.nan


def top1(test: Result) -> float:
    """The accuracy (%) in what `metattt eval` writes of images. NaN without it."""
    return next((100 * float(row["top1"]) for row in table(test, "images.csv")), math.nan)


# -- figures of several seeds ------------------------------------------------------------------------------------------


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean and standard deviation; of one value itself, of none a dash."""
    if not values:
        return "–"
    mean = f"{statistics.fmean(values):.{digits}f}"
    return f"{mean} ± {deviation(values):.{digits}f}" if len(values) > 1 else mean


def deviation(values: Sequence[float]) -> float:
    """The standard deviation; NaN of fewer than two values, or where one is not finite."""
    return statistics.stdev(values) if len(values) > 1 and math.isfinite(sum(values)) else math.nan


def order(values: Sequence[float], than: Sequence[float], lower_is_better: bool = True) -> str:
    """How figures stand to others: `better` or `worse` if every seed of the one is so against every seed of the other;
    `not known` of a single seed. NaN is worse than any number.

    No distribution is assumed: of two sets of three that differ in nothing, one in ten pairs is apart like this by
    chance.
    """
    if len(values) < 2 or len(than) < 2:
        return "not known"
    ours, theirs = ([_cost(one, lower_is_better) for one in ones] for ones in (values, than))
    return "better" if max(ours) < min(theirs) else "worse" if min(ours) > max(theirs) else "within the spread"


def _cost(value: float, lower_is_better: bool) -> float:
    return math.inf if math.isnan(value) else value if lower_is_better else -value


def from_the_best(values: Values, lower_is_better: bool = True) -> list[str]:
    """The names of the rows by their means; those without a figure are the last."""
    return sorted(values, key=lambda name: _cost(statistics.fmean(values[name] or [math.nan]), lower_is_better))


def ranked(values: Values, lower_is_better: bool = True) -> str:
    """Rows from the best to the last: `<` where every seed is better than every one of the next, `≈` where not, and a
    comma where a single seed does not tell."""
    signs = {"better": " < " if lower_is_better else " > ", "not known": ", "}
    told, before = "", None
    for name in from_the_best({name: ones for name, ones in values.items() if ones}, lower_is_better):
        sign = "" if before is None else signs.get(order(values[before], values[name], lower_is_better), " ≈ ")
        told, before = f"{told}{sign}`{name}` {spread(values[name])}", name
    return told


def steps_against(values: Values, reported: Mapping[str, float | None], lower_is_better: bool = True) -> list[str]:
    """Sentences about the order of rows that follow each other: where it is the paper's, where it is the opposite, and
    where seeds differ as much. Lower (or higher) is better for both figures."""
    sign = 1 if lower_is_better else -1
    told: dict[str, list[str]] = {
        "As in the paper": [], "Against the paper": [], "Within the spread of the seeds, so neither": [],
        "Not known, for want of figures": [],
    }  # fmt: skip
    for first, second in pairwise(values):
        before, after = reported.get(first), reported.get(second)
        found, name = order(values[second], values[first], lower_is_better), f"`{first}` → `{second}`"
        if before is None or after is None or found == "not known":
            told["Not known, for want of figures"].append(name)
        elif before == after:
            what = "As in the paper" if found == "within the spread" else "Against the paper"
            told[what].append(f"{name} ({found}; equal in the paper)")
        elif found == "within the spread":
            told["Within the spread of the seeds, so neither"].append(name)
        else:
            papers = "better" if sign * after < sign * before else "worse"
            told["As in the paper" if papers == found else "Against the paper"].append(f"{name} ({found})")
    count = len(values) - 1
    return [f"{what}, {len(ones)} of {count} steps: {'; '.join(ones)}." for what, ones in told.items() if ones]


# -- pictures ----------------------------------------------------------------------------------------------------------


def draw_points(axes: Axes, values: Values, label: str) -> None:
    """A line of points for every row, one for each seed."""
    for place, ones in enumerate(values.values()):
        axes.scatter(ones, [place] * len(ones), color=f"C{place % 10}", s=24, zorder=3)
    axes.set_yticks(range(len(values)), list(values), fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.grid(alpha=0.3)


def draw_curves(axes: Axes, curves: Mapping[str, Sequence[Sequence[tuple[float, float]]]]) -> None:
    """The mean over seeds of every curve, and a band from the least to the largest.

    Args:
        axes: to draw on.
        curves: name -> curve of every seed, each (x, y) at the same x.
    """
    for number, (name, seeds) in enumerate(curves.items()):
        columns = [list(points) for points in zip(*seeds, strict=True)]
        x, colour = [points[0][0] for points in columns], f"C{number % 10}"
        values = [[y for _, y in points if math.isfinite(y)] or [math.nan] for points in columns]
        axes.plot(x, [statistics.fmean(ones) for ones in values], color=colour, label=name, marker="o", markersize=3)
        axes.fill_between(x, list(map(min, values)), list(map(max, values)), color=colour, alpha=0.12, linewidth=0)
    axes.grid(alpha=0.3)


BANDS = "lines of the picture are means over seeds, bands reach from the lowest seed to the highest"
