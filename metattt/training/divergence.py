"""Divergence: detected before the update reaches the weights, reported by layer and head, then the run stops or skips
the step."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from itertools import groupby
from typing import Any, Literal

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from metattt.errors import MetaTTTError, check_choice, check_integer
from metattt.layer import TTTLayer
from metattt.mixers.base import Mixer
from metattt.optimizers.gradient_descent import StepSize
from metattt.registry import register

WINDOW = 100  # steps over which skipped ones are counted
NAMED = 3  # parameters named in a message; the others are counted


@register(group="callback", name="divergence", version=2)
class Divergence(Callback):
    """Checks every step before its update: the loss of every batch, and the norm of the gradient. Weights are checked
    before they are validated or written, so that no checkpoint has NaN or infinity.

    Its cost: one multi-tensor norm over the gradients, and one number that the host waits for after the backward pass
    (the decision is needed before the update). All processes of a run decide alike.

    Args:
        on_divergence: `stop` ends the run with an error message and exit code 2; `skip` skips the update: weights and
            moments do not change, and the run continues with the next batch. If the weights are not finite already, the
            run stops.
        max_skipped: of the last 100 steps; with more it stops.
    """

    def __init__(self, on_divergence: Literal["stop", "skip"] = "stop", max_skipped: int = 10):
        check_choice("on_divergence", on_divergence, ("stop", "skip"))
        check_integer("callbacks.divergence.max_skipped", max_skipped, 0)
        self.on_divergence, self.max_skipped = on_divergence, max_skipped
        self.skipped: list[int] = []  # steps, of the last 100
        self.losses: list[Tensor] = []  # of the batches of the step under way
        self.spoilt: list[Tensor] = []  # whether their inputs are not finite

    def state_dict(self) -> dict[str, Any]:
        return {"skipped": list(self.skipped)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.skipped = list(state_dict["skipped"])

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _refuse_nan(pl_module, False)  # it reaches the loss, which all processes see

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        _refuse_nan(pl_module, True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        _refuse_nan(pl_module, True)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.losses, self.spoilt = [], []
        if isinstance(batch, list | tuple) and isinstance(batch[0], Tensor) and batch[0].is_floating_point():
            self.spoilt.append((~torch.isfinite(batch[0])).any().float())

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self.losses.append(loss.detach())

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None  # skips overflowing steps itself
        losses = (~torch.isfinite(torch.stack(self.losses))).any().float() if self.losses else None
        if _agreed(trainer, losses, None if scaled else overflows(gradients)):
            self._react(trainer, pl_module, trainer.global_step + 1)
            for parameter in parameters:  # without a gradient no optimizer touches a parameter, or its moments
                parameter.grad = None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._check_weights(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loss = trainer.callback_metrics.get("validation/loss")
        if trainer.state.fn == TrainerFn.FITTING and loss is not None and not torch.isfinite(loss):
            say(trainer, f"step {trainer.global_step}: the validation loss is {loss.item()}; {advice(pl_module)}")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._check_weights(trainer, pl_module)

    def _check_weights(self, trainer: Trainer, pl_module: LightningModule) -> None:
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        if _agreed(trainer, overflows(parameter for group in groups for parameter in group["params"])):
            self._react(trainer, pl_module, trainer.global_step)

    def _react(self, trainer: Trainer, pl_module: Any, step: int) -> None:
        """Returns if the run can continue without the update of a step, or raises an error."""
        lost = _agreed(trainer, *((~torch.isfinite(loss)).float() for loss in self.losses))
        weights, text = diagnose(pl_module.model, self.losses, lost)
        found, ending = f"step {step}: {text}", advice(pl_module)
        if _agreed(trainer, *self.spoilt):
            ending = "the inputs of the batch are not finite either: mend the data"
        if self.on_divergence == "skip" and not weights:
            self.skipped = [*(one for one in self.skipped if one > step - WINDOW), step]
            if len(self.skipped) <= self.max_skipped:
                return say(trainer, f"{found}. Skipped ({len(self.skipped)} of the last {WINDOW} steps)")
            ending = f"{self.max_skipped} of the last {WINDOW} steps were skipped already: {ending}"
        error = MetaTTTError(f"{found}\n{ending}")
        if trainer.world_size > 1:  # now: the end of another process may end this one
            say(trainer, f"error: {found}\n       {ending}")
            error.said = True
        raise error


def overflows(tensors: Iterable[Tensor]) -> Tensor | None:
    """Whether the norm of all these tensors together is not finite, as a number 0 or 1 on their device; None of none. A
    norm beyond the type's range counts: Adam squares what it is given."""
    local = [one.to_local() if isinstance(one, DTensor) else one for one in (x.detach() for x in tensors)]
    parts = [one for one in local if one.is_floating_point()]
    return (~torch.isfinite(get_total_norm(parts))).float() if parts else None


