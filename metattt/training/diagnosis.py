"""What is not finite in a step that diverged, in words: the loss by window and token, weights and gradients by layer,
parameter and head; and the overrides that help."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import lightning
import torch
from torch import Tensor, nn

from metattt.layer import TTTLayer
from metattt.optimizers.gradient_descent import StepSize
from metattt.training.dump import Step, random_state, set_random_state
from metattt.training.finite import Found, name_parameters, name_tokens

NAMED = 3  # parameters in a message; the others are counted


class Diagnosis(NamedTuple):
    """What was found.

    Attributes:
        text: for people, without a step's number.
        weights: the parameters that are not finite themselves.
    """

    text: str
    weights: list[Found]


def diagnose(
    trainer: lightning.Trainer, pl_module: lightning.LightningModule, losses: Sequence[Tensor], step: Step
) -> Diagnosis:
    """Looks at a step again; all processes of a run call this together. Random numbers go on as if it had not.

    Args:
        trainer: of the run.
        pl_module: with the weights and gradients of the step.
        losses: of the step's batches, in this process.
        step: its batches.
    """
    model: Any = pl_module.model
    total = sum(1 for _ in model.parameters())
    # before the model runs: of a divided one, parameters are as the optimizer knows them
    weights, gradients = name_parameters(model, gradients=False), name_parameters(model, gradients=True)
    words = []
    values = torch.stack(list(losses)) if losses else torch.zeros(0)
    wrong = values[~torch.isfinite(values)]
    here = f"the loss is {wrong[0].item()}" if len(wrong) else ""
    if _any(trainer, bool(here)):
        where = _places(pl_module, step)  # a divided model runs in all processes or in none
        said = _gathered(trainer, f"{here} ({where})" if here and where else here)
        words += [one for one in said if one]
    if weights:
        words.append(f"weights are not finite: {names(weights, total)}")
    if gradients and not (words and len(gradients) == total):  # else it says nothing that the others do not
        words.append(f"the gradient is not finite: {names(gradients, total)}")
    return Diagnosis("; ".join(words), weights)


def names(found: Sequence[Found], total: int) -> str:
    """Parameters that are not finite, of `total`."""
    if len(found) == total:
        return f"all {total} parameters"
    shown = ", ".join(map(str, found[:NAMED]))
    layer = f" layer {found[0].layer}:" if found[0].layer is not None else ""
    count = f"{len(found)} of {total} parameters, nearest to the output" if len(found) > NAMED else ""
    return f"{count}{layer} {shown}".strip()


def advice(pl_module: lightning.LightningModule) -> str:
    """The overrides that make steps shorter, with the values they have now."""
    rate = getattr(pl_module.recipe, "lr", None)
    outer = f"lower training.lr (now {rate:g}: training.lr={rate / 3:.2g})" if rate else "lower the learning rate"
    rates = {rule.base_lr for rule in _rules(pl_module) if isinstance(rule, StepSize) and rule.base_lr}
    inner = f", or the inner one (now {max(rates):g}: optimizer.base_lr={max(rates) / 4:.2g})" if rates else ""
    return outer + inner


def _rules(model: nn.Module) -> list[nn.Module]:
    return [module.optimizer for module in model.modules() if isinstance(module, TTTLayer)]


def _places(pl_module: Any, step: Step) -> str:
    """Where losses are not finite, of the first batch with such a loss."""
    device, found = pl_module.device, ""
    before = random_state(device)
    set_random_state(step.random, device)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for number, batch in enumerate(step.batches):
            with pl_module.trainer.precision_plugin.forward_context():
                place = name_tokens(pl_module.item_losses(batch))
            if place and not found:
                found = f"batch {number}, {place}" if len(step.batches) > 1 else place
    set_random_state(before, device)
    return found


def _any(trainer: lightning.Trainer, here: bool) -> bool:
    return trainer.strategy.reduce_boolean_decision(here, all=False)


def _gathered(trainer: lightning.Trainer, text: str) -> list[str]:
    """The text of every process."""
    if trainer.world_size == 1:
        return [text]
    texts: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(texts, text)
    return [f"process {rank}: {one}" if one else "" for rank, one in enumerate(texts)]
