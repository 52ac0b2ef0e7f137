"""How well the inner loop learns while the outer loop trains it: T + 1 curves per layer (arXiv 2310.13807, Fig. 1 and
3).

For layers that take steps on a whole image; those of language models are in the picture of the loss curve.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import lightning
import torch

from metattt.errors import check_integer
from metattt.measures.inner_steps import inner_losses_by_layer
from metattt.registry import register


@register(group="callback", name="inner_loss_curves")
class InnerLossCurves(lightning.Callback):
    """At every validation, the inner loss before the first inner step and after each, summed over heads.

    Logged as `inner_loss/layer{i}/step_{t}`, and written as CSV and PNG. The points are kept in the checkpoint, so that
    the curves of a resumed run are whole.

    Args:
        path: the PNG; the CSV has the same name.
        images: images of the first validation batch that are averaged over.
    """

    def __init__(self, path: str, images: int = 32):
        check_integer("callbacks.inner_loss_curves.images", images)
        self.path, self.images = Path(path), images
        self.points: list[list[float]] = []  # step, layer (from 1), inner step, loss

    def state_dict(self) -> dict[str, Any]:
        return {"points": self.points}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.points = state_dict["points"]

    def on_validation_batch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if batch_idx or not trainer.is_global_zero:
            return
        self.points = [point for point in self.points if point[0] != trainer.global_step]  # one that was cut off
        devices = [pl_module.device] if pl_module.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):  # the permutations drawn here are none of the run's
            curves = inner_losses_by_layer(pl_module.model, batch[0][: self.images])  # type: ignore[arg-type]
        for layer, losses in curves.items():
            for step, loss in enumerate(losses.tolist()):
                self.points.append([trainer.global_step, layer, step, loss])
                pl_module.log(f"inner_loss/layer{layer}/step_{step}", loss, rank_zero_only=True, batch_size=1)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if not self.points or not trainer.is_global_zero:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_suffix(".csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["step", "layer", "inner_step", "loss"])
            writer.writerows([int(step), int(layer), int(inner), loss] for step, layer, inner, loss in self.points)
        plot(self.points, self.path)


def plot(points: list[list[float]], path: Path) -> None:
    """One panel per layer, one curve per inner step, against steps of the outer loop."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layers = sorted({layer for _, layer, _, _ in points})
    columns = min(4, len(layers))
    rows = math.ceil(len(layers) / columns)
    figure = Figure(figsize=(3.2 * columns, 2.6 * rows), layout="constrained")
    for panel, layer in enumerate(layers, start=1):
        axes = figure.add_subplot(rows, columns, panel)
        for inner in sorted({step for _, its, step, _ in points if its == layer}):
            curve = [(step, loss) for step, its, t, loss in points if its == layer and t == inner]
            axes.plot(*zip(*curve, strict=True), marker=".", label=f"t = {int(inner)}")
        axes.set(title=f"layer {int(layer)}", xlabel="outer-loop steps", ylabel="inner loss", yscale="log")
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize="small")
    FigureCanvasAgg(figure).print_png(path)
