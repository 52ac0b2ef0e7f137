"""Recomputation through time: store the inputs of a group of mini-batches, and run the group again in the backward
pass.

`torch.utils.checkpoint` cannot hold an inner `autograd.grad`: each one would recompute the group. One
`autograd.Function` per group costs two runs of it (three inside a user's own checkpoint) and can itself be
differentiated again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

WITHOUT_GENERATOR = ("cpu", "meta")  # devices that have no random generator besides the host's


def recompute(body: Callable[..., Sequence[Tensor]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """`body(*tensors)`, keeping only `tensors` for the backward pass. `body` must reach parameters through `tensors`
    alone."""
    return _Recompute.apply(body, *tensors)


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, body: Callable[..., Sequence[Tensor]], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.body = body
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        ctx.device = tensors[0].device
        ctx.random = random_state(ctx.device)
        # Identity hooks hide the saved tensors of inner gradients from a surrounding checkpoint.
        with saved_tensors_hooks(lambda x: x, lambda x: x):
            outputs = body(*tensors)
        return tuple(output.view_as(output) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        keep = torch.is_grad_enabled()  # someone differentiates this backward pass again
        with torch.enable_grad(), replay(ctx.random, ctx.device):
            # Aliases cut the inputs off from each other (weights may have been computed from parameters that are inputs
            # too).
            inputs = [
                (x.view_as(x) if keep else x.detach().requires_grad_()) if need else x
                for x, need in zip(ctx.saved_tensors, needed, strict=True)
            ]
            outputs = ctx.body(*inputs)
            pairs = [(y, dy) for y, dy in zip(outputs, cotangents, strict=True) if dy is not None and y.requires_grad]
            wanted = [x for x, need in zip(inputs, needed, strict=True) if need]
            found = iter(
                torch.autograd.grad(
                    [y for y, _ in pairs], wanted, [dy for _, dy in pairs], create_graph=keep, allow_unused=True
                )
                if pairs and wanted
                else [None] * len(wanted)
            )
        return (None, *(next(found) if need else None for need in needed))


def random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Of the host's generator, and of the device's where it has one of its own."""
    there = None if device.type in WITHOUT_GENERATOR else torch.get_device_module(device).get_rng_state(device)
    return torch.get_rng_state(), there


@contextmanager
def replay(state: tuple[Tensor, Tensor | None], device: torch.device) -> Iterator[None]:
    """Runs a block with the random state of the forward pass, then restores the present one."""
    devices = [] if device.type in WITHOUT_GENERATOR else [device]
    with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.get_device_module(device).set_rng_state(state[1], device)
        yield
