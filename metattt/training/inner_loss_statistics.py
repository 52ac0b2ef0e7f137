"""The losses of the inner loops while the outer loop trains: the statistics of `metattt.measures.inner_loss`, in the
log."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch import Tensor

from metattt.errors import MetaTTTError, check_integer
from metattt.measures.inner_loss import inner_loss_curves, unmeasured
from metattt.models.language_model import LanguageModel
from metattt.registry import register

LOGGED = ("init", "step_0", "step_1")


@register(group="callback", name="inner_loss_statistics")
class InnerLossStatistics(lightning.Callback):
    """Logs `inner_loss/layer{i}/{init,step_0,step_1}`: means over the mini-batches of the first validation batch.

    Args:
        every: validation runs between two measurements; 0 measures never.
        windows: read this many windows of the batch, at most.

    Raises:
        MetaTTTError: a negative number; when training starts, a model without curves.
    """

    def __init__(self, every: int = 0, windows: int = 8):
        for key, value, least in (("every", every, 0), ("windows", windows, 1)):
            check_integer(f"callbacks.inner_loss.{key}", value, least)
        self.every, self.windows = every, windows
        self.batch: Tensor | None = None  # [B, T] the first batch of this validation run

    def setup(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        if not self.every:
            return
        model = pl_module.model
        reasons = (
            unmeasured(model)
            if isinstance(model, LanguageModel)
            else {0: f"{type(model).__name__} is not a language model"}
        )
        if isinstance(model, LanguageModel) and len(reasons) < len(model.blocks):
            return
        raise MetaTTTError(
            f"callbacks.inner_loss has nothing to measure: {reasons[0]}. Set callbacks.inner_loss.every=0"
        )

    def on_validation_batch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if batch_idx == 0 and self._due(trainer):
            real = batch[(batch >= 0).all(1)]  # not the windows that only fill up a batch, unless there are no others
            self.batch = (real if len(real) else batch.clamp(min=0))[: self.windows, :-1]

    def on_validation_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if self.batch is None:
            return
        devices = [pl_module.device] if pl_module.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):  # random views must not change what training draws
            curves = inner_loss_curves(pl_module.model, self.batch, self.batch.shape[1])  # type: ignore[arg-type]
        for index, statistics in curves.items():
            for name in LOGGED:
                pl_module.log(f"inner_loss/layer{index}/{name}", statistics[name].mean(), sync_dist=True)
        self.batch = None

    def _due(self, trainer: lightning.Trainer) -> bool:
        """Whether this validation run is measured. Counted from the step alone, so that a resumed run goes on as it
        would have."""
        if not self.every:
            return False
        interval = trainer.val_check_batch
        if not isinstance(interval, int) or interval < 1:  # validation by epochs
            return (trainer.current_epoch + 1) % self.every == 0
        return trainer.global_step * trainer.accumulate_grad_batches // interval % self.every == 0
