"""Claim `pixels`: images of raw pixels, MTTT and attention in one vision transformer."""

from __future__ import annotations

import csv
import math
import statistics
from typing import TYPE_CHECKING

from metattt.registry import register
from metattt.reproduce.base import Size
from metattt.reproduce.cells import Result, Runner
from metattt.reproduce.compare import Comparison, edges, settings_of
from metattt.reproduce.report import Record, Report
from metattt.reproduce.seeds import spread, steps_against

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@register(group="claim", name="pixels")
class Pixels(Comparison):
    """Top-1 accuracy of rows, as in Table 3 of the MTTT paper. Learning rates are chosen on the validation images, and
    every row is scored on test images that played no part in any choice."""

    objective = "validation/loss"

    def run(self, size: Size, runner: Runner) -> Report:
        compared, rows = self.compare(size, runner), self.rows(size)
        values = {row.name: [top1(one.test) for one in compared.of(row)] for row in rows}
        table: list[Record] = []
        for row in rows:
            rate = compared.best(row)
            table.append({
                "row": f"`{row.name}`", "test top-1 %": spread(values[row.name], 1),
                "per seed": ", ".join(f"{value:.1f}" for value in values[row.name]), "seeds": len(values[row.name]),
                "learning rate": "" if rate is None else f"{rate:g}",
                "paper, ImageNet, %": "does not fit" if row.reported is None else f"{row.reported:g}",
            })  # fmt: skip
        records = [
            {"row": one.row.name, "seed": one.seed, "learning_rate": one.learning_rate, "test_top1_percent": top1(one.test),
             "seconds": one.run.seconds, "reported_percent": one.row.reported}
            for row in rows for one in compared.of(row)
        ]  # fmt: skip
        seen = steps_against(values, {row.name: row.reported for row in rows}, lower_is_better=False) + edges(compared)
        spreads = {name: statistics.stdev(found) for name, found in values.items() if len(found) > 1}
        if spreads:
            widest = max(spreads, key=lambda name: spreads[name])
            seen.append(f"The widest spread over seeds is {spreads[widest]:.1f} points, of `{widest}`.")

        def draw(figure: Figure) -> None:
            axes = figure.add_subplot(xlabel="test top-1 %", title=self.title)
            for place, row in enumerate(rows):
                axes.scatter(values[row.name], [place] * len(values[row.name]), color=f"C{place % 10}", s=28, zorder=3)
            axes.set_yticks(range(len(rows)), [row.name for row in rows])
            axes.invert_yaxis()
            axes.grid(alpha=0.3)

        return Report(
            seen, {"Rows, best first in the paper": table}, records, draw if records else None,
            settings_of(size, self.lower_is_better, self.objective), compared.failures(),
        )  # fmt: skip


def top1(test: Result | None) -> float:
    """The accuracy (%) in what `metattt eval` writes of images. NaN without it."""
    file = None if test is None else test.folder / "images.csv"
    if test is None or file is None or not test.finished or not file.is_file():
        return math.nan
    with file.open(newline="", encoding="utf-8") as stream:
        return 100 * float(next(csv.DictReader(stream))["top1"])
