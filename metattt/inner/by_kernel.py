"""Whole mini-batches, and open ones while decoding, by the kernels that cover a combination."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from metattt.inner.tokens import Block, Carry, MiniBatches, Tokens
from metattt.state import Tensors

if TYPE_CHECKING:
    from metattt.inner.loop import InnerLoop


def scan(
    loop: InnerLoop,
    tokens: Tokens,
    carry: Carry,
    blocks: Sequence[Block],
    padded: bool,
    operand: torch.dtype,
    own: bool,
) -> tuple[Tensor, Carry]:
    """The blocks one after the other, each by a kernel where one takes it and by the forms elsewhere.

    Args:
        padded: some columns are unfilled.
        own: the weights of `carry` may be written over.
    """
    size, tau, decoding = loop.optimizer.mini_batch_size, loop.optimizer.token_steps(), not torch.is_grad_enabled()
    sums = "update" in loop.plan.roles  # a rule without token steps carries W_t of an open mini-batch, not M as kernels do
    slow = {name: value for name, value in loop.learner.slow.items()}  # noqa: C416 (as compile traces it)
    outputs: list[Tensor] = []
    runs = _runs(blocks, size, set(carry) == {"commit"}, decoding)
    parts = [tokens] if len(runs) == 1 else tokens.split([sum([block.length for block in run]) for run in runs])
    for run, part in zip(runs, parts, strict=True):
        given, first, y = (
            MiniBatches(part, carry.get("commit", {}), slow, tau, size, operand, loop.group_size),
            run[0],
            None,
        )
        if _whole(first, size) and set(carry) == {"commit"}:
            kernel = loop.plan.kernel(given)
            if kernel is not None:
                with torch.autocast(part.k.device.type, enabled=False):
                    y, weights = kernel.scan(given, partial(_reference, loop))
                carry = {"commit": weights}
        elif decoding and sums and _open(first, padded):
            kernel = loop.plan.decoder(given)
            if kernel is not None:
                y, weights, update = kernel.advance(given, carry.get("update"), first.phase, own)
                carry = {"commit": weights} if update is None else {"commit": weights, "update": update}
        if y is None:
            y, carry = loop.grouped(part, carry, run, True, operand)
        own = True  # what follows was made in this call
        outputs.append(y)  # type: ignore[arg-type]
    return (torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]), carry


def _reference(loop: InnerLoop, given: MiniBatches) -> tuple[Tensor, Tensors]:
    """What a kernel computes, by the dual form."""
    blocks = [Block(given.size, 0, True, given.size)] * (given.tokens.k.shape[2] // given.size)
    rule = loop.optimizer.with_token_steps(given.tau)  # the tensor that the derivatives are wanted for
    y, carry = loop.forward(given.tokens, {"commit": given.weights}, blocks, True, given.operand, rule, given.slow)
    assert y is not None
    return y, carry["commit"]


def _whole(block: Block, size: int) -> bool:
    """Whether this is one mini-batch of `size` tokens for all sequences, from its first token to its commit."""
    phase = block.phase
    if block.length != size:  # a branch: under torch.compile the comparison itself is symbolic
        return False
    return isinstance(phase, int) and phase == 0 and block.commit is True and block.restart is None


def _open(block: Block, padded: bool) -> bool:
    """Whether this is a part of one mini-batch of which all sequences fill every column."""
    same = isinstance(block.phase, int) and isinstance(block.filled, int) and isinstance(block.commit, bool)
    return block.restart is None and (same or (isinstance(block.phase, Tensor) and not padded))


def _runs(blocks: Sequence[Block], size: int, committed: bool, decoding: bool) -> list[list[Block]]:
    """Whole mini-batches together, as a kernel takes them, and what lies between; all of that alone while decoding.

    `committed`: at the first block a mini-batch begins; where not, the first block ends one that an earlier call began.
    """
    runs: list[list[Block]] = []
    kind: bool | None = None
    for number, block in enumerate(blocks):
        whole = _whole(block, size) and (committed or number > 0)
        if kind == whole and (whole or not decoding):
            runs[-1].append(block)
        else:
            runs.append([block])
        kind = whole
    return runs
