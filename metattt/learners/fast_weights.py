"""How a learner reaches its weights: a few primitives over named tensors.

The same learner runs with plain weights, with weights that record what an update needs, and with weights that differ from token
to token but are never materialised (`metattt.inner.accessors`). Which of these it is, the learner does not know.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor


def matmul(a: Tensor, b: Tensor, operand: torch.dtype) -> Tensor:
    """`a @ b` with operands rounded to `operand`; the result keeps the (wider) type of `a`, as the inner loop's sums do."""
    return a @ b if a.dtype == operand else (a.to(operand) @ b.to(operand)).to(a.dtype)


def per_token(vector: Tensor, like: Tensor) -> Tensor:
    """Inserts axes so that `vector` `[B, H, d]`, one per sequence and head, broadcasts against `like` `[B, H, T, ..., d]`."""
    return vector.view(*vector.shape[:2], *(1,) * (like.ndim - 3), vector.shape[-1])


class FastWeights:
    """Named weights of one learner for `B` sequences and `H` heads.

    Args:
        fast: weights that the inner loop trains, each `[B, H, *shape]`.
        slow: weights that only the outer loop trains (a norm's affine, say), each `[H, *shape]`.
        operand: type to which matmul operands are rounded (bf16 under autocast); sums stay in the weights' own type.

    Inputs `x` are `[B, H, T, ..., d]`: axes between `T` and `d` are positions inside one token.
    """

    def __init__(self, fast: Mapping[str, Tensor], slow: Mapping[str, Tensor], operand: torch.dtype):
        self.fast, self.slow, self.operand = fast, slow, operand

    def value(self, name: str) -> Tensor:
        """The tensor behind `name`, `[B or 1, H, *shape]`."""
        return self.fast[name] if name in self.fast else self.slow[name].unsqueeze(0)

    def __getitem__(self, name: str) -> Tensor:
        """The raw weight, for operations that no primitive covers; such a learner loses the dual form."""
        return self.value(name)

    def matrix(self, name: str, transpose: bool = False) -> Tensor:
        matrix = self.value(name).flatten(2, -2)
        return matrix.mT if transpose else matrix

    def linear(self, x: Tensor, weight: str, bias: str | None = None, *, transpose: bool = False) -> Tensor:
        """`x @ W + b`: `[..., d_in]` to `[..., d_out]`; W is `(d_in, d_out)`, rows are tokens. `transpose` uses Wᵀ (tied weights)."""
        z = matmul(x.flatten(2, -2), self.matrix(weight, transpose), self.operand)
        z = z.view(*z.shape[:2], *x.shape[2:-1], z.shape[-1])
        return z if bias is None else z + per_token(self.value(bias), z)

    def bias(self, x: Tensor, bias: str) -> Tensor:
        """`x + b`, b of shape `(d,)`."""
        return x + per_token(self.value(bias), x)

    def scale(self, x: Tensor, scale: str) -> Tensor:
        """`x ∘ s`, s of shape `(d,)`."""
        return x * per_token(self.value(scale), x)

    def embedding(self, index: Tensor, weight: str) -> Tensor:
        """Row `index` of W: `[B, H, T, ...]` integers to `[B, H, T, ..., d]`; W is `(rows, d)`."""
        table = self.matrix(weight).expand(*index.shape[:2], -1, -1)
        rows = index.flatten(2).unsqueeze(-1).expand(-1, -1, -1, table.shape[-1])
        return table.gather(2, rows).view(*index.shape, table.shape[-1])

    def conv1d(self, x: Tensor, weight: str, bias: str | None = None) -> Tensor:
        """Convolution inside each token, zero-padded: `[B, H, T, L, c_in]` to `[B, H, T, L, c_out]`; W is `(width, c_in, c_out)`."""
        width = self.value(weight).shape[2]
        padded = F.pad(x, (0, 0, (width - 1) // 2, width // 2))
        windows = padded.unfold(-2, width, 1).transpose(-2, -1)  # [..., L, width, c_in]
        return self.linear(windows.flatten(-2), weight, bias)
