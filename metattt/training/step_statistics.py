"""How fast a run goes, and how large its gradients are."""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import Any

import lightning
import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from metattt.parallel.gradients import several_meshes, total_norm
from metattt.registry import register
from metattt.training.batches import batch_share


class Pace:
    """Seconds per step: the median of the last steps, their data included, without validation and the first step,
    which compiles."""

    def __init__(self, steps: int = 50):
        self.durations: deque[float] = deque(maxlen=steps)
        self.last: float | None = None  # when the step before ended
        self.paused = 0.0

    def start(self) -> None:
        """A run begins, or goes on."""
        self.last = None
        self.durations.clear()

    def pause(self) -> None:
        """What comes now is no part of a step."""
        self.paused = time.monotonic()

    def go_on(self) -> None:
        """The steps go on."""
        if self.last is not None:
            self.last += time.monotonic() - self.paused

    def step(self) -> None:
        """A step has ended."""
        now = time.monotonic()
        if self.last is not None:
            self.durations.append(now - self.last)
        self.last = now

    @property
    def seconds(self) -> float | None:
        """Per step; None before the second step has ended."""
        return statistics.median(self.durations) if self.durations else None


@register(group="callback", name="step_statistics")
class StepStatistics(lightning.Callback):
    """Logs `tokens_per_second` (`images_per_second`) over all processes, and `gradient_norm` before clipping."""

    def __init__(self) -> None:
        self.pace = Pace()

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self.pace.start()

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self.pace.pause()

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self.pace.go_on()

    def on_before_optimizer_step(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        gradients = [parameter.grad for parameter in pl_module.parameters() if parameter.grad is not None]
        if gradients:  # forward-only recipes have none
            norm = total_norm(gradients) if several_meshes(gradients) else get_total_norm(gradients)
            pl_module.log("gradient_norm", norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        self.pace.step()
        if self.pace.seconds is not None:
            unit, count = _volume(batch)
            total = count * trainer.accumulate_grad_batches * batch_share(trainer)[1]
            pl_module.log(f"{unit}_per_second", total / self.pace.seconds, batch_size=1)


def _volume(batch: Any) -> tuple[str, int]:
    """What a batch holds: tokens that are predicted, of windows `[B, T + 1]`, or images with their labels."""
    if isinstance(batch, torch.Tensor):
        return "tokens", batch.shape[0] * (batch.shape[1] - 1)
    return "images", len(batch[0])
