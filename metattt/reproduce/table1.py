"""Claim `table1`: the steps from linear attention to TTT-Linear, in bits per byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

from metattt.registry import register
from metattt.reproduce.base import Size
from metattt.reproduce.cells import Runner
from metattt.reproduce.compare import Comparison, bits_per_byte, edges, settings_of
from metattt.reproduce.report import Record, Report
from metattt.reproduce.seeds import spread, steps_against

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@register(group="claim", name="table1")
class Table1(Comparison):
    """Rows that each add one thing to the row before, as Table 1 of the TTT paper."""

    def run(self, size: Size, runner: Runner) -> Report:
        compared, rows = self.compare(size, runner), self.rows(size)
        values = {row.name: [bits_per_byte(one.test) for one in compared.of(row) if one.test] for row in rows}
        table: list[Record] = []
        for row in rows:
            rate = compared.best(row)
            paper = "" if row.reported is None else f"{row.reported:g}"
            table.append({
                "row": f"`{row.name}`", "test bits per byte": spread(values[row.name]), "seeds": len(values[row.name]),
                "learning rate": "" if rate is None else f"{rate:g}", "perplexity in the paper": paper,
            })  # fmt: skip
        records = [
            {"row": one.row.name, "seed": one.seed, "learning_rate": one.learning_rate, "test_bits_per_byte": bits_per_byte(one.test),
             "seconds": one.run.seconds, "reported_perplexity": one.row.reported}
            for row in rows for one in compared.of(row) if one.test
        ]  # fmt: skip
        seen = steps_against(values, {row.name: row.reported for row in rows}) + edges(compared)

        def draw(figure: Figure) -> None:
            axes = figure.add_subplot(ylabel="test bits per byte", title=self.title)
            for place, row in enumerate(rows):
                axes.scatter([place] * len(values[row.name]), values[row.name], color=f"C{place % 10}", s=28, zorder=3)
            middle = [(place, sum(ones) / len(ones)) for place, ones in enumerate(values.values()) if ones]
            axes.plot(*zip(*middle, strict=True), color="gray", linewidth=1, zorder=2)
            axes.set_xticks(range(len(rows)), [row.name.replace("_", "\n") for row in rows], fontsize=8)
            axes.grid(alpha=0.3, axis="y")

        return Report(
            seen, {"Rows, each adds to the one before": table}, records, draw if any(values.values()) else None,
            settings_of(size, self.lower_is_better, self.objective), compared.failures(),
        )  # fmt: skip
