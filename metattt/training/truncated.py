"""Backpropagation through time that is truncated: a window is read a chunk of tokens at a time, and the loss of every
chunk reaches the last k chunks (MTTT, arXiv 2310.13807, Sec. 7: memory of an autoregressive model that does not grow
with T).

With chunks j = 1…n of a window, states `s_j, L_j = f(s_{j−1}, θ; chunk j)` and k, the gradient is

`Σ_j dL_j/dθ`, where `s_{j−k}`, the state that enters chunk j − k + 1, is a constant in the term of `L_j`.

k = 1 cuts at every boundary (`state.detach()`), k ≥ n is the gradient of the whole window. The graphs of k chunks are
kept at a time, and each is run backwards up to k times: the terms are cut at different places, so they cannot be summed
on the way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from metattt.state import map_tensors

P = TypeVar("P")


class _Chunk(NamedTuple):
    """The graph of one chunk, cut off from those before and after it.

    Attributes:
        entering: tensors of the state before it, leaves of this graph.
        leaving: of the state after it, in the order of the next chunk's `entering`.
        loss: its share.
    """

    entering: list[Tensor]
    leaving: list[Tensor]
    loss: Tensor


def truncated_loss(
    read: Callable[[P, Any], tuple[Tensor, Any]], pieces: Sequence[P], parameters: Sequence[Tensor], last: int | None
) -> Tensor:
    """The sum of the chunks' losses, whose backward pass gives `parameters` the truncated gradient.

    The gradient is worked out at once, in the parameters' types; what is returned holds it and no graph of a chunk, and
    may be scaled, accumulated and averaged over processes like any loss. Parameters that no loss depends on get none.

    Args:
        read: a piece and the state before it (None: the first) to its share of the loss and the state after it. States
            are tensors in tuples, lists and dictionaries.
        pieces: the chunks of a window, in order.
        parameters: those that are to get a gradient; leaves that require one.
        last: k, chunks that a loss reaches back over, its own among them. None: all.
    """
    kept: deque[_Chunk] = deque()
    gradients: dict[int, Tensor] = {}
    state, total = None, None
    for number, piece in enumerate(pieces):
        entering: list[Tensor] = []
        state = map_tensors(lambda x, found=entering: _leaf(x, found), state)  # type: ignore[misc]
        loss, state = read(piece, state)
        total = loss.detach() if total is None else total + loss.detach()
        if not torch.is_grad_enabled():
            continue
        leaving: list[Tensor] = []
        map_tensors(lambda x, found=leaving: _listed(x, found), state)  # type: ignore[misc]
        kept.append(_Chunk(entering, leaving, loss))
        if last is not None:
            end = number + 1 == len(pieces)
            _reach_back(kept, parameters, gradients, None if end else last)
            if len(kept) == last:
                kept.popleft()
    if last is None:
        _sweep(kept, parameters, gradients)
    assert total is not None
    reached = [number for number in range(len(parameters)) if number in gradients]
    return _WithGradients.apply(
        total, *[parameters[number] for number in reached], *[gradients[number] for number in reached]
    )


def _reach_back(
    kept: Sequence[_Chunk], parameters: Sequence[Tensor], gradients: dict[int, Tensor], last: int | None
) -> None:
    """Adds the gradient of the newest chunk's loss by everything in the chunks that are kept; `last` None: no loss will
    follow."""
    newest = kept[-1]
    outputs, cotangents = [newest.loss], [torch.ones_like(newest.loss)]
    for back, chunk in enumerate(reversed(kept)):
        keep = last is not None and back + 1 < last  # the next loss reaches this chunk too
        found = _pulled(outputs, cotangents, chunk, parameters, gradients, keep)
        if back + 1 == len(kept):
            return
        before = kept[len(kept) - 2 - back].leaving
        pairs = [(x, g) for x, g in zip(before, found, strict=True) if g is not None and x.requires_grad]
        if not pairs:
            return
        outputs, cotangents = [x for x, _ in pairs], [g for _, g in pairs]


def _sweep(kept: deque[_Chunk], parameters: Sequence[Tensor], gradients: dict[int, Tensor]) -> None:
    """Adds the gradient of all losses in one pass from the last chunk to the first; their graphs go on the way."""
    found: list[Tensor | None] = []
    while kept:
        chunk = kept.pop()
        pairs = [
            (x, g)
            for x, g in zip(chunk.leaving, found or [None] * len(chunk.leaving), strict=True)
            if g is not None and x.requires_grad
        ]
        outputs = [chunk.loss, *(x for x, _ in pairs)]
        found = _pulled(
            outputs, [torch.ones_like(chunk.loss), *(g for _, g in pairs)], chunk, parameters, gradients, False
        )


def _pulled(
    outputs: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    chunk: _Chunk,
    parameters: Sequence[Tensor],
    gradients: dict[int, Tensor],
    keep: bool,
) -> list[Tensor | None]:
    """Adds to `gradients` what cotangents of a chunk's outputs give the parameters, and returns what they give its
    state."""
    leaves = [x for x in chunk.entering if x.requires_grad]
    with torch.autocast(outputs[0].device.type, enabled=False):  # as outside of the training step
        found = torch.autograd.grad(outputs, [*parameters, *leaves], cotangents, retain_graph=keep, allow_unused=True)
    for number, gradient in enumerate(found[: len(parameters)]):
        if gradient is not None:
            gradients[number] = gradients[number] + gradient if number in gradients else gradient
    rest = iter(found[len(parameters) :])
    return [next(rest) if x.requires_grad else None for x in chunk.entering]


def _leaf(x: Tensor, found: list[Tensor]) -> Tensor:
    leaf = x.detach().requires_grad_(x.requires_grad)
    found.append(leaf)
    return leaf


def _listed(x: Tensor, found: list[Tensor]) -> Tensor:
    found.append(x)
    return x


class _WithGradients(torch.autograd.Function):
    """A loss that is worked out, with the gradients of its parameters."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors[len(tensors) // 2 :])
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.saved_tensors
        return (None, *(g * cotangent.to(g.dtype) for g in found), *[None] * len(found))
