"""The inner learning rate rises with the outer one."""

from __future__ import annotations

from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer

from metattt.errors import MetaTTTError, check_number
from metattt.registry import register


@register(group="callback", name="inner_warmup")
class InnerWarmup(Callback):
    """Moves the base inner learning rate of every layer linearly to `optimizer.base_lr` (of `model=ttt_e2e` to
    `model.inner_lr`), over the warm-up steps of the run.

    A negative `base_lr` is reached from `-start`. The rate belongs to the run and not to the model: a checkpoint that
    is loaded for evaluation has the final one.

    Args:
        start: size of the rate at the first step.

    Raises:
        MetaTTTError: a start that is not positive; when training starts: a model without an inner learning rate, or
        with one of 0.
    """

    def __init__(self, start: float = 0.01):
        check_number("callbacks.inner_warmup.start", start, above=0)
        self.start = start
        self.final: dict[Any, float] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        rules: Any = (module for module in pl_module.modules() if getattr(module, "follows_base_lr", False))
        self.final = {rule: float(rule.scale) for rule in rules}
        if not self.final or not all(rule.base_lr for rule in self.final):
            raise MetaTTTError(
                "callbacks=inner_warmup needs layers whose step sizes follow optimizer.base_lr (with optimizer.lr="
                "per_weight or decay=mamba2 they do not), and a base_lr that is not 0: leave it out with "
                "~callbacks.inner_warmup"
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        recipe: Any = pl_module.recipe
        warmup = max(1, recipe.warmup_steps(int(trainer.estimated_stepping_batches)))
        done = min(1.0, trainer.global_step / warmup)
        for rule, final in self.final.items():
            first = self.start / abs(rule.base_lr)
            # A tensor: changing a plain number would recompile compiled layers and make every plan again.
            device = next((x.device for x in rule.parameters()), None)
            rule.scale = torch.tensor(final * (first + (1 - first) * done), dtype=torch.float64, device=device)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for rule, final in self.final.items():
            rule.scale = final

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_fit_end(trainer, pl_module)  # the model may be used, or trained again