def diagnose(model: nn.Module, losses: Iterable[Tensor], lost: bool) -> tuple[list[str], str]:
    """A description of the non-finite weights, gradients and losses; `lost`: a loss is not finite in some process.
    Processes that share a model call it together."""
    total = sum(1 for _ in model.parameters())
    weights, gradients = (not_finite(model, gradients) for gradients in (False, True))
    words = [f"the loss is {loss.item()}" for loss in losses if not torch.isfinite(loss)][:1]
    words = words or ["the loss of another process is not finite"] * lost
    for what, found in (("weights are", weights), ("the gradient is", gradients)):
        if found and not (words and found is gradients and len(found) == total):  # that all are adds nothing
            more = f" and {len(found) - NAMED} more of {total} parameters" if len(found) > NAMED else ""
            named = f"all {total} parameters" if len(found) == total else ", ".join(found[:NAMED]) + more
            words.append(f"{what} not finite: {named}")
    return weights, "; ".join(words) or "the norm of all gradients, or of all weights, is too large to be squared"


def not_finite(model: nn.Module, gradients: bool) -> list[str]:
    """The parameters of a model whose values (or `gradients`) have a norm that is not finite, with layer and heads, the
    one nearest to the output first: a backward pass carries NaN from there to the input. Processes that share a model
    must call it together."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, TTTLayer)]
    heads = {f"{name}.{part}.": layer.num_heads for name, layer in layers for part in ("learner", "optimizer")}
    found = []
    for name, parameter in model.named_parameters():
        tensor = parameter.grad if gradients else parameter.detach()
        if tensor is None:
            continue
        value = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if torch.isfinite(value.float().norm()):
            continue
        bad = ~torch.isfinite(value)
        count = next((count for prefix, count in heads.items() if name.startswith(prefix)), 0)
        numbers = bad.reshape(count, -1).any(1).nonzero().flatten().tolist() if count and len(value) == count else []
        layer = re.search(r"(?:^|\.)blocks\.(\d+)\.", name)
        text = f"layer {layer[1]}: {name}" if layer else name
        text += f" (head{'s' * (len(numbers) > 1)} {listed(numbers)})" if numbers else ""
        text += "" if bad.any() else " (too large to be squared)"
        found.append((int(layer[1]) if layer else -1, text))
    return [text for _, text in sorted(found, key=lambda one: one[0], reverse=True)]


def advice(pl_module: Any) -> str:
    """The overrides that help: another type of weights, or shorter steps, with the values they have now."""
    if any(one.dtype == torch.float16 for one in pl_module.parameters()):
        return "weights of fp16: numbers below 6e-8 are 0, as Adam's eps; set trainer.precision=bf16-mixed or 16-mixed"
    rate = getattr(pl_module.recipe, "lr", None)
    outer = f"lower training.lr (now {rate:g}: training.lr={rate / 3:.2g})" if rate else "lower the learning rate"
    rules = [module.optimizer for module in pl_module.modules() if isinstance(module, TTTLayer)]
    rates = {rule.base_lr for rule in rules if isinstance(rule, StepSize) and rule.base_lr}
    inner = f", or the inner one (now {max(rates):g}: optimizer.base_lr={max(rates) / 4:.2g})" if rates else ""
    return outer + inner


def listed(numbers: Iterable[int]) -> str:
    """Numbers as text, neighbours as a range: `0, 3–5`."""
    by_distance = groupby(enumerate(sorted(numbers)), lambda one: one[1] - one[0])  # of neighbours it is the same
    runs = [[number for _, number in run] for _, run in by_distance]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def _agreed(trainer: Trainer, *flags: Tensor | None) -> bool:
    """Whether a flag is raised in any process. Here the host waits for the device."""
    raised = [flag for flag in flags if flag is not None] or [torch.zeros((), device=trainer.strategy.root_device)]
    return bool(trainer.strategy.reduce(torch.stack(raised).sum(), reduce_op="sum") > 0)


def _refuse_nan(module: nn.Module, refuse: bool) -> None:
    """Sets whether layers raise an error for NaN, or pass it on because the loss is checked."""
    for one in module.modules():
        if isinstance(one, TTTLayer | Mixer):
            one.refuse_nan = refuse


def say(trainer: Trainer, line: str) -> None:
    """Prints a line for the user, from one of several processes."""
    if trainer.is_global_zero:
        print(line, file=sys.stderr, flush=True)
