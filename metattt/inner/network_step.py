"""Inner gradients of a whole network, for models whose fast weights stand in several modules: TTT-E2E, and the
adaptation of a pretrained model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from metattt.modules import expand_like, for_probes, needs_probes
from metattt.nested import map_tensors, refill, tensors_of
from metattt.ops.linear_rule import clip_factor

W = TypeVar("W")


def gradients_of(
    loss: Callable[[W], tuple[Tensor, Any]], weights: W, first_order: bool, clip: float | None = None
) -> tuple[W, Any]:
    """Gradients of the sum of the losses of `B` sequences, each of which has weights of its own.

    Args:
        loss: of the weights: the sum, and what else it has found.
        weights: tensors `[B, ...]` in tuples and dictionaries.
        first_order: the outer gradient takes these gradients as constants.
        clip: largest norm of a sequence's gradient over all weights; None: any.

    Returns:
        The gradients in the places of the weights, and what else `loss` has found; both with a graph exactly if
        gradients are enabled outside (with `first_order`, the gradients without).
    """
    leaves = tensors_of(weights)
    if needs_probes():
        shape: list[Any] = []

        def flat(*tensors: Tensor) -> tuple[Tensor, list[Tensor]]:
            value, found = loss(refill(weights, tensors))
            shape.append(found)
            return value, tensors_of(found)

        with for_probes():
            value, pull, tensors = torch.func.vjp(flat, *leaves, has_aux=True)  # type: ignore[misc]
            gradients = pull(torch.ones_like(value))
        gradients = [g.detach() for g in gradients] if first_order else list(gradients)
        return refill(weights, _clipped(gradients, clip)), refill(shape[0], tensors)
    keep = torch.is_grad_enabled()
    with torch.enable_grad():
        # An alias cuts the weights off from what was computed from them before: keys and values of the mini-batch alone
        # are made with them.
        aliases = [w.view_as(w) if keep and w.requires_grad else w.detach().requires_grad_() for w in leaves]
        value, found = loss(refill(weights, aliases))
        graph = keep and not first_order
        gradients = torch.autograd.grad(  # zero for what the loss does not use, as keys that nothing has read yet
            value, aliases, create_graph=graph, retain_graph=keep, allow_unused=True, materialize_grads=True
        )
    return refill(weights, _clipped(list(gradients), clip)), found if keep else map_tensors(Tensor.detach, found)


def _clipped(gradients: list[Tensor], most: float | None) -> list[Tensor]:
    """`g · min(1, c / ‖g‖)`, with one norm for each sequence."""
    if most is None:
        return gradients
    squared = torch.stack([g.square().sum(tuple(range(1, g.ndim))) for g in gradients]).sum(0)
    factor = clip_factor(squared, most)  # [B]
    return [g * expand_like(factor, g) for g in gradients]
