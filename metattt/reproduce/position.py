"""Claims `position` and `long`: bits per byte by position, up to the training length and far beyond it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from metattt.registry import register
from metattt.reproduce.base import Size
from metattt.reproduce.cells import Runner
from metattt.reproduce.compare import Comparison, edges, settings_of
from metattt.reproduce.curves import (
    BANDS,
    at,
    change,
    curves_of,
    draw_curves,
    middles,
    positions,
    ranked,
    records_of,
    table_of,
    value_of,
)
from metattt.reproduce.report import Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLACES = 6  # bins in the table
SHARED = "other positions are other stretches of text: what falls or rises there in all rows alike is the text"


@register(group="claim", name="position")
class Position(Comparison):
    """Loss by token position (Figure 5 of the TTT paper): which layers still gain from more context."""

    def run(self, size: Size, runner: Runner) -> Report:
        compared = self.compare(size, runner)
        curves = curves_of(compared)
        trained = value_of(size.overrides, "data.context_length")
        ends = sorted({bin.last for seeds in curves.values() for curve in seeds for bin in curve})
        inside = [end for end in ends if trained is None or end <= trained]
        seen = []
        for name, seeds in curves.items():
            told = []
            if len(inside) > 1:
                middle = inside[len(inside) // 2]
                within = change(seeds, middle, inside[-1])
                told.append(f"from tokens up to {middle:,} to tokens up to {inside[-1]:,}, bits per byte {within}")
            if inside and ends[-1] > inside[-1]:
                beyond = change(seeds, inside[-1], ends[-1])
                told.append(f"beyond the training length, up to {ends[-1]:,}, {beyond}")
            seen.append(f"`{name}`: {'; '.join(told)}.")
        for end in dict.fromkeys([*inside[-1:], *ends[-1:]]):
            values = {name: at(seeds, end) for name, seeds in curves.items()}
            seen.append(f"Tokens up to {end:,}, from the best: {ranked(values)}.")
        step = max(1, len(ends) // PLACES)
        places = sorted({*ends[::-1][::step][:PLACES], *inside[-1:]})

        def draw(figure: Figure) -> None:
            axes = figure.add_subplot(ylabel="test bits per byte", title=self.title)
            draw_curves(axes, {name: [middles(curve) for curve in seeds] for name, seeds in curves.items()})
            values = sorted(bin.bits_per_byte for seeds in curves.values() for curve in seeds for bin in curve)
            axes.set_ylim(values[0] - 0.1, min(values[-1], 1.6 * values[len(values) // 2]) + 0.1)  # a model that went astray
            positions(axes, trained)

        return Report(
            [*seen, *edges(compared)], {"Test bits per byte by position": table_of(compared, places)}, records_of(compared),
            draw if curves else None, [*settings_of(size, self.lower_is_better, self.objective), BANDS, SHARED],
            compared.failures(),
        )  # fmt: skip


