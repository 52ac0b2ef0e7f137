"""Gradients inside the forward pass, under whatever the caller has switched on.

`torch.func.vjp` does not run under saved-tensor hooks (any non-reentrant checkpoint, also a user's own), and `torch.autograd.grad`
does not run under compile, inside functorch transforms or in inference mode. So each is used where the other fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def functional() -> bool:
    """True where `torch.func` must be used."""
    return torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or in_transform()


def in_transform() -> bool:
    """True inside `torch.func` transforms (vmap, grad, jvp)."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def vjp(function: Callable[..., Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> list[list[Tensor]]:
    """Vector–Jacobian products of `function(*inputs)`, one list (one entry per input) for each cotangent.

    The result carries a graph exactly if gradients are enabled outside, so that the outer loop can differentiate it again.
    """
    if functional():
        pull = torch.func.vjp(function, *inputs)[1]
        return [list(pull(cotangent)) for cotangent in cotangents]
    keep = torch.is_grad_enabled()
    with torch.enable_grad():
        # An alias cuts `inputs` off from each other where one was computed from another, and keeps the graph to the outer loop.
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
