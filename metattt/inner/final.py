"""Reading with the weights at the end of a call (`optimizer.read=final`): learn from all tokens first, then answer all
queries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.inner.execution import in_groups
from metattt.inner.parts import Parts
from metattt.inner.tokens import Block, Tokens
from metattt.memory import Memory, choose, newest
from metattt.optimizers.base import InnerOptimizer


def steps(
    loop: Parts,
    tokens: Tokens,
    memory: Memory,
    blocks: Sequence[Block],
    is_filled: Tensor | None,
    after: Tensor,
) -> Iterator[Memory]:
    """The memory before the first inner step of a `final` read and after each of them."""
    rule, filled = loop.rule, after % loop.rule.mini_batch_size
    order = rule.permutation(tokens.views.k.shape[2], tokens.views.k.device)
    yield memory
    if order is not None:
        if is_filled is not None:
            raise MetaTTTError(
                "optimizer.sampling=sgd takes parts of equal size, and padding makes them unequal: use full"
            )
        size = tokens.views.k.shape[2] // rule.steps
        for part in tokens.map(lambda x: _permuted(x, order)).split(size):
            _, memory = in_groups(loop, part, memory, [Block(size, 0, True, size)], False)
            yield memory
        return
    for step in range(rule.steps):
        _, memory = in_groups(loop, tokens, memory, blocks, False)
        yield memory
        if step + 1 < rule.steps:  # the next pass takes its gradients where this one ended
            again = _again(rule, memory, filled)
            memory = again if is_filled is None else choose(is_filled.any(1), again, memory, {**memory, **again})


def _again(rule: InnerOptimizer, memory: Memory, filled: Tensor) -> Memory:
    """What the next pass begins with, from the memory after one: all weights are the newest. A mini-batch that the end
    of the call cuts off, `filled` `[B]` tokens of it, is a commit of its pass."""
    after = memory
    if "update" in memory:
        committed = rule.commit(memory, filled)
        after = choose(filled > 0, committed, memory, committed)
    now = after[newest(after)]
    held = [slot for slot in after if slot in ("commit", "anchor")] or ["weights"]
    return {slot: values for slot, values in after.items() if slot != "weights"} | dict.fromkeys(held, now)


def predictions(loop: Parts, tokens: Tokens, memory: Memory, blocks: Sequence[Block]) -> Tensor:
    """All queries answered by one set of weights, in pieces that are recomputed in the backward pass: mini-batches
    where their tokens see each other."""
    count, size = tokens.views.q.shape[2], loop.rule.compute_chunk or 2048
    if not loop.learner.mixes_tokens:
        blocks = [Block(min(size, count - start), 0, False, 0) for start in range(0, count, size)]
    y, _ = in_groups(loop, tokens, memory, blocks, True)
    assert y is not None
    return y


def _permuted(x: Tensor, order: Tensor) -> Tensor:
    """Tokens of `x` `[B, H, T, ...]` in the order `[1, H, T]`."""
    index = order.view(*order.shape, *(1,) * (x.ndim - 3))
    return x.gather(2, index.expand(x.shape[0], -1, -1, *x.shape[3:]))
