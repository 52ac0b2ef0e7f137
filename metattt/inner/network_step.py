"""Inner gradients of a whole network, for models whose fast weights stand in several modules: TTT-E2E, and the
adaptation of a pretrained model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from metattt.modules import expand_like, for_probes, needs_probes
from metattt.nested import map_tensors

PLACE = torch.empty(0)  # where a tensor stood


def gradients_of(
    loss: Callable[..., tuple[Tensor, list[Tensor]]],
    leaves: Sequence[Tensor],
    first_order: bool,
    clip: float | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of the sum of the losses of `B` sequences, each of which has weights of its own.

    Args:
        loss: of the weights in a row: the sum, and what else it has found.
        leaves: the weights, `[B, ...]` each.
        first_order: the outer gradient takes these gradients as constants.
        clip: largest norm of a sequence's gradient over all weights; None: any.

    Returns:
        The gradients, and what else `loss` has found; both with a graph exactly if gradients are enabled outside (with
        `first_order`, the gradients without).
    """
    if needs_probes():
        with for_probes():
            value, pull, found = torch.func.vjp(loss, *leaves, has_aux=True)  # type: ignore[misc]
            gradients = pull(torch.ones_like(value))
        return _clipped([g.detach() for g in gradients] if first_order else list(gradients), clip), found
    keep = torch.is_grad_enabled()
    with torch.enable_grad():
        # An alias cuts the weights off from what was computed from them before: keys and values of the mini-batch alone
        # are made with them.
        aliases = [w.view_as(w) if keep and w.requires_grad else w.detach().requires_grad_() for w in leaves]
        value, found = loss(*aliases)
        graph = keep and not first_order
        gradients = torch.autograd.grad(  # zero for what the loss does not use, as keys that nothing has read yet
            value, aliases, create_graph=graph, retain_graph=keep, allow_unused=True, materialize_grads=True
        )
    return _clipped(list(gradients), clip), found if keep else [tensor.detach() for tensor in found]


def _clipped(gradients: list[Tensor], most: float | None) -> list[Tensor]:
    """`g · min(1, c / ‖g‖)`, with one norm for each sequence."""
    if most is None:
        return gradients
    squared = torch.stack([g.square().sum(tuple(range(1, g.ndim))) for g in gradients]).sum(0)
    # [B]; 1 exactly where nothing is clipped, or nearly
    factor = (squared / most / most).clamp(min=1).rsqrt()  # not by c², which fp32 may be too narrow for
    return [g * expand_like(factor, g) for g in gradients]


def skeleton(value: Any) -> Any:
    """`value` without its tensors."""
    return map_tensors(lambda _: PLACE, value)


def refill(shape: Any, tensors: Sequence[Tensor]) -> Any:
    """A value of this shape with `tensors` in the places of its own."""
    rest: Iterator[Tensor] = iter(tensors)
    return map_tensors(lambda _: next(rest), shape)
