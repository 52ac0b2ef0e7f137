"""States handed from process to process while a model runs, and their derivatives while it runs back.

Process r can start block l of a sequence as soon as process r − 1 has finished that block, not its whole model: with R
processes, L blocks and M sequences in flight a process waits for R − 1 blocks in M L + R − 1, in both directions. (The
pipeline through time that arXiv 2407.04620, Sec. 5, leaves to future work.)

The hand-over is a part of autograd's graph: what receives a state sends its derivatives back when it is their turn, and
what sent it waits for them. In both directions a process waits for one neighbour alone, so nothing can wait in a
circle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from metattt.parallel.line import Line, Slot, fill


class Relay:
    """Takes the state of every block from the process before, and gives the new one to the next.

    Args:
        line: the processes of the sequences.
    """

    def __init__(self, line: Line):
        self.line = line

    def receive(self, number: int, x: Tensor) -> tuple[Tensor, Any, Any]:
        """The input `x` `[B, T, D]` of a block, and what its layer and its convolution go on from; None where this
        process reads the beginning."""
        if self.line.first:
            return x, None, None
        frame, slots = self.line.receive_frame(number)
        if torch.is_grad_enabled() and any(slot.differentiable for slot in slots):
            always = x.new_zeros(()).requires_grad_()  # derivatives go back whether or not x has any
            x, *tensors = _Receive.apply(x, always, self.line, slots)
        else:
            tensors = self.line.receive_state(slots)
        state, tail = fill(frame, lambda slot: tensors[slot.place])
        return x, state, tail

    def send(self, number: int, x: Tensor, state: Any, tail: Any) -> Tensor:
        """Sends what a block leaves; the block's output `x`, through which the derivatives come back."""
        if self.line.last:
            return x
        slots, tensors = self.line.send_state(number, (state, tail))
        if not any(slot.differentiable for slot in slots):
            return x
        handed = [(slot, tensor) for slot, tensor in zip(slots, tensors, strict=True) if slot.differentiable]
        y: Tensor = _Send.apply(x, self.line, [slot for slot, _ in handed], *(tensor for _, tensor in handed))
        return y


class _Receive(torch.autograd.Function):
    """The tensors of a state; their derivatives go back to where it came from."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, always: Tensor, line: Line, slots: Sequence[Slot]) -> tuple[Tensor, ...]:
        tensors = line.receive_state(slots)
        ctx.set_materialize_grads(False)  # what has no derivative here has none there
        ctx.line, ctx.slots = line, slots
        ctx.mark_non_differentiable(
            *(tensor for slot, tensor in zip(slots, tensors, strict=True) if not slot.differentiable)
        )
        return x.view_as(x), *tensors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.line.send_back([grad for slot, grad in zip(ctx.slots, grads, strict=True) if slot.differentiable])
        return grad_x, None, None, None


class _Send(torch.autograd.Function):
    """The output of a block as it is. Its state has left: the derivatives by it come from where it went."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, line: Line, slots: Sequence[Slot], *tensors: Tensor) -> Tensor:
        ctx.line, ctx.slots = line, slots
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x: Tensor) -> tuple[Tensor | None, ...]:
        return grad_x, None, None, *ctx.line.receive_back(ctx.slots)
