"""How a learner reaches its weights: a few primitives over named tensors.

The same learner runs with plain weights (`FastWeights`), with weights that record what an update needs
(`RecordingWeights`), and with weights that differ from token to token but are never materialised (`PerTokenWeights`).
The code of the learner is the same for all of them.

With `z = aW` for token s and `δ_s = ∂ℓ_s/∂z_s`, the gradient of ℓ_s is `a_sᵀδ_s` (arXiv 2407.04620, App. A). Recording
keeps `a` and `δ`; reading replaces `q_t W_t` by `Σ_B rows_B(t) (q_t B) − Σ_s mix_ts (q_t·a_s) δ_s`. The same holds for
a bias (a = 1), a scale (δ ∘ x), an embedding (a one-hot) and a convolution (a unfolded); a weight used at several
places sums over all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from metattt.errors import MetaTTTError, did_you_mean
from metattt.learners.opaque import OpaqueWeight
from metattt.ops.chunk import matmul

Weights = Mapping[str, Tensor]


class FastWeights:
    """Named weights of one learner for `B` sequences and `H` heads.

    Args:
        fast: weights that the inner loop trains, each `[B, H, *shape]`.
        slow: weights that only the outer loop trains (a norm's affine, say), each `[H, *shape]`.
        matmul_dtype: type to which matmul operands are rounded (bf16 under autocast); sums stay in the weights' own
            type.

    Inputs `x` are `[B, H, T, ..., d]`: axes between `T` and `d` are positions inside one token.
    """

    factored = False  #: True if only primitives can use the weights

    def __init__(self, fast: Weights, slow: Weights, matmul_dtype: torch.dtype):
        self._fast, self._slow, self._matmul_dtype = fast, slow, matmul_dtype

    def _value(self, name: str) -> Tensor:
        """The tensor behind `name`, `[B or 1, H, *shape]`."""
        if name in self._fast:
            return self._fast[name]
        if name not in self._slow:
            known = [*self._fast, *self._slow]
            has = f"it has {', '.join(known)}.{did_you_mean(name, known)}"
            raise MetaTTTError(f"the learner declares no weight {name!r}: {has}")
        return self._slow[name].unsqueeze(0)

    def _vector(self, name: str, like: Tensor) -> Tensor:
        """A weight of any shape with d numbers, broadcast against `like` `[B, H, T, ..., d]`."""
        value = self._value(name)
        return value.reshape(*value.shape[:2], *(1,) * (like.ndim - 3), value.shape[2:].numel())

    def __getitem__(self, name: str) -> Tensor:
        """The raw weight, for operations that no primitive covers; such a learner loses the dual form."""
        value = self._value(name)
        seen: Any = OpaqueWeight(name, value) if self.factored and name in self._fast else value
        return seen

    def linear(self, x: Tensor, weight: str, bias: str | None = None, *, transpose: bool = False) -> Tensor:
        """`x @ W + b`: `[..., d_in]` to `[..., d_out]`; W is `(d_in, d_out)`, rows are tokens. `transpose` uses Wᵀ
        (tied weights).

        A weight with more axes is a matrix all the same: its leading axes are flattened, or with `transpose` its
        trailing ones.
        """
        matrix = self._value(weight)
        matrix = matrix.flatten(3).mT if transpose else matrix.flatten(2, -2)
        if x.ndim == 4:
            z = matmul(x, matrix, self._matmul_dtype)
        else:
            z = matmul(x.flatten(2, -2), matrix, self._matmul_dtype)
            z = z.view(*z.shape[:2], *x.shape[2:-1], z.shape[-1])
        return z if bias is None else z + self._vector(bias, z)

    def bias(self, x: Tensor, bias: str) -> Tensor:
        """`x + b`, b of shape `(d,)`, or of any shape with d numbers."""
        return x + self._vector(bias, x)

    def scale(self, x: Tensor, scale: str) -> Tensor:
        """`x ∘ s`, s of shape `(d,)`."""
        return x * self._vector(scale, x)

    def embedding(self, index: Tensor, weight: str) -> Tensor:
        """Row `index` of W: `[B, H, T, ...]` integers to `[B, H, T, ..., d]`; W is `(rows, d)`."""
        table = self._value(weight).flatten(2, -2).expand(*index.shape[:2], -1, -1)
        rows = index.flatten(2).unsqueeze(-1).expand(-1, -1, -1, table.shape[-1])
        return table.gather(2, rows).view(*index.shape, table.shape[-1])

    def conv1d(self, x: Tensor, weight: str, bias: str | None = None) -> Tensor:
        """Convolution inside each token, zero-padded: `[B, H, T, L, c_in]` to `[B, H, T, L, c_out]`; W is
        `(width, c_in, c_out)`."""
        width = self._value(weight).shape[2]
        padded = F.pad(x, (0, 0, (width - 1) // 2, width // 2))
        windows = padded.unfold(-2, width, 1).transpose(-2, -1)  # [..., L, width, c_in]
        return self.linear(windows.flatten(-2), weight, bias)


# -- while gradients are recorded and per-token weights are read -------------------------------------------------------


class WeightUse(NamedTuple):
    """One use of a fast weight: the input of the primitive, its output, and the weights it served."""

    weight: str | None
    bias: str | None
    input: Tensor | None
    transpose: bool = False
    scale: bool = False


class RecordingWeights(FastWeights):
    """Plain weights that record each use: the inputs and outputs from which per-token gradients are computed.

    Args:
        probes: zeros added to the outputs in order, so that `torch.func.vjp` can ask for δ. None: the outputs
            themselves are what `torch.autograd.grad` differentiates by.
    """

    factored = True

    def __init__(
        self, fast: Weights, slow: Weights, matmul_dtype: torch.dtype, probes: Iterable[Tensor | float] | None = None
    ):
        super().__init__(fast, slow, matmul_dtype)
        self.probes: Iterator[Tensor | float] | None = None if probes is None else iter(probes)
        self.uses: list[WeightUse] = []
        self.outputs: list[Tensor] = []

    def _use(self, z: Tensor, use: WeightUse) -> Tensor:
        """Records the output `z` of a primitive with its inputs, if one of its weights is fast."""
        weight = use.weight if use.weight in self._fast else None
        bias = use.bias if use.bias in self._fast else None
        if weight is None and bias is None:
            return z
        if self.probes is not None:
            z = z + next(self.probes)
        elif not torch.is_grad_enabled():  # by the learner, for which z is a constant
            return z
        elif not z.requires_grad:
            z = z.detach().requires_grad_()
        self.uses.append(WeightUse(weight, bias, use.input if weight else None, use.transpose, use.scale))
        self.outputs.append(z)
        return z

    def linear(self, x: Tensor, weight: str, bias: str | None = None, *, transpose: bool = False) -> Tensor:
        # a bias of one number, or one that may be wider than what the matrix makes, a number for each token
        narrow = weight in self._fast and self._fast[weight].shape[2 if transpose else -1] == 1
        if bias is not None and (narrow or self._is_number(bias)):
            return self.bias(self.linear(x, weight, transpose=transpose), bias)
        return self._use(super().linear(x, weight, bias, transpose=transpose), WeightUse(weight, bias, x, transpose))

    def bias(self, x: Tensor, bias: str) -> Tensor:
        if self._is_number(bias) and x.shape[-1] != 1:
            return x + self._number(bias, x)
        return self._use(super().bias(x, bias), WeightUse(None, bias, None))

    def scale(self, x: Tensor, scale: str) -> Tensor:
        if self._is_number(scale) and x.shape[-1] != 1:
            return x * self._number(scale, x)
        return self._use(super().scale(x, scale), WeightUse(scale, None, x, scale=True))

    def _is_number(self, name: str) -> bool:
        return name in self._fast and self._fast[name].shape[2:].numel() == 1

    def _number(self, name: str, x: Tensor) -> Tensor:
        """A weight of one number at every place of `x`, `[..., 1]`: δ of all features that it meets is their sum."""
        return self.bias(x.new_zeros(*x.shape[:-1], 1), name)

    def embedding(self, index: Tensor, weight: str) -> Tensor:
        z = super().embedding(index, weight)
        if weight not in self._fast:
            return z
        return self._use(z, WeightUse(weight, None, F.one_hot(index, self._value(weight).shape[2]).to(z.dtype)))


class Gradients(Protocol):
    """The interface of the tokens' gradients G_s for `PerTokenWeights`; `mix` is `[B, H, m, n]`."""

    @property
    def paired(self) -> Collection[tuple[str, str, bool]]:
        """(weight, bias, transpose) of those that were only ever used together."""

    def mixed(self, name: str, mix: Tensor) -> Tensor | None:
        """`Σ_s mix_ts G_s` of a vector, one per query: `[B, H, m, d]`; None if the weight was not used."""

    def product(self, name: str, x: Tensor, mix: Tensor, transpose: bool, plus_one: bool) -> Tensor | None:
        """`Σ_s mix_ts x_t G_s` of a matrix, `x` `[B, H, m·P, d]`; with `plus_one` the paired bias is included."""


Term = tuple[Tensor | None, Weights]  #: its row `[B, H, m]`, or None for ones, and weights by name


class PerTokenWeights(FastWeights):
    """Weights that differ from query to query: `W_t = Σ_B rows_B(t) · B − Σ_s mix_ts G_s`, never materialised.

    Args:
        terms: the B, each with its row.
        mix: `[B, H, m, n]`, η included.
        gradients: what `RecordingWeights` found at the anchor.
        slow, matmul_dtype: as in `FastWeights`.
    """

    factored = True

    def __init__(
        self, terms: Sequence[Term], mix: Tensor, gradients: Gradients, slow: Weights, matmul_dtype: torch.dtype
    ):
        super().__init__(terms[0][1], slow, matmul_dtype)
        self.terms, self.mix, self.gradients = terms, mix, gradients
        self.parts = [FastWeights(weights, slow, matmul_dtype) for _, weights in terms]

    def _combine(self, parts: Sequence[Tensor]) -> Tensor:
        """`Σ_B rows_B(t) part_B` over parts `[B, H, m, ..., d]`."""
        total: Tensor | None = None
        for (row, _), part in zip(self.terms, parts, strict=True):
            part = part if row is None else part * row.view(*row.shape, *(1,) * (part.ndim - 3))
            total = part if total is None else total + part
        assert total is not None
        return total

    def _vector(self, name: str, like: Tensor) -> Tensor:
        if name not in self._fast:
            return super()._vector(name, like)
        vector = self._combine([part._value(name).flatten(2).unsqueeze(2) for part in self.parts])  # [B, H, m or 1, d]
        moved = self.gradients.mixed(name, self.mix)
        vector = vector if moved is None else vector - moved
        return vector.view(*vector.shape[:3], *(1,) * (like.ndim - 4), vector.shape[-1])

    def linear(self, x: Tensor, weight: str, bias: str | None = None, *, transpose: bool = False) -> Tensor:
        if weight not in self._fast:
            return super().linear(x, weight, bias, transpose=transpose)
        paired = (weight, bias, transpose) in self.gradients.paired
        with_bias = bias if paired else None
        z = self._combine([part.linear(x, weight, with_bias, transpose=transpose) for part in self.parts])
        moved = self.gradients.product(weight, x.flatten(2, -2), self.mix, transpose, paired)
        z = z if moved is None else z - moved.view(z.shape)
        return z if bias is None or paired else z + self._vector(bias, z)

    def embedding(self, index: Tensor, weight: str) -> Tensor:
        if weight not in self._fast:
            return super().embedding(index, weight)
        rows = F.one_hot(index, self._value(weight).shape[2]).to(self._value(weight).dtype)
        return self.linear(rows, weight)
