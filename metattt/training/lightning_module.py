"""The outer loop: next-token prediction with AdamW."""

from __future__ import annotations

import math
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn

from metattt.errors import MetaTTTError
from metattt.models.language_model import LanguageModel
from metattt.registry import register
from metattt.training.checkpoint import KEY, VERSION


@register(group="training", name="adamw")
class AdamW:
    """The recipe of the TTT papers: AdamW, linear warm-up, cosine decay (arXiv 2407.04620, App. C).

    Args:
        lr: peak learning rate.
        betas: decay of the first and the second moment.
        eps: added to the root of the second moment.
        weight_decay: of projections and embeddings. Norms, biases, convolutions, inner learning rates and the initial
            weights of the inner loop do not decay.
        warmup_fraction: share of the steps with a rising learning rate.
        min_lr: learning rate at the last step.
    """

    def __init__(
        self,
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        warmup_fraction: float = 0.1,
        min_lr: float = 1e-5,
    ):
        if not lr > 0:
            raise MetaTTTError(f"training.lr={lr} is not allowed: it must be positive")
        if not 0 <= warmup_fraction <= 1:
            raise MetaTTTError(f"training.warmup_fraction={warmup_fraction} is not allowed: it must be between 0 and 1")
        self.lr, self.betas, self.eps, self.weight_decay = lr, (float(betas[0]), float(betas[1])), eps, weight_decay
        self.warmup_fraction, self.min_lr = warmup_fraction, min_lr

    def factor(self, step: int, num_steps: int) -> float:
        """The learning rate at a step, over its peak."""
        warmup = max(1, round(self.warmup_fraction * num_steps))
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, num_steps - warmup))
        low = min(self.min_lr / self.lr, 1.0)
        return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The outer optimizer, with the parameters in two groups: those that decay, and the others."""
        matrices = [module.weight for module in model.modules() if isinstance(module, (nn.Linear, nn.Embedding))]
        decayed = {id(weight) for weight in matrices}
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in parameters if id(p) in decayed], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if id(p) not in decayed], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps)


class LanguageModeling(lightning.LightningModule):
    """Trains a language model on windows of tokens `[B, T + 1]`: the first T are read, the last T predicted.

    Args:
        model: the language model.
        recipe: the outer optimizer and its schedule.
        token_bytes: `[V]` bytes of text that each token stands for.
        config: the resolved configuration of the run, kept in every checkpoint.
    """

    def __init__(self, model: LanguageModel, recipe: AdamW, token_bytes: Tensor, config: dict[str, Any]):
        super().__init__()
        self.model = model
        self.recipe = recipe
        self.config = config
        self.token_bytes: Tensor
        self.register_buffer("token_bytes", token_bytes, persistent=False)
        self.validation_sums = (0.0, 0, 0)  # nats, bytes, tokens

    def losses(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropy summed over the predicted tokens of `ids` `[B, T + 1]` (nats), and the bytes that they stand for."""
        logits = self.model(ids[:, :-1])
        labels = ids[:, 1:]
        nats = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
        return nats, self.token_bytes[labels].sum()

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        nats, num_bytes = self.losses(ids)
        loss = nats / ids[:, 1:].numel()
        if not torch.isfinite(loss):  # before the update: the parameters and the last checkpoint stay good
            raise MetaTTTError(
                f"the loss is {loss.item()} at step {self.global_step + 1}: lower training.lr (now {self.recipe.lr}) "
                "or the inner learning rate optimizer.base_lr"
            )
        self.log("step", self.global_step + 1.0)  # Lightning takes the step of the log from here; its own count slips on resuming
        self.log("train/loss", loss)
        self.log("train/bits_per_byte", nats.detach() / math.log(2) / num_bytes)
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.log("lr", optimizer.param_groups[0]["lr"])

    def on_validation_epoch_start(self) -> None:
        self.validation_sums = (0.0, 0, 0)

    def validation_step(self, ids: Tensor, batch_idx: int) -> None:
        nats, num_bytes = self.losses(ids)
        total = self.validation_sums
        self.validation_sums = (total[0] + nats.item(), total[1] + int(num_bytes), total[2] + ids[:, 1:].numel())

    def on_validation_epoch_end(self) -> None:
        # sums over all windows, divided once: the last batch may be smaller
        nats, num_bytes, num_tokens = self.validation_sums
        self.log("step", float(self.global_step))
        self.log("validation/loss", nats / num_tokens)
        self.log("validation/bits_per_byte", nats / math.log(2) / num_bytes)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer = self.recipe.optimizer(self.model)
        num_steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self.recipe.factor(step, num_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[KEY] = {"version": VERSION, "config": self.config}
