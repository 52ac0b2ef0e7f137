"""Claim `minibatch`: quality and time against the size b of the inner mini-batch."""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import TYPE_CHECKING

from metattt.metrics_file import read_rows
from metattt.registry import register
from metattt.reproduce.base import Size
from metattt.reproduce.cells import Result, Runner
from metattt.reproduce.compare import Comparison, bits_per_byte, edges, mean, settings_of
from metattt.reproduce.curves import ranked
from metattt.reproduce.report import Record, Report
from metattt.reproduce.seeds import order, spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SPEED = "tokens_per_second"
SHARED = "speeds are the median of the steps of a run, and only as steady as the machine: other programs on it slow them"


def speed(run: Result) -> float:
    """Tokens a second while training, the median of the steps that were logged; NaN if none were."""
    rows = read_rows(run.folder / "metrics.csv")[0]
    column = next((name for row in rows for name in row if name.endswith(SPEED)), SPEED)
    values = [float(row[column]) for row in rows if row.get(column)]
    return statistics.median(values) if values else float("nan")


@register(group="claim", name="minibatch")
class Minibatch(Comparison):
    """Rows are sizes of the mini-batch, as in Figure 9 of the TTT paper."""

    def run(self, size: Size, runner: Runner) -> Report:
        compared, rows = self.compare(size, runner), self.rows(size)
        scores = {row.name: [bits_per_byte(one.test) for one in compared.of(row) if one.test] for row in rows}
        speeds = {row.name: [speed(one.run) for one in compared.of(row)] for row in rows}
        table: list[Record] = []
        for row in rows:
            rate = compared.best(row)
            table.append({
                "mini-batch": row.name, "test bits per byte": spread(scores[row.name]), "seeds": len(scores[row.name]),
                "learning rate": "" if rate is None else f"{rate:g}", "training, tokens/s": spread(speeds[row.name], 0),
            })  # fmt: skip
        records = [
            {"mini_batch": one.row.name, "seed": one.seed, "learning_rate": one.learning_rate,
             "test_bits_per_byte": bits_per_byte(one.test), "training_tokens_per_second": speed(one.run)}
            for row in rows for one in compared.of(row) if one.test
        ]  # fmt: skip
        seen = [f"Quality, from the best (bits per byte): {ranked(scores)}."]
        pairs = [(a.name, b.name) for a, b in pairwise(rows)]
        found = [(f"`{a}` against `{b}`", order(scores[a], scores[b])) for a, b in pairs]
        agreeing = sum(what == "better" for _, what in found)
        told = "; ".join(f"{name}: {what}" for name, what in found)
        seen.append(f"The smaller mini-batch of two neighbours is better in {agreeing} of {len(found)} pairs ({told}).")
        known = {name: mean(ones) for name, ones in speeds.items() if ones}
        if known:
            fastest = max(known, key=lambda name: known[name])
            seen.append(f"Training is fastest with `{fastest}`: {spread(speeds[fastest], 0)} tokens a second of the whole model.")

        def draw(figure: Figure) -> None:
            quality, time = figure.subplots(1, 2)
            for axes, values, label in ((quality, scores, "test bits per byte"), (time, speeds, "training, tokens per second")):
                for place, row in enumerate(rows):
                    axes.scatter([place] * len(values[row.name]), values[row.name], color="C0", s=24, zorder=3)
                middle = [(place, mean(values[row.name])) for place, row in enumerate(rows) if values[row.name]]
                axes.plot(*zip(*middle, strict=True), color="gray", linewidth=1)
                axes.set_xticks(range(len(rows)), [row.name.removeprefix("b=") for row in rows])
                axes.set(xlabel="mini-batch size b (tokens)", ylabel=label)
                axes.grid(alpha=0.3)
            time.set_ylim(bottom=0)
            figure.suptitle(self.title)

        return Report(
            [*seen, *edges(compared)], {"By size of the mini-batch": table}, records, draw if any(scores.values()) else None,
            [*settings_of(size, self.lower_is_better, self.objective), SHARED], compared.failures(),
        )  # fmt: skip
