"""The outer loop for sequences that come with their labels: cross-entropy and accuracy where a class is asked for, squared
error where a number is."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torchmetrics import MeanMetric

from metattt.checkpoints.record import RECORD
from metattt.data.sequences import NO_LABEL, Batch
from metattt.measures.labelled import answers, losses_and_hits
from metattt.training.batches import recount_batches
from metattt.training.text_module import AdamW


class LabelledSequences(lightning.LightningModule):
    """Trains a model on `data=recall` or `data=in_context`.

    Logged of validation: `loss`, the mean over what is asked for (nats, or squared error), and `accuracy` of classes.

    Args:
        model: a language model or a `Regression`.
        recipe: the outer optimizer and its schedule.
        record: of the run (`metattt.checkpoints.record`), kept in every checkpoint.
    """

    def __init__(self, model: Any, recipe: AdamW, record: dict[str, Any]):
        super().__init__()
        self.model, self.recipe, self.record = model, recipe, record
        self.step_loss = torch.zeros(())  # of the batches of a step so far, summed
        self.validation_loss, self.validation_accuracy = MeanMetric(), MeanMetric()

    def on_fit_start(self) -> None:
        self.model.check_causal()

    def batch_loss(self, batch: Batch) -> Tensor:
        """The loss of a batch, as a training step takes it: the mean over what is asked for."""
        return losses_and_hits(*answers(self.model, *batch))[0].mean()

    def item_losses(self, batch: Batch) -> Tensor:
        """The loss of every token `[B, T]`, 0 where nothing is asked."""
        inputs, labels = batch
        asked = labels != NO_LABEL if not labels.is_floating_point() else ~labels.isnan()
        losses = losses_and_hits(*answers(self.model, inputs, labels))[0]
        return torch.zeros(labels.shape, dtype=losses.dtype, device=losses.device).masked_scatter(asked, losses)

    def shortest_loss(self) -> Tensor:
        """The loss of two tokens: what it does not depend on, a step may leave without a gradient."""
        ids = torch.zeros(1, 2, dtype=torch.long, device=self.device)
        if hasattr(self.model, "vocab_size"):
            return self.batch_loss((ids, ids))
        return self.batch_loss((torch.zeros(1, 2, self.model.in_features, device=self.device), ids.float()))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.batch_loss(batch)
        per_step = self.trainer.accumulate_grad_batches
        self.step_loss = loss.detach() + (self.step_loss if batch_idx % per_step else 0)
        if (batch_idx + 1) % per_step == 0:  # the whole step: all of its batches, in all processes
            self.log("step", torch.tensor(self.global_step + 1.0))
            self.log("train/loss", self.trainer.strategy.reduce(self.step_loss / per_step, reduce_op="mean"))
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.log("lr", torch.tensor(float(optimizer.param_groups[0]["lr"])))

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        losses, hits = losses_and_hits(*answers(self.model, *batch))
        self.validation_loss.update(losses)
        if hits is not None:
            self.validation_accuracy.update(hits)

    def on_validation_epoch_end(self) -> None:
        self.log("step", float(self.global_step))
        for name, metric in (("loss", self.validation_loss), ("accuracy", self.validation_accuracy)):
            if metric.update_called:
                self.log(f"validation/{name}", metric.compute())
            metric.reset()

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer = self.recipe.optimizer(self.model)
        num_steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self.recipe.factor(step, num_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[RECORD] = self.record

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        recount_batches(checkpoint, self.trainer.accumulate_grad_batches)
