"""How a learner reaches its weights: a few primitives over named tensors.

The same learner runs with plain weights, with weights that record what an update needs, and with weights that differ from token
to token but are never materialised (`metattt.inner.accessors`). Which of these it is, the learner does not know.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from metattt.errors import MetaTTTError


class UnsupportedOperation(MetaTTTError):
    """A fast weight was used outside the primitives, so that its per-token gradient has no factored form."""


def matmul(a: Tensor, b: Tensor, operand: torch.dtype) -> Tensor:
    """`a @ b` with operands rounded to `operand`; the result keeps the (wider) type of `a`, as the inner loop's sums do."""
    return a @ b if a.dtype == operand else (a.to(operand) @ b.to(operand)).to(a.dtype)


def per_token(vector: Tensor, like: Tensor) -> Tensor:
    """Inserts axes so that `vector` `[B, H, d]` (or any shape with d numbers) broadcasts against `like` `[B, H, T, ..., d]`."""
    return vector.reshape(*vector.shape[:2], *(1,) * (like.ndim - 3), vector.shape[2:].numel())


class FastWeights:
    """Named weights of one learner for `B` sequences and `H` heads.

    Args:
        fast: weights that the inner loop trains, each `[B, H, *shape]`.
        slow: weights that only the outer loop trains (a norm's affine, say), each `[H, *shape]`.
        operand: type to which matmul operands are rounded (bf16 under autocast); sums stay in the weights' own type.

    Inputs `x` are `[B, H, T, ..., d]`: axes between `T` and `d` are positions inside one token.
    """

    factored = False  #: True if the weights exist only inside the primitives, so that no other operation can use them

    def __init__(self, fast: Mapping[str, Tensor], slow: Mapping[str, Tensor], operand: torch.dtype):
        self._fast, self._slow, self._operand = fast, slow, operand

    def _value(self, name: str) -> Tensor:
        """The tensor behind `name`, `[B or 1, H, *shape]`."""
        return self._fast[name] if name in self._fast else self._slow[name].unsqueeze(0)

    def __getitem__(self, name: str) -> Tensor:
        """The raw weight, for operations that no primitive covers; such a learner loses the dual form."""
        return self._value(name)

    def _matrix(self, name: str, transpose: bool = False) -> Tensor:
        """W as `(d_in, d_out)`: its leading axes are flattened, or with `transpose` (W is `(d_out, ...)`) its trailing ones."""
        return self._value(name).flatten(3).mT if transpose else self._value(name).flatten(2, -2)

    def linear(self, x: Tensor, weight: str, bias: str | None = None, *, transpose: bool = False) -> Tensor:
        """`x @ W + b`: `[..., d_in]` to `[..., d_out]`; W is `(d_in, d_out)`, rows are tokens. `transpose` uses Wᵀ (tied weights)."""
        z = matmul(x.flatten(2, -2), self._matrix(weight, transpose), self._operand)
        z = z.view(*z.shape[:2], *x.shape[2:-1], z.shape[-1])
        return z if bias is None else z + per_token(self._value(bias), z)

    def bias(self, x: Tensor, bias: str) -> Tensor:
        """`x + b`, b of shape `(d,)`, or of any shape with d numbers."""
        return x + per_token(self._value(bias), x)

    def scale(self, x: Tensor, scale: str) -> Tensor:
        """`x ∘ s`, s of shape `(d,)`."""
        return x * per_token(self._value(scale), x)

    def embedding(self, index: Tensor, weight: str) -> Tensor:
        """Row `index` of W: `[B, H, T, ...]` integers to `[B, H, T, ..., d]`; W is `(rows, d)`."""
        table = self._matrix(weight).expand(*index.shape[:2], -1, -1)
        rows = index.flatten(2).unsqueeze(-1).expand(-1, -1, -1, table.shape[-1])
        return table.gather(2, rows).view(*index.shape, table.shape[-1])

    def conv1d(self, x: Tensor, weight: str, bias: str | None = None) -> Tensor:
        """Convolution inside each token, zero-padded: `[B, H, T, L, c_in]` to `[B, H, T, L, c_out]`; W is `(width, c_in, c_out)`."""
        width = self._value(weight).shape[2]
        padded = F.pad(x, (0, 0, (width - 1) // 2, width // 2))
        windows = padded.unfold(-2, width, 1).transpose(-2, -1)  # [..., L, width, c_in]
        return self.linear(windows.flatten(-2), weight, bias)
