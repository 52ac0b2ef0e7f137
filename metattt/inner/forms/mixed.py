"""Per-token gradients of learners that mix tokens.

The loss of token s then depends on the outputs `z_r` of every token r before it: with the cotangents
`D_sr = ∂ℓ_s/∂z_r`, `G_s = Σ_r a_rᵀ D_sr`. A query reads
`q_t W_t = Σ_B rows_B(t) (q_t B) − Σ_r (q_t·a_r) Σ_s mix_ts D_sr`, which costs one backward pass per token. What later
tokens read of a token (cached keys and values) was computed with the weights of that token, as in decoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from metattt.inner.forms.dual import PerTokenGradients, finish, record
from metattt.inner.parts import Parts
from metattt.inner.tokens import Tokens, scaled
from metattt.learners.fast_weights import WeightUse
from metattt.memory import Memory


def chunk(
    loop: Parts, tokens: Tokens, memory: Memory, phase: int | Tensor, read: str | None
) -> tuple[Tensor | None, Memory]:
    """See `FORMS`."""
    anchor = loop.anchor(tokens, memory, phase)
    uses, each = record(loop, anchor, tokens, by_token=True)
    columns = [torch.stack(column) for column in zip(*each, strict=True)]
    gradients = MixedGradients(uses, columns, loop.learner.step_scales)
    return finish(loop, tokens, memory, phase, read, anchor, gradients)


class Cotangents(NamedTuple):
    """One use of a matrix: inputs `a` `[B, H, R, d_in]`, `D` `[B, H, s, R, d_out]`; R rows: tokens, and positions
    inside them."""

    inputs: Tensor
    cotangents: Tensor
    transpose: bool


class MixedGradients(PerTokenGradients):
    """`G_s` of every fast weight from the cotangents of each loss; it has the interface of `PerTokenGradients`.
    They are contracted in the weights' own type.

    Args:
        uses: uses of the weights, in order.
        deltas: `[s, B, H, n, ..., d]` for each use: the gradient of every loss by its output.
        scales: as in `PerTokenGradients`.
    """

    def __init__(self, uses: Sequence[WeightUse], deltas: Sequence[Tensor], scales: Mapping[str, float]):
        self.paired, self.terms = set(), {}  # the terms are those of vectors
        self.uses: dict[str, list[Cotangents]] = {}
        for use, delta in zip(uses, deltas, strict=True):
            delta = delta.movedim(0, 2)  # [B, H, s, n, ..., d]
            rows = tuple(range(3, delta.ndim - 1))
            if use.weight and use.input is not None:
                moved = scaled(delta, scales.get(use.weight))
                if use.scale:
                    self.terms.setdefault(use.weight, []).append((use.input.unsqueeze(2) * moved).sum(rows))
                else:
                    pulled = Cotangents(use.input.flatten(2, -2), moved.flatten(3, -2), use.transpose)
                    self.uses.setdefault(use.weight, []).append(pulled)
            if use.bias:
                self.terms.setdefault(use.bias, []).append(scaled(delta, scales.get(use.bias)).sum(rows))

    def weighted_sum(self, name: str, factor: Tensor, shape: Sequence[int]) -> Tensor:
        total = super().weighted_sum(name, factor, shape)
        for inputs, cotangents, transpose in self.uses.get(name, ()):
            right = torch.einsum("bhs,bhsrd->bhrd", factor, cotangents)
            part = right.mT @ inputs if transpose else inputs.mT @ right
            total = total + part.reshape(total.shape)
        return total

    def product(self, name: str, x: Tensor, mix: Tensor, transpose: bool, plus_one: bool) -> Tensor | None:
        total: Tensor | None = None
        x = x.unflatten(2, (mix.shape[-2], -1))  # [B, H, t, p, d]: p positions inside a query
        for inputs, cotangents, transposed in self.uses.get(name, ()):
            moved = torch.einsum("bhts,bhsrd->bhtrd", mix, cotangents)
            if transpose == transposed:
                part = torch.einsum("bhtpi,bhri,bhtrd->bhtpd", x, inputs, moved)
            else:
                part = torch.einsum("bhtpd,bhtrd,bhri->bhtpi", x, moved, inputs)
            total = part if total is None else total + part
        return None if total is None else total.flatten(2, 3)
