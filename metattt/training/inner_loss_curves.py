"""How well the inner loop learns while the outer loop trains it: T + 1 curves per layer (arXiv 2310.13807, Fig. 1 and
3).

For layers that take steps on a whole image; those of language models are in the plot of the loss curve.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import lightning

from metattt.errors import check_integer
from metattt.measures.inner_steps import inner_losses_by_layer
from metattt.metrics_file import STEP
from metattt.registry import register
from metattt.training.csv_log import logged_rows
from metattt.training.picture import plot_inner_steps
from metattt.training.random_state import apart_from_the_run

COLUMN = re.compile(r"inner_loss/layer(\d+)/step_(\d+)")


@register(group="callback", name="inner_loss_curves")
class InnerLossCurves(lightning.Callback):
    """At every validation, the inner loss before the first inner step and after each, summed over heads: logged as
    `inner_loss/layer{i}/step_{t}`, and drawn from the run's log (`logger=csv`).

    Args:
        path: the PNG.
        images: images of the first validation batch that are averaged over.
    """

    def __init__(self, path: str, images: int = 32):
        check_integer("callbacks.inner_loss_curves.images", images)
        self.path, self.images = Path(path), images

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
        with apart_from_the_run(pl_module.device):  # permutations are drawn
            curves = inner_losses_by_layer(pl_module.model, batch[0][: self.images])  # type: ignore[arg-type]
        for layer, losses in curves.items():
            for step, loss in enumerate(losses):
                pl_module.log(f"inner_loss/layer{layer}/step_{step}", loss, rank_zero_only=True, batch_size=1)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        curves: dict[tuple[int, int], list[tuple[int, float]]] = defaultdict(list)
        for row in logged_rows(trainer):
            for column, value in row.items():
                if value and (found := COLUMN.fullmatch(column)):
                    curves[int(found[1]), int(found[2])].append((int(row[STEP]), float(value)))
        if curves:
            plot_inner_steps(curves, self.path)
