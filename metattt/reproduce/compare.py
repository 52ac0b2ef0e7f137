"""Rows compared in quality: each at its own best learning rate, with all seeds, on text that played no part in the
choice."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from metattt.reproduce.base import Claim, Row, Size
from metattt.reproduce.cells import Cell, Result, Runner
from metattt.sweeps.cell import last_value


class Scored(NamedTuple):
    """A run and its evaluation.

    Attributes:
        row: of the claim.
        seed: of the run.
        learning_rate: the best of those tried; None if the claim leaves it to the row.
        run: the training.
        test: the evaluation; None if the claim has none, or the run did not finish.
    """

    row: Row
    seed: int
    learning_rate: float | None
    run: Result
    test: Result | None

    @property
    def finished(self) -> bool:
        return self.run.finished and (self.test is None or self.test.finished)


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

    def of(self, row: Row) -> list[Scored]:
        """The runs of a row that have finished, by seed."""
        return [one for one in self.scored if one.row == row and one.finished]

    def best(self, row: Row) -> float | None:
        """The learning rate that a row is run with; None: none was tried, or none finished."""
        tried = {rate: value for rate, value in self.tried.get(row.name, {}).items() if not math.isnan(value)}
        return (min if self.lower_is_better else max)(tried, key=lambda rate: tried[rate]) if tried else None

    def at_the_edge(self) -> list[str]:
        """The rows whose best learning rate is the smallest or largest of those that were tried."""
        found = []
        for name, tried in self.tried.items():
            best = next((self.best(one.row) for one in self.scored if one.row.name == name), None)
            if len(tried) > 1 and best in (min(tried), max(tried)):
                found.append(name)
        return found

    def failures(self) -> list[str]:
        """A line for every cell of the reported runs that did not finish."""
        results = [result for one in self.scored for result in (one.run, one.test) if result and not result.finished]
        return [f"{result.cell.name}: {result.message}" for result in dict.fromkeys(results)]


class Comparison(Claim):
    """A claim about the quality of rows. Subclasses turn what came out into a report.

    Attributes:
        objective: column of a run's log that learning rates are compared by.
        lower_is_better: of the objective.
    """

    objective = "validation/bits_per_byte"
    lower_is_better = True

    def count(self, size: Size) -> int:
        rows, rates = len(self.rows(size)), len(size.learning_rates)
        runs = rows * (rates + len(size.seeds) - 1 if rates else len(size.seeds))
        return runs + (rows * len(size.seeds) if size.evaluate else 0)

    def compare(self, size: Size, runner: Runner) -> Compared:
        """Tries the learning rates with the first seed, runs every row at its best with all seeds, and evaluates.

        Returns:
            What came out; a row none of whose learning rates finished has its failed runs.
        """
        rows, first = self.rows(size), size.seeds[0]
        tries = [(row, rate) for row in rows for rate in size.learning_rates]
        results = runner.run([self.training(size, row, first, rate) for row, rate in tries])
        tried: dict[str, dict[float, float]] = {}
        for (row, rate), result in zip(tries, results, strict=True):
            value = self.value(result.folder) if result.finished else math.nan
            tried.setdefault(row.name, {})[rate] = value
        known = Compared([], tried, self.lower_is_better)
        best = {row.name: known.best(row) for row in rows}
        rates = {row.name: best[row.name] or next(iter(size.learning_rates), None) for row in rows}
        # a row that no learning rate was good for has failed: its other seeds would as well
        wanted = [
            (row, seed) for row in rows for seed in size.seeds
            if best[row.name] is not None or not size.learning_rates or seed == first
        ]  # fmt: skip
        runs = runner.run([self.training(size, row, seed, rates[row.name]) for row, seed in wanted])
        tests: Sequence[Result | None] = [None] * len(runs)
        if size.evaluate:
            tests = runner.run([self.evaluation(size, run.cell) for run in runs])
        scored = [
            Scored(row, seed, rates[row.name], run, test)
            for (row, seed), run, test in zip(wanted, runs, tests, strict=True)
        ]
        return Compared(scored, tried, self.lower_is_better)

    def value(self, folder: Path) -> float:
        """What a run's learning rate is judged by, from its folder; NaN if it has none."""
        return last_value(folder, self.objective)

    def training(self, size: Size, row: Row, seed: int, rate: float | None) -> Cell:
        """The run of a row."""
        chosen = [] if rate is None else [f"training.lr={rate:g}"]
        name = " ".join([row.name, *(f"lr={rate:g}" for _ in chosen), f"seed={seed}"])
        return Cell(name, "train", (*row.overrides, *size.overrides, *chosen, f"seed={seed}"))

    def evaluation(self, size: Size, run: Cell) -> Cell:
        """The evaluation of a run."""
        return Cell(f"{run.name} test", "eval", size.evaluate, run)


def bits_per_byte(test: Result) -> float:
    """Over all positions, from the table by position that `metattt eval` writes. NaN without one."""
    file = test.folder / "by_position.csv"
    if not test.finished or not file.is_file():
        return math.nan
    with file.open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    nats = [float(row["loss"]) * int(row["tokens"]) for row in rows]
    num_bytes = [one / math.log(2) / float(row["bits_per_byte"]) for one, row in zip(nats, rows, strict=True)]
    return sum(nats) / math.log(2) / sum(num_bytes)


def settings_of(size: Size, lower_is_better: bool, objective: str) -> list[str]:
    """How the runs of a size were made, as lines of Markdown."""
    lines = [f"every run: `{' '.join(size.overrides)}`"] if size.overrides else []
    if size.evaluate:
        lines.append(f"every evaluation: `metattt eval {' '.join(size.evaluate)}`")
    lines.append(f"seeds {', '.join(map(str, size.seeds))}; ± is the standard deviation over them")
    if size.learning_rates:
        best = "lowest" if lower_is_better else "highest"
        lines.append(
            f"peak learning rates {', '.join(f'{rate:g}' for rate in size.learning_rates)} were tried for every row with seed "
            f"{size.seeds[0]}; that with the {best} {objective} is the row's"
        )
    return lines


def edges(compared: Compared) -> list[str]:
    """A sentence about learning rates that may not be the best, if there are any."""
    found = compared.at_the_edge()
    names = ", ".join(f"`{name}`" for name in found)
    return [f"The best learning rate was the smallest or the largest of those tried for {names}."] if found else []


def mean(values: Sequence[float]) -> float:
    """NaN for none."""
    return statistics.fmean(values) if values else math.nan


