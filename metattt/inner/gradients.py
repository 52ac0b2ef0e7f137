"""Gradients inside the forward pass; they work under inference mode, autocast, checkpoints, compilers and function
transforms."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from metattt.modules import for_probes, needs_probes


def vjp(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor], constant: bool = False
) -> list[list[Tensor]]:
    """Vector–Jacobian products of `function(*inputs)`, one list (one entry per input) for each cotangent.

    The result carries a graph exactly if gradients are enabled outside, so that the outer loop can differentiate it
    again; `constant`: never.
    """
    if needs_probes():
        with for_probes():
            pull = torch.func.vjp(function, *inputs)[1]
            found = [list(pull(cotangent)) for cotangent in cotangents]
        return [[x.detach() for x in row] for row in found] if constant else found
    keep = torch.is_grad_enabled() and not constant
    with torch.enable_grad():
        # An alias cuts `inputs` off from each other where one was computed from another, and keeps the graph to the
        # outer loop.
        aliases = [x.view_as(x) if keep and x.requires_grad else x.detach().requires_grad_() for x in inputs]
        value = function(*aliases)
        return [
            list(
                torch.autograd.grad(
                    value,
                    aliases,
                    cotangent,
                    create_graph=keep,
                    retain_graph=keep or i + 1 < len(cotangents),
                    allow_unused=True,
                    materialize_grads=True,
                )
            )
            for i, cotangent in enumerate(cotangents)
        ]
