"""States handed from process to process while a model runs, and their derivatives while it runs back.

Process r can start block l of a sequence as soon as process r − 1 has finished that block, not its whole model: with R
processes, L blocks and M sequences in flight a process waits for R − 1 blocks in M L + R − 1, in both directions. (The
pipeline through time that arXiv 2407.04620, Sec. 5, leaves to future work.) Blocks whose state is an associative scan
wait for less (`metattt.parallel.scan`).

The hand-over is a part of autograd's graph: what receives a state sends its derivatives back when it is their turn, and
what sent it waits for them. In both directions a process waits for one neighbour alone, so nothing can wait in a
circle.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from metattt.inner.packing import Packing
from metattt.models.language_model import LanguageModel
from metattt.parallel.line import Line, Slot, fill
from metattt.parallel.scan import Scan


@contextmanager
def handed_on(model: LanguageModel, line: Line, scanned: Collection[int] = ()) -> Iterator[None]:
    """For one call of a model in it: the blocks go on from the states of the process before, and hand theirs to the
    next.

    Args:
        model: which reads this process's tokens, from no state of its own.
        line: the processes of the sequences.
        scanned: numbers of the blocks whose states need not wait for each other (`metattt.parallel.scan.scannable`).
    """
    relay = Relay(line, scanned)
    with instead(model, "run_block", partial(relay.run_block, model, model.run_block)):
        yield


@contextmanager
def instead(module: nn.Module, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """In it, `method` stands in the place of the method `name` of this one module."""
    before = {key: value for key, value in vars(module).items() if key == name}  # one that a user has put there
    module.__dict__[name] = method
    try:
        yield
    finally:
        del module.__dict__[name]
        module.__dict__.update(before)


class Relay:
    """Takes the state of every block from the process before, and gives the new one to the next. Made for one call.

    Args:
        line, scanned: as of `handed_on`.
    """

    def __init__(self, line: Line, scanned: Collection[int] = ()):
        self.line, self.scanned = line, scanned
        self._positions: Tensor | None = None

    def run_block(
        self, model: LanguageModel, run_block: Callable[..., Any], number: int, x: Tensor, _: None, __: None, *call: Any
    ) -> tuple[Tensor, Any, Any]:
        """As `LanguageModel.run_block`, which is handed in, from the state and the tail of the process before: None
        where this one reads the beginning."""
        if number not in self.scanned:
            x, found = self.take(number, x)
            x, *after = run_block(number, x, *(found or (None, None)), *call)
            return self.hand_on(number, x, tuple(after)), *after
        block: Any = model.blocks[number]
        scan = Scan(self, number, self._pos(x, packing=call[1]))
        with ExitStack() as stack:
            stack.enter_context(instead(block.layer, "run", partial(scan.run, block.layer)))
            if block.conv is not None:
                stack.enter_context(instead(block.conv, "forward", partial(scan.convolve, block.conv)))
            return run_block(number, x, None, None, *call)

    def take(self, key: object, anchor: Tensor) -> tuple[Tensor, Any]:
        """What the process before hands on under this key; None where there is none.

        Its derivatives go back when those by `anchor`, as it is returned, are known: let everything depend on that
        which uses what was received.
        """
        if self.line.first:
            return anchor, None
        frame, slots = self.line.receive_frame(key)
        if torch.is_grad_enabled() and any(slot.differentiable for slot in slots):
            always = anchor.new_zeros(()).requires_grad_()  # derivatives go back whether or not the anchor has any
            anchor, *tensors = _Receive.apply(anchor, always, self.line, slots)
        else:
            tensors = self.line.receive_state(slots)
        return anchor, fill(frame, lambda slot: tensors[slot.place])

    def hand_on(self, key: object, anchor: Tensor, value: Any) -> Tensor:
        """Sends tensors in tuples, lists and dictionaries to the next process.

        Their derivatives are waited for when those by `anchor`, as it is returned, are known.
        """
        if self.line.last:
            return anchor
        slots, tensors = self.line.send_state(key, value)
        handed = [(slot, tensor) for slot, tensor in zip(slots, tensors, strict=True) if slot.differentiable]
        if not handed:
            return anchor
        found: Tensor = _Send.apply(anchor, self.line, [slot for slot, _ in handed], *(tensor for _, tensor in handed))
        return found

    def _pos(self, x: Tensor, packing: Packing | None) -> Tensor:
        """`[B]` tokens that were read before: the same for all layers."""
        if self._positions is None:
            _, before = self.take("positions", x)
            self._positions = x.new_zeros(len(x), dtype=torch.long) if before is None else before
            now = self._positions
            self.hand_on("positions", x, now + x.shape[1] if packing is None else packing.positions(now)[1])
        return self._positions


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
