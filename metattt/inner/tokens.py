"""What the inner loop reads and what it carries: the types that its forms, and the contract of kernels, name."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from metattt.modules import spread
from metattt.state import Tensors

Carry = dict[str, Tensors]
"""Weights by role (`commit`, `anchor`, `weights`, `update`, `momentum`, ...) and name, `[B, H, *shape]`."""


class Tokens(NamedTuple):
    """Views `[B, H, T, ·]` and gates `[B, H, T]` of consecutive tokens."""

    k: Tensor
    v: Tensor
    q: Tensor
    eta: Tensor
    alpha: Tensor | None = None
    beta: Tensor | None = None
    kappa: Tensor | None = None
    rates: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> Tokens:
        """Applies `function` to every tensor at hand."""
        return Tokens(*(None if x is None else function(x) for x in self))  # type: ignore[arg-type]


class Block(NamedTuple):
    """Consecutive columns inside one mini-batch.

    Attributes:
        length: columns.
        phase: place of the first column in its mini-batch; `[B]` if it differs between sequences (then `length` is 1).
        commit: whether the mini-batch is complete after these columns; `[B]` if it differs.
        filled: tokens of the mini-batch seen by the end of these columns; `[B]` if it differs.
        restart: `[B]` sequences that start a document here; None if none does.
    """

    length: int
    phase: int | Tensor
    commit: bool | Tensor
    filled: int | Tensor
    restart: Tensor | None = None


class MiniBatches(NamedTuple):
    """What a kernel reads: whole mini-batches of `b` tokens one after the other, from committed weights to committed
    weights.

    Attributes:
        tokens: views `[B, H, n·b, d]` as the task made them (any floating type, any strides) and gates `[B, H, n·b]` in
            fp32 or wider.
        weights: fast weights W_a by name at the start, `[B, H, *shape]`, fp32 or wider.
        slow: outer-loop weights of the learner by name, `[H, *shape]`.
        tau: token steps `[1 or H, b]`; None: all 1.
        size: b, tokens per mini-batch.
        operand: type to which matmul operands are rounded.
        group_size: mini-batches whose weights are recomputed together in the backward pass; None leaves it to the
            kernel.
    """

    tokens: Tokens
    weights: Tensors
    slow: Tensors
    tau: Tensor | None
    size: int
    operand: torch.dtype
    group_size: int | None


Scan = Callable[[MiniBatches], tuple[Tensor, Tensors]]


def rated(factor: Tensor, rates: Tensor | None, index: int) -> Tensor:
    """`factor` `[B, H, n]` of the tokens' gradients as it is for fast weight number `index`."""
    return factor if rates is None else factor * rates[..., index]


def where(condition: Tensor, a: Tensors | None, b: Tensors | None) -> Tensors:
    """`a` where `condition` `[B]`, else `b`; None stands for zeros."""
    return {
        name: torch.where(spread(condition, x), 0 if a is None else a[name], 0 if b is None else b[name])
        for name, x in (a or b or {}).items()
    }
