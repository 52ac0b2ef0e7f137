"""Claim `latency`: time per token of training, prefill and decoding against the context, all layers in turn in one
process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metattt.registry import register
from metattt.reproduce.base import Claim, Size
from metattt.reproduce.cells import Cell, Result, Runner
from metattt.reproduce.report import Record, Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WHAT = {"Training": "training", "Prefill": "prefill", "Decoding": "decoding"}  # tables of `metattt bench model`


@register(group="claim", name="latency")
class Latency(Claim):
    """Rows are calls of `metattt bench model`, each with a training length and contexts; layers are timed in turn."""

    def count(self, size: Size) -> int:
        return len(self.rows(size))

    def run(self, size: Size, runner: Runner) -> Report:
        rows = self.rows(size)
        cells = [Cell(row.name, "bench", ("benchmark=model", *row.overrides, *size.overrides)) for row in rows]
        results = runner.run(cells)
        records = [record for result in results if result.finished for record in _records(result)]
        curves: dict[str, dict[str, list[tuple[int, float]]]] = {}
        for record in records:
            curves.setdefault(record["what"], {}).setdefault(record["layer"], []).append((record["tokens"], record["ms_per_token"]))
        tables: dict[str, list[Record]] = {}
        for what, layers in curves.items():
            lengths = sorted({length for points in layers.values() for length, _ in points})
            tables[f"{what.capitalize()}, ms per token"] = [
                {"layer": f"`{layer}`", **{f"{length:,}": dict(points).get(length) for length in lengths}}
                for layer, points in layers.items()
            ]

        def draw(figure: Figure) -> None:
            figure.set_size_inches(4.2 * len(curves), 4.2)
            for axes, (what, layers) in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True):
                for layer, points in layers.items():
                    axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=layer)
                lengths = sorted({length for points in layers.values() for length, _ in points})
                axes.set_xscale("log", base=2)
                axes.set_xticks(lengths, [f"{length:,}" for length in lengths], fontsize=8)
                axes.set_ylim(bottom=0)
                axes.set(title=what, xlabel="context (tokens)", ylabel="ms per token")
                axes.grid(alpha=0.3)
            figure.axes[0].legend(fontsize="small")

        settings = [f"every cell: `metattt bench model {' '.join(size.overrides)}`"]
        settings.append(
            "the least of the timed calls; layers are called in turn, cells are not: other programs on the machine slow some more"
        )
        failed = [f"{result.cell.name}: {result.message}" for result in results if not result.finished]
        return Report(_growth(curves), tables, records, draw if records else None, settings, failed)


def _records(result: Result) -> list[Record]:
    """The times of one benchmark; the least, which other programs on the machine lengthen least."""
    report: dict[str, Any] = json.loads((Path(result.folder) / "model.json").read_text(encoding="utf-8"))
    found: list[Record] = []
    for table, what in WHAT.items():
        for row in report["tables"].get(table, ()):
            tokens = row["after tokens" if what == "decoding" else "T"]
            time = row["ms per token, least"] if what == "decoding" else 1000 * row["s, least"] / tokens
            found.append({"layer": row["layer"], "what": what, "tokens": tokens, "ms_per_token": time})
    return found


def _growth(curves: dict[str, dict[str, list[tuple[int, float]]]]) -> list[str]:
    """A sentence for each kind of work: how the time of a token changes from the shortest context to the longest."""
    seen = []
    for what, layers in curves.items():
        told = []
        for layer, points in layers.items():
            (short, before), (long, after) = min(points), max(points)
            if short < long:
                told.append(f"`{layer}` {after / before:.2f} times")
        if told:
            seen.append(f"{what.capitalize()}, time per token with {long:,} tokens over that with {short:,}: {', '.join(told)}.")
    return seen
