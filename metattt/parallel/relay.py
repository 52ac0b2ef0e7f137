"""States handed from process to process while a model runs, and their derivatives while it runs back.

Process r can start block l of a sequence as soon as process r − 1 has finished that block, not its whole model: with R
processes, L blocks and M sequences in flight a process waits for R − 1 blocks in M L + R − 1, in both directions. (The
pipeline through time that arXiv 2407.04620, Sec. 5, leaves to future work.)

The hand-over is a part of autograd's graph: what receives a state sends its derivatives back when it is their turn, and
what sent it waits for them. In both directions a process waits for one neighbour alone, so nothing can wait in a
circle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from metattt.models.language_model import LanguageModel
from metattt.parallel.line import Line, Slot, fill


@contextmanager
def handed_on(model: LanguageModel, line: Line) -> Iterator[None]:
    """For one call of a model in it: the blocks go on from the states of the process before, and hand theirs to the
    next.

    Args:
        model: which reads this process's tokens, from no state of its own.
        line: the processes of the sequences.
    """
    run_block = model.run_block

    def between(number: int, x: Tensor, _: None, __: None, *call: Any) -> tuple[Tensor, Any, Any]:
        x, found = take(line, x)
        x, *after = run_block(number, x, *(found or (None, None)), *call)
        return hand_on(line, x, tuple(after)), *after

    model.__dict__["run_block"] = between
    try:
        yield
    finally:
        del model.__dict__["run_block"]


def take(line: Line, anchor: Tensor) -> tuple[Tensor, Any]:
    """What the process before hands on; None where there is none.

    Its derivatives go back when those by `anchor`, as it is returned, are known: let everything depend on that
    which uses what was received.
    """
    if line.first:
        return anchor, None
    frame, slots = line.receive_frame()
    if torch.is_grad_enabled() and any(slot.differentiable for slot in slots):
        always = anchor.new_zeros(()).requires_grad_()  # derivatives go back whether or not the anchor has any
        anchor, *tensors = _Receive.apply(anchor, always, line, slots)
    else:
        tensors = line.receive_state(slots)
    return anchor, fill(frame, lambda slot: tensors[slot.place])


def hand_on(line: Line, anchor: Tensor, value: Any) -> Tensor:
    """Sends tensors in tuples, lists and dictionaries to the next process.

    Their derivatives are waited for when those by `anchor`, as it is returned, are known.
    """
    if line.last:
        return anchor
    slots, tensors = line.send_state(value)
    handed = [(slot, tensor) for slot, tensor in zip(slots, tensors, strict=True) if slot.differentiable]
    if not handed:
        return anchor
    found: Tensor = _Send.apply(anchor, line, [slot for slot, _ in handed], *(tensor for _, tensor in handed))
    return found


class _Receive(torch.autograd.Function):
    """The tensors of a state; their derivatives go back to where it came from."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, always: Tensor, line: Line, slots: Sequence[Slot]) -> tuple[Tensor, ...]:
        tensors = line.receive_state(slots)
        ctx.set_materialize_grads(False)  # what has no derivative here has none there
        ctx.line, ctx.slots = line, slots
        ctx.mark_non_differentiable(
            *(tensor for slot, tensor in zip(slots, tensors, strict=True) if not slot.differentiable)
        )
        return anchor.view_as(anchor), *tensors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.line.send_back([grad for slot, grad in zip(ctx.slots, grads, strict=True) if slot.differentiable])
        return grad, None, None, None


class _Send(torch.autograd.Function):
    """The anchor as it is. A state has left: the derivatives by it come from where it went."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, line: Line, slots: Sequence[Slot], *tensors: Tensor) -> Tensor:
        ctx.line, ctx.slots = line, slots
        return anchor.view_as(anchor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None, *ctx.line.receive_back(ctx.slots)
