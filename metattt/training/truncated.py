"""Truncated backpropagation through time: a window is read one chunk of tokens at a time, and the gradient of each
chunk's loss reaches back over k chunks (MTTT, arXiv 2310.13807, Sec. 7: memory of an autoregressive model that does not
grow with T).

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

from metattt.nested import map_tensors, tensors_of

P = TypeVar("P")


class _Chunk(NamedTuple):
    """The graph of one chunk, detached from those before and after it."""

    entering: list[Tensor]  # of the state before it, leaves of this graph
    leaving: list[Tensor]  # of the state after it, in the order of the next chunk's `entering`
    loss: Tensor  # its share


def truncated_loss(
    read: Callable[[P, Any], tuple[Tensor, Any]], pieces: Sequence[P], parameters: Sequence[Tensor], last: int | None
) -> Tensor:
    """The sum of the chunks' losses, whose backward pass gives `parameters` the truncated gradient.

    With `last`, the gradient is computed at once, in the parameters' types. The returned loss carries it without the
    graphs of chunks, and can be scaled, accumulated and averaged over processes like any loss. Parameters that do not
    affect any loss get no gradient.

    Args:
        read: a piece and the state before it (None: the first) to its share of the loss and the state after it. States
            are tensors in tuples, lists and dictionaries.
        pieces: the chunks of a window, in order.
        parameters: those that are to get a gradient; leaves that require one.
        last: k, chunks that a loss reaches back over, its own among them. None: all, by autograd as ever.
    """
    state: Any = None
    losses: list[Tensor] = []
    if last is None or not torch.is_grad_enabled():
        for piece in pieces:
            loss, state = read(piece, state)
            losses.append(loss)
        return torch.stack(losses).sum()
    kept: deque[_Chunk] = deque()
    gradients: dict[int, Tensor] = {}  # by the number of the parameter
    for number, piece in enumerate(pieces, 1):
        state = map_tensors(lambda x: x.detach().requires_grad_(x.requires_grad), state)
        entering = tensors_of(state)
        loss, state = read(piece, state)
        kept.append(_Chunk(entering, tensors_of(state), loss))
        _reach_back(kept, parameters, gradients, 1 if number == len(pieces) else last)
        losses.append(loss.detach())
        if len(kept) == last:
            kept.popleft()
    reached = [parameters[number] for number in gradients]
    return _WithGradients.apply(torch.stack(losses).sum(), *reached, *gradients.values())


def _reach_back(kept: Sequence[_Chunk], parameters: Sequence[Tensor], gradients: dict[int, Tensor], last: int) -> None:
    """Adds the gradient of the newest chunk's loss by everything in the chunks that are kept.

    Args:
        last: k, of which the next loss reaches the newest k − 1 again, whose graphs stay; 1: no loss follows.
    """
    outputs, cotangents = [kept[-1].loss], [torch.ones_like(kept[-1].loss)]
    newest_first = list(reversed(kept))
    for back, chunk in enumerate(newest_first, 1):
        leaves = [x for x in chunk.entering if x.requires_grad]
        with torch.autocast(outputs[0].device.type, enabled=False):  # as outside of the training step
            found = torch.autograd.grad(
                outputs, [*parameters, *leaves], cotangents, retain_graph=back < last, allow_unused=True
            )
        for number, gradient in enumerate(found[: len(parameters)]):
            if gradient is not None:
                gradients[number] = gradients[number] + gradient if number in gradients else gradient
        if back == len(newest_first):
            return
        of_leaves = iter(found[len(parameters) :])
        handed_on = zip(newest_first[back].leaving, chunk.entering, strict=True)
        pairs = [(x, g) for x, leaf in handed_on if leaf.requires_grad and (g := next(of_leaves)) is not None]
        if not pairs:
            return
        outputs, cotangents = [x for x, _ in pairs], [g for _, g in pairs]


class _WithGradients(torch.autograd.Function):
    """A loss whose gradients are already computed."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors[len(tensors) // 2 :])
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.saved_tensors
        return (None, *(g * cotangent.to(g.dtype) for g in found), *[None] * len(found))
