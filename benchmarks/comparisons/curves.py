"""Claims whose rows are curves: loss by position (`position`, `long`), and the inner loss."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from common import Row as Record
from report import Report

from comparisons.comparison import BANDS, Claim, Compared, bits_per_byte, compare, draw_curves, ranked, spread, table
from comparisons.jobs import Runner

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHARED = "other positions are other stretches of text: what falls or rises there in all rows alike is the text"


class Bin(NamedTuple):
    """Positions `first` … `last` (tokens of context, counted from 1), and the bits per byte over them."""

    first: int
    last: int
    bits_per_byte: float


def position(claim: Claim, runner: Runner) -> Report:
    """Loss by token position: which layers still gain from more context."""
    compared = compare(claim, runner)
    found = {(one.row.name, one.seed): [Bin(int(row["first"]), int(row["last"]), float(row["bits_per_byte"]))
             for row in table(one.test, "by_position.csv")] for one in compared.scored}  # fmt: skip
    curves: dict[str, list[list[Bin]]] = {}
    for (name, _), bins in found.items():
        curves.setdefault(name, []).extend([bins] if bins else [])
    curves = {name: ones for name, ones in curves.items() if ones}
    lengths = [word.partition("=")[2] for word in claim.overrides if word.startswith("data.context_length=")]
    trained = int(lengths[-1]) if lengths else 0
    ends = sorted({one.last for seeds in curves.values() for bins in seeds for one in bins})
    inside = [end for end in ends if end <= trained] or ends

    def at(name: str, last: int) -> list[float]:
        return [one.bits_per_byte for bins in curves[name] for one in bins if one.last == last]

    def change(name: str, before: int, after: int) -> str:
        """Of the same runs, so the spread of runs plays no part."""
        first, last = at(name, before), at(name, after)
        steps = [b - a for a, b in zip(first, last, strict=True)]
        how = "rises" if min(steps) > 0 else "falls" if max(steps) < 0 else "differs between seeds"
        return f"{how} ({spread(first)} to {spread(last)}, by {spread(steps)})"

    seen, middle = [], inside[len(inside) // 2] if inside else 0
    for name in curves:
        within = change(name, middle, inside[-1])
        told = [f"from tokens up to {middle:,} to tokens up to {inside[-1]:,}, bits per byte {within}"]
        if ends[-1] > inside[-1]:
            told.append(f"beyond the training length, up to {ends[-1]:,}, {change(name, inside[-1], ends[-1])}")
        seen.append(f"`{name}`: {'; '.join(told)}.")
    for end in dict.fromkeys([*inside[-1:], *ends[-1:]]):
        seen.append(f"Tokens up to {end:,}, from the best: {ranked({name: at(name, end) for name in curves})}.")
    places = sorted({*ends[::-1][:: max(1, len(ends) // 6)][:6], *inside[-1:]})
    rows: list[Record] = []
    for row in claim.rows:
        rate, tests = compared.best(row.name), [one.test for one in compared.of(row.name)]
        values: Record = {"layer": f"`{row.name}`", "learning rate": "" if rate is None else f"{rate:g}"}
        values["seeds"] = len(tests)
        values["all positions"] = spread([bits_per_byte(test) for test in tests])
        rows.append(values | {f"to {end:,}": spread(at(row.name, end) if row.name in curves else []) for end in places})
    records = [{"row": name, "seed": seed, **one._asdict()} for (name, seed), bins in found.items() for one in bins]

    def draw(figure: Figure) -> None:
        from matplotlib.ticker import FuncFormatter, NullFormatter

        axes = figure.add_subplot(ylabel="test bits per byte", title=claim.title, xlabel="position (tokens of context)")
        draw_curves(axes, {
            name: [[(math.sqrt(one.first * one.last), one.bits_per_byte) for one in bins] for bins in seeds]
            for name, seeds in curves.items()
        })  # fmt: skip
        known = sorted(one.bits_per_byte for seeds in curves.values() for bins in seeds for one in bins)
        axes.set_ylim(known[0] - 0.1, min(known[-1], 1.6 * known[len(known) // 2]) + 0.1)  # a model that went astray
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.axvline(trained, linestyle=":", color="gray", label="training length")
        axes.legend(fontsize="small")

    return claim.report(compared, seen, {"Test bits per byte by position": rows}, records, draw, BANDS, SHARED)


# -- the inner loss ----------------------------------------------------------------------------------------------------

WEIGHTS = {"init": "ℓ(W_0)", "step_0": "ℓ(W_{t-1})", "step_1": "ℓ(W_t)"}


class Layer(NamedTuple):
    """The curves of one layer of one run: position, and ℓ with each of the `WEIGHTS`, by mini-batch."""

    row: str
    seed: int
    block: int
    position: list[float]
    losses: dict[str, list[float]]

    def quarter(self, weights: str, last: bool) -> float:
        """The mean of the first or last quarter of the sequence."""
        values = self.losses[weights]
        count = max(1, len(values) // 4)
        return statistics.fmean(values[-count:] if last else values[:count])

    def gap(self, last: bool) -> float:
        return self.quarter("init", last) - self.quarter("step_1", last)

    def curve(self, weights: str) -> list[tuple[float, float]]:
        """At most 16 points for a picture, or a few more, each a mean."""
        step = max(1, len(self.position) // 16)
        pieces = [slice(at, at + step) for at in range(0, len(self.position), step)]
        return [(statistics.fmean(self.position[one]), statistics.fmean(self.losses[weights][one])) for one in pieces]


def inner_loss(claim: Claim, runner: Runner) -> Report:
    """ℓ(W₀), ℓ(W_{t−1}) and ℓ(W_t), as Figure 7 of the TTT paper and Figures 1, 3 and 4 of MTTT's show them."""
    compared = compare(claim, runner)
    layers = _layers(compared)
    groups = {(row.name, one.block): [other for other in layers if (other.row, other.block) == (row.name, one.block)]
              for row in claim.rows for one in layers if one.row == row.name}  # fmt: skip
    rows: list[Record] = [
        {"row": f"`{name}`", "layer": block, "seeds": len(ones),
         **{f"`{sign}`, {'last' if last else 'first'} quarter": spread([one.quarter(key, last) for one in ones])
            for key, sign in WEIGHTS.items() for last in (False, True)}}
        for (name, block), ones in groups.items()
    ]  # fmt: skip
    seen = []
    for name in dict.fromkeys(one.row for one in layers):
        seen += _sentences(name, [one for one in layers if one.row == name])

    def draw(figure: Figure) -> None:
        names = list(dict.fromkeys(name for name, _ in groups))
        blocks = sorted({block for _, block in groups})
        figure.set_size_inches(4.2 * len(blocks), 3.2 * len(names))
        grid = figure.subplots(len(names), len(blocks), squeeze=False)
        for (name, block), ones in groups.items():
            axes = grid[names.index(name)][blocks.index(block)]
            signs = {key: f"${sign}$".replace("ℓ", r"\ell") for key, sign in WEIGHTS.items()}
            draw_curves(axes, {sign: [one.curve(key) for one in ones] for key, sign in signs.items()})
            axes.set(title=f"{name}, layer {block}", xlabel="position (tokens)", ylabel="inner loss ℓ")
        grid[0][0].legend(fontsize="small")

    records = [
        {"row": one.row, "seed": one.seed, "layer": one.block, "position": at}
        | {key: one.losses[key][place] for key in WEIGHTS}
        for one in layers
        for place, at in enumerate(one.position)
    ]
    title = "Inner loss, mean over test windows, heads and features"
    return claim.report(compared, seen, {title: rows}, records, draw, BANDS)


