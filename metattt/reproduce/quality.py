"""Claim `quality`: every known layer in one model, each at its own best learning rate."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from metattt.checkpoints.files import find_checkpoint
from metattt.checkpoints.folder import shapes
from metattt.errors import MetaTTTError, check_choice, check_number
from metattt.registry import register
from metattt.reproduce.base import Size
from metattt.reproduce.cells import Result, Runner
from metattt.reproduce.compare import Comparison, bits_per_byte, edges, mean, settings_of
from metattt.reproduce.curves import ranked
from metattt.reproduce.report import Record, Report
from metattt.reproduce.seeds import spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@register(group="claim", name="quality")
class Quality(Comparison):
    """Rows that are known layers, from the best to the last.

    Args:
        title, asked, rows, sizes, overrides: see `Claim`.
        baseline: the row that the others are told as multiples of.
        behind: a row with more than so many times the baseline's bits is named.

    Raises:
        MetaTTTError: a baseline that is no row, and what `Claim` raises.
    """

    def __init__(
        self,
        title: str,
        asked: str,
        rows: dict[str, Any],
        sizes: dict[str, Any],
        overrides: Sequence[str] = (),
        baseline: str = "linear_attention",
        behind: float = 1.1,
    ):
        super().__init__(title, asked, rows, sizes, overrides)
        check_choice("claim.baseline", baseline, list(rows))
        check_number("claim.behind", behind, above=0)
        self.baseline, self.behind = baseline, behind

    def run(self, size: Size, runner: Runner) -> Report:
        compared = self.compare(size, runner)
        values = {row.name: [bits_per_byte(one.test) for one in compared.of(row) if one.test] for row in self.rows(size)}
        rows = sorted((row for row in self.rows(size) if values[row.name]), key=lambda row: mean(values[row.name]))
        middle = mean(values.get(self.baseline, []))
        times = {row.name: mean(values[row.name]) / middle for row in rows}
        table: list[Record] = []
        for row in rows:
            rate, tried = compared.best(row), compared.tried.get(row.name, {})
            table.append({
                "layer": f"`{row.name}`", "test bits per byte": spread(values[row.name]), "seeds": len(values[row.name]),
                f"times {self.baseline}": "" if math.isnan(middle) else f"{times[row.name]:.3f}",
                "learning rate": "" if rate is None else f"{rate:g}",
                "validation bits per byte at each rate": ", ".join(f"{rate:g}: {bits:.3f}" for rate, bits in tried.items()),
                "parameters": "–" if (count := parameters(compared.of(row)[0].run)) is None else f"{count:,}",
            })  # fmt: skip
        records = [
            {"layer": row.name, "seed": one.seed, "learning_rate": one.learning_rate, "test_bits_per_byte": bits_per_byte(one.test),
             "parameters": parameters(one.run), "seconds": one.run.seconds}
            for row in rows for one in compared.of(row) if one.test
        ]  # fmt: skip
        seen = [f"From the best (bits per byte): {ranked(values)}."]
        spreads = {name: statistics.stdev(found) for name, found in values.items() if len(found) > 1}
        if spreads:
            widest = max(spreads, key=lambda name: spreads[name])
            seen.append(f"The widest spread over seeds is {spreads[widest]:.3f} bits per byte, of `{widest}`.")
        if not math.isnan(middle):
            late = [f"`{name}` ({ratio:.3f} times)" for name, ratio in times.items() if ratio > self.behind]
            seen.append(f"More than {self.behind - 1:.0%} behind `{self.baseline}`: {', '.join(late) or 'none'}.")
        never = [row.name for row in self.rows(size) if not values[row.name]]
        if never:
            seen.append(f"Without a figure, at no learning rate: {', '.join(f'`{name}`' for name in never)}.")

        def draw(figure: Figure) -> None:
            axes = figure.add_subplot(xlabel="test bits per byte", title=self.title)
            for place, row in enumerate(rows):
                color = "C1" if row.name == self.baseline else "C0"
                axes.scatter(values[row.name], [place] * len(values[row.name]), color=color, s=18, zorder=3)
            if not math.isnan(middle):
                axes.axvline(middle, color="C1", linewidth=1)
            axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=7)
            axes.invert_yaxis()
            axes.grid(alpha=0.3)

        return Report(
            seen + edges(compared), {"Layers, the best first": table}, records, draw if rows else None,
            settings_of(size, self.lower_is_better, self.objective), compared.failures(),
        )  # fmt: skip


def parameters(run: Result) -> int | None:
    """Of the model that a run has left; None where its checkpoints are gone."""
    try:
        return sum(math.prod(shape) for shape in shapes(find_checkpoint(run.folder)).values())
    except MetaTTTError:
        return None
