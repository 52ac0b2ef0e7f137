"""Claim `inner_loss`: the loss of the inner task before, at the start and after each mini-batch, by position and layer."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from metattt.registry import register
from metattt.reproduce.base import Size
from metattt.reproduce.cells import Runner
from metattt.reproduce.compare import Compared, Comparison, settings_of
from metattt.reproduce.curves import draw_curves
from metattt.reproduce.report import Record, Report
from metattt.reproduce.seeds import spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WEIGHTS = {"init": "ℓ(W_0)", "step_0": "ℓ(W_{t-1})", "step_1": "ℓ(W_t)"}
POINTS = 16  # of a curve in the picture, each the mean of as many mini-batches


class Layer(NamedTuple):
    """The curves of one layer of one run: position, and ℓ with each of the `WEIGHTS`, by mini-batch."""

    row: str
    seed: int
    index: int
    position: list[float]
    losses: dict[str, list[float]]

    def quarter(self, weights: str, last: bool) -> float:
        """The mean of the first or last quarter of the sequence."""
        values = self.losses[weights]
        count = max(1, len(values) // 4)
        return statistics.fmean(values[-count:] if last else values[:count])

    @property
    def is_dead(self) -> bool:
        """Whether no step changed the loss: the layer's inner learning rates have become zero."""
        pairs = zip(self.losses["init"], self.losses["step_1"], strict=True)
        return all(abs(first - last) <= 1e-6 * abs(first) for first, last in pairs)

    def curve(self, weights: str) -> list[tuple[float, float]]:
        """Points for a picture."""
        values = self.losses[weights]
        step = max(1, len(values) // POINTS)
        places = range(0, len(values), step)
        return [(statistics.fmean(self.position[at : at + step]), statistics.fmean(values[at : at + step])) for at in places]


def layers_of(compared: Compared) -> list[Layer]:
    """The curves of all layers of all runs."""
    found = []
    for one in compared.scored:
        if not one.finished or one.test is None:
            continue
        by_layer = _read(one.test.folder / "inner_loss.csv")
        for index, rows in sorted(by_layer.items()):
            losses = {name: [float(row[name]) for row in rows] for name in WEIGHTS}
            found.append(Layer(one.row.name, one.seed, index, [float(row["position"]) for row in rows], losses))
    return found


def _read(file: Path) -> dict[int, list[dict[str, str]]]:
    by_layer: dict[int, list[dict[str, str]]] = {}
    if file.is_file():
        with file.open(newline="", encoding="utf-8") as stream:
            for row in csv.DictReader(stream):
                by_layer.setdefault(int(row["layer"]), []).append(row)
    return by_layer


@register(group="claim", name="inner_loss")
class InnerLoss(Comparison):
    """ℓ(W₀), ℓ(W_{t−1}) and ℓ(W_t), as Figure 7 of the TTT paper and Figures 1, 3 and 4 of MTTT's show them."""

    def run(self, size: Size, runner: Runner) -> Report:
        compared = self.compare(size, runner)
        layers = layers_of(compared)
        table: list[Record] = []
        seen = []
        for name in dict.fromkeys(one.row for one in layers):
            mine = [one for one in layers if one.row == name]
            for index in sorted({one.index for one in mine}):
                ones = [one for one in mine if one.index == index]
                table.append({
                    "row": f"`{name}`", "layer": index, "seeds": len(ones),
                    **{f"`{sign}`, {'last' if last else 'first'} quarter": spread([one.quarter(key, last) for one in ones])
                       for key, sign in WEIGHTS.items() for last in (False, True)},
                })  # fmt: skip
            seen += _sentences(name, mine)

        def draw(figure: Figure) -> None:
            panels = list(dict.fromkeys((one.row, one.index) for one in layers))
            columns = max(sum(row == name for row, _ in panels) for name, _ in panels)
            names = list(dict.fromkeys(row for row, _ in panels))
            figure.set_size_inches(4.2 * columns, 3.2 * len(names))
            grid = figure.subplots(len(names), columns, squeeze=False)
            for row, index in panels:
                axes = grid[names.index(row)][[i for name, i in panels if name == row].index(index)]
                ones = [one for one in layers if (one.row, one.index) == (row, index)]
                draw_curves(axes, {f"${sign}$".replace("ℓ", r"\ell"): [one.curve(key) for one in ones] for key, sign in WEIGHTS.items()})
                axes.set(title=f"{row}, layer {index}", xlabel="position (tokens)", ylabel="inner loss ℓ")
            grid[0][0].legend(fontsize="small")

        records = [
            {"row": one.row, "seed": one.seed, "layer": one.index, "position": at, **{key: one.losses[key][place] for key in WEIGHTS}}
            for one in layers
            for place, at in enumerate(one.position)
        ]
        return Report(
            seen, {"Inner loss, mean over test windows, heads and features": table}, records, draw if layers else None,
            settings_of(size, self.lower_is_better, self.objective), compared.failures(),
        )  # fmt: skip


def _sentences(name: str, layers: Sequence[Layer]) -> list[str]:
    """How many curves are as the papers show them."""
    count = len(layers)
    step = sum(statistics.fmean(one.losses["step_1"]) < statistics.fmean(one.losses["step_0"]) for one in layers)
    learned = sum(one.quarter("step_0", True) < one.quarter("init", True) for one in layers)
    gap = sum(_gap(one, True) > _gap(one, False) for one in layers)
    dead = [f"layer {one.index} with seed {one.seed}" for one in layers if one.is_dead]
    init, before, after = WEIGHTS.values()
    told = [
        f"`{name}`, {count} curves (layers and seeds): the step of a mini-batch lowers its own loss, `{after} < {before}`, in {step}; "
        f"what was learned before helps, `{before} < {init}` in the last quarter of the sequence, in {learned}; "
        f"the gap `{init} - {after}` is larger in the last quarter than in the first in {gap}."
    ]
    if dead:
        told.append(f"In {len(dead)} of these curves the inner loop does not move, `{after} = {init}` to a millionth: {', '.join(dead)}.")
    return told


def _gap(layer: Layer, last: bool) -> float:
    return layer.quarter("init", last) - layer.quarter("step_1", last)
