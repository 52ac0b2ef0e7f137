"""Reading with the weights at the end of a call (`optimizer.read=final`): learn from all tokens first, then answer all
queries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.inner.execution import in_groups
from metattt.inner.tokens import Block, Tokens
from metattt.memory import Memory, choose

if TYPE_CHECKING:
    from metattt.inner.loop import InnerLoop


def steps(
    loop: InnerLoop,
    tokens: Tokens,
    carry: Memory,
    blocks: Sequence[Block],
    live: Tensor | None,
    after: Tensor,
) -> Iterator[Memory]:
    """The carry before the first inner step of a `final` read and after each of them."""
    rule, filled = loop.rule, after % loop.rule.mini_batch_size
    order = rule.permutation(tokens.views.k.shape[2], tokens.views.k.device)
    yield carry
    if order is not None:
        if live is not None:
            raise MetaTTTError(
                "optimizer.sampling=sgd takes parts of equal size, and padding makes them unequal: use full"
            )
        size = tokens.views.k.shape[2] // rule.steps
        for part in tokens.map(lambda x: _permuted(x, order)).split(size):
            _, carry = in_groups(loop, part, carry, [Block(size, 0, True, size)], False)
            yield carry
        return
    for step in range(rule.steps):
        _, carry = in_groups(loop, tokens, carry, blocks, False)
        yield carry
        if step + 1 < rule.steps:  # the next pass takes its gradients where this one ended
            again = rule.again(carry, filled)
            carry = again if live is None else choose(live.any(1), again, carry, {**carry, **again})


def answers(
    loop: InnerLoop, tokens: Tokens, carry: Memory, blocks: Sequence[Block]
) -> Tensor:
    """All queries answered by one set of weights, in pieces that are recomputed in the backward pass: mini-batches
    where their tokens see each other."""
    count, size = tokens.views.q.shape[2], loop.rule.compute_chunk or 2048
    if not loop.learner.mixes_tokens:
        blocks = [Block(min(size, count - start), 0, False, 0) for start in range(0, count, size)]
    y, _ = in_groups(loop, tokens, carry, blocks, True)
    assert y is not None
    return y


def _permuted(x: Tensor, order: Tensor) -> Tensor:
    """Tokens of `x` `[B, H, T, ...]` in the order `[1, H, T]`."""
    index = order.view(*order.shape, *(1,) * (x.ndim - 3))
    return x.gather(2, index.expand(x.shape[0], -1, -1, *x.shape[3:]))
