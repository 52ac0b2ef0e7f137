"""The plot of a run: its metric against steps, next to the inner losses by position in a window."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from metattt.measures.inner_loss import Curves

INK, TRAINING, VALIDATION, BEFORE = "#444444", "#9db8d2", "#1f4e79", "#c8781e"
BASELINES = ("#777777", "#444444")


def plot(
    points: Mapping[str, Sequence[Sequence[float]]],
    baselines: Mapping[str, float],
    path: Path,
    label: str,
    title: str,
    inner: Mapping[int, Curves] | None = None,
) -> None:
    """Draws a run into a PNG file.

    Args:
        points: `train` and `validation`: pairs of a step and the metric.
        baselines: the metric of other models by their names, a dashed line each.
        path: the PNG.
        label: of the metric, with its unit.
        title: of the left panel.
        inner: inner losses by the index of the block (`metattt.measures.inner_loss`): a panel on the right. None: it is
            left out.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.5 if inner else 7, 4.6), layout="constrained", dpi=120)
    panels = figure.subplots(1, 2 if inner else 1, squeeze=False)[0]
    _outer(panels[0], points, baselines, label, title)
    if inner:
        _inner(panels[1], inner)
    for axes in panels:
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _outer(
    axes: Any, points: Mapping[str, Sequence[Sequence[float]]], baselines: Mapping[str, float], label: str, title: str
) -> None:
    """The metric against steps, and the baselines, the highest first in the legend as in the picture."""
    if points["train"]:
        axes.plot(*zip(*points["train"], strict=True), linewidth=1.0, color=TRAINING, label="training, one batch")
    if points["validation"]:
        axes.plot(*zip(*points["validation"], strict=True), "o-", markersize=4, color=VALIDATION, label="validation")
    for (name, value), color in zip(sorted(baselines.items(), key=lambda pair: -pair[1]), BASELINES * 9, strict=False):
        axes.axhline(value, linestyle=(0, (5, 3)), linewidth=1.1, color=color, label=f"{name}  {value:.3f}")
    for step, value in [pair for pair in points["validation"] if math.isfinite(pair[1])][-1:]:
        place = {"xytext": (0, -14), "textcoords": "offset points", "ha": "right"}
        axes.annotate(f"{value:.3f}", (step, value), fontsize=9.5, fontweight="bold", color=VALIDATION, **place)
    axes.set(xlabel="outer-loop steps", ylabel=label, title=title)
    seen = sorted(value for curve in points.values() for _, value in curve if math.isfinite(value))
    if seen:  # the first steps would squeeze the rest
        low = min([seen[0], *baselines.values()])
        high = max([seen[: max(1, int(0.93 * len(seen)))][-1], *baselines.values()])
        axes.set_ylim(low - 0.08 * (high - low) - 0.05, high + 0.08 * (high - low) + 0.05)


def _inner(axes: Any, curves: Mapping[int, Curves]) -> None:
    """The mean over layers before and after the step on each mini-batch; the difference is what a step learns."""
    lines = {f", layer {index}": c for index, c in curves.items()}
    if len({tuple(c["position"].tolist()) for c in curves.values()}) == 1:  # else they share no positions
        names = ("position", "init", "step_0", "step_1")
        lines = {"": {name: torch.stack([c[name].double() for c in curves.values()]).mean(0) for name in names}}
    for suffix, line in lines.items():
        where, init, before, after = (
            line[name].double().cpu().numpy() for name in ("position", "init", "step_0", "step_1")
        )
        axes.plot(where, init, color="#999999", linewidth=1.2, linestyle=(0, (2, 2)), label=f"W0, nothing read{suffix}")
        axes.plot(where, before, "o-", markersize=3.5, color=BEFORE, label=f"before the step on these tokens{suffix}")
        axes.plot(where, after, "o-", markersize=3.5, color=VALIDATION, label=f"after it{suffix}")
        axes.fill_between(where, after, before, where=after <= before, color=BEFORE, alpha=0.15, linewidth=0)
        if (init > 0).all() and (after > 0).all() and (before > 0).all() and init.max() > 4 * after.min():
            axes.set_yscale("log")
    count = f"{'mean of ' if '' in lines else ''}{len(curves)} layers" if len(curves) > 1 else "1 layer"
    title = f"The hidden state learns while it reads ({count})"
    axes.set(xlabel="position in the window (tokens)", ylabel="inner loss (mean squared error)", title=title)