def _layers(compared: Compared) -> list[Layer]:
    """The curves of all layers of all runs."""
    found = []
    for one in compared.scored:
        rows = table(one.test, "inner_loss.csv")
        for block in sorted({int(row["layer"]) for row in rows}):
            mine = [row for row in rows if int(row["layer"]) == block]
            losses = {name: [float(row[name]) for row in mine] for name in WEIGHTS}
            found.append(Layer(one.row.name, one.seed, block, [float(row["position"]) for row in mine], losses))
    return found


def _sentences(name: str, layers: Sequence[Layer]) -> list[str]:
    """How many curves are as the papers show them."""
    init, before, after = WEIGHTS.values()
    step = sum(statistics.fmean(one.losses["step_1"]) < statistics.fmean(one.losses["step_0"]) for one in layers)
    learned = sum(one.quarter("step_0", True) < one.quarter("init", True) for one in layers)
    larger = sum(one.gap(True) > one.gap(False) for one in layers)
    return [
        f"`{name}`, {len(layers)} curves (layers and seeds): a mini-batch's step lowers its own loss, "
        f"`{after} < {before}`, in {step}; what was learned before helps, `{before} < {init}` in the last quarter, in "
        f"{learned}; the gap `{init} - {after}` is larger in the last quarter than in the first in {larger}."
    ]
