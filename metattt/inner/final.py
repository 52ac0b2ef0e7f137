"""Reading separately from learning: with the weights at the end of a call (`optimizer.read=final`: first all tokens are
learned, then all queries are read), and with the weights of a state (nothing is learned)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.inner.columns import take_columns
from metattt.inner.execution import in_groups
from metattt.inner.parts import Parts
from metattt.inner.tokens import Block, Tokens
from metattt.memory import Memory, choose, newest
from metattt.optimizers.base import InnerOptimizer
from metattt.state import WHOLE_CALL, State


def learned_then_read(
    loop: Parts,
    tokens: Tokens,
    memory: Memory,
    blocks: Sequence[Block],
    is_filled: Tensor | None,
    after: Tensor,
) -> tuple[Tensor, Memory]:
    """A call with a `final` read: predictions `[B, H, columns, d]` with the weights that all its tokens have left, and
    the memory.

    Args:
        is_filled: `[B, columns]` columns that hold a token; None: all.
        after: `[B]` tokens since the start of the document, after the call.
    """
    *_, memory = steps(loop, tokens, memory, blocks, is_filled, after)
    now = loop.rule.current(memory, after % loop.rule.mini_batch_size)
    return predictions(loop, tokens, {"commit": now}, blocks), memory


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
        for part in tokens.map(lambda x: take_columns(x, order)).split(size):
            _, memory = in_groups(loop, part, memory, [Block(size, 0, True, size)], False)
            yield memory
        return
    began = {slot: memory[slot] for slot in ("anchor",) if slot in memory}
    for step in range(rule.steps):
        _, memory = in_groups(loop, tokens, memory, blocks, False)
        if step + 1 == rule.steps:  # the passes of the next call begin at the anchor of the sequence, as these did
            memory = {**memory, **began}
        yield memory
        if step + 1 < rule.steps:  # the next pass takes its gradients where this one ended
            again = _again(rule, memory, filled)
            memory = again if is_filled is None else choose(is_filled.any(1), again, memory, {**memory, **again})


def _again(rule: InnerOptimizer, memory: Memory, filled: Tensor) -> Memory:
    """The memory at the start of the next pass: all weights are the newest ones. A mini-batch with only `filled` `[B]`
    tokens at the end of the call counts as committed."""
    after = memory
    if "update" in memory:
        committed = rule.commit(memory, filled)
        after = choose(filled > 0, committed, memory, committed)
    now = after[newest(after)]
    held = [slot for slot in after if slot in ("commit", "anchor")] or ["weights"]
    return {slot: values for slot, values in after.items() if slot != "weights"} | dict.fromkeys(held, now)


def predictions(loop: Parts, tokens: Tokens, memory: Memory, blocks: Sequence[Block]) -> Tensor:
    """Predictions for all queries with one set of weights, in pieces that are recomputed in the backward pass; the
    pieces are mini-batches if the learner mixes tokens."""
    count, size = tokens.views.q.shape[2], loop.rule.compute_chunk or 2048
    if not loop.learner.mixes_tokens:
        blocks = [Block(min(size, count - start), 0, False, 0) for start in range(0, count, size)]
    y, _ = in_groups(loop, tokens, memory, blocks, True)
    assert y is not None
    return y


def read_only(loop: Parts, q: Tensor, state: State, dtype: torch.dtype) -> Tensor:
    """Predictions for queries `[B, H, T, d]` with the weights of a state: the last commit if the rule reads commits,
    else the newest weights.

    Args:
        dtype: of the weights, at least fp32.

    Raises:
        MetaTTTError: the learner mixes the tokens of a mini-batch, and the state is inside one.
    """
    rule, size = loop.rule, loop.rule.mini_batch_size
    mixes = loop.learner.mixes_tokens
    if mixes and state.phase != 0:
        raise MetaTTTError(
            f"{type(loop.learner).__name__} answers the tokens of a mini-batch together, and the state stands inside "
            f"of one of optimizer.mini_batch_size={size} tokens: read where a mini-batch begins"
        )
    memory = state.weights or loop.start(q.shape[0], dtype)
    commits = rule.read in ("previous", "committed")
    with torch.autocast("cpu" if q.is_meta else q.device.type, enabled=False):  # as `mini_batches`
        open_ = torch.zeros_like(state.pos) if size == WHOLE_CALL else state.pos % size  # a call leaves nothing open
        weights = memory["commit"] if commits else rule.current(memory, open_)
        slow = {name: value.to(dtype) for name, value in loop.learner.slow.items()}
        loop = loop._replace(matmul_dtype=q.dtype, slow=slow)
        parts = q.to(dtype).split(size, dim=2) if mixes else [q.to(dtype)]
        return torch.cat([loop.predict(weights, part) for part in parts], dim=2)
