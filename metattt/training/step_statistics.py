"""How fast a run goes, how much of the device it uses, and how large its gradients are."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections import deque
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from metattt.measures.flops import flops_per_image, flops_per_window
from metattt.models.language_model import LanguageModel
from metattt.parallel.gradients import several_meshes, total_norm
from metattt.registry import register
from metattt.training.batches import batch_share
from metattt.training.random_state import apart_from_the_run


@register(group="callback", name="step_statistics")
class StepStatistics(Callback):
    """Logs figures of merit of a step.

    | column | what |
    |---|---|
    | `tokens_per_second`, `images_per_second` | over all processes |
    | `gradient_norm` | before clipping |
    | `model_tflops_per_second` | 10¹² operations a second and device that the model needs: its forward pass, times 3 |
    | `peak_memory_gib` | of this process: of the GPU, or of the machine |

    Recomputation to save memory is not counted. Columns that need times start with the second step.
    """

    def __init__(self) -> None:
        self.durations: deque[float] = deque(maxlen=50)  # of the last steps (seconds), with their data
        self.last: float | None = None  # when the step before ended, without the validation since
        self.paused = 0.0
        self.flops: float | None = None  # of the forward and backward pass for one window or image; 0: not known

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.last = None
        self.durations.clear()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.paused = time.monotonic()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.last is not None:
            self.last += time.monotonic() - self.paused

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        gradients = [parameter.grad for parameter in pl_module.parameters() if parameter.grad is not None]
        if gradients:
            norm = total_norm(gradients) if several_meshes(gradients) else get_total_norm(gradients)
            pl_module.log("gradient_norm", norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        now = time.monotonic()
        if self.last is not None:
            self.durations.append(now - self.last)
        self.last = now
        # tensors of the host: a plain number would be sent to the device, and waited for
        pl_module.log("peak_memory_gib", torch.tensor(_peak_memory(pl_module.device)), batch_size=1)
        if not self.durations:  # the first step compiles
            return
        unit, items, length = _volume(batch)
        seconds = statistics.median(self.durations)
        rate = items * trainer.accumulate_grad_batches * batch_share(trainer)[1] / seconds  # windows a second
        pl_module.log(f"{unit}_per_second", torch.tensor(rate * length), batch_size=1)
        if self.flops is None:
            self.flops = _flops(pl_module, length)
        if self.flops:
            tflops = rate * self.flops / 1e12 / trainer.world_size
            pl_module.log("model_tflops_per_second", torch.tensor(tflops), batch_size=1)


def _volume(batch: Any) -> tuple[str, int, int]:
    """What a batch holds: windows `[B, T + 1]` of tokens that are predicted, sequences with labels `[B, T, ...]`, or
    images with theirs; the number of any of these, and the tokens of each."""
    if isinstance(batch, torch.Tensor):
        return "tokens", batch.shape[0], batch.shape[1] - 1
    if batch[1].ndim > 1:  # a label of a token may be a vector
        return "tokens", *batch[1].shape[:2]
    return "images", len(batch[0]), 1


def _flops(module: Any, length: int) -> float:
    """Operations that training on one window or image needs; 0 if they cannot be counted."""
    try:
        with apart_from_the_run(module.device):  # layers try out their plan on random numbers
            model = module.build.empty()
            count = flops_per_window(model, length) if isinstance(model, LanguageModel) else flops_per_image(model)
        return 3.0 * count
    except Exception:  # an operation of a user's own layer that the meta device has not, or a module without `build`
        return 0.0


def _peak_memory(device: torch.device) -> float:
    """GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 2**10  # of getrusage: bytes there, else KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
