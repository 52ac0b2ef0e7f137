"""How a learner reaches its weights: a few primitives over named tensors.

The same learner runs with plain weights (`FastWeights`), with weights that record what an update needs (`RecordingWeights`), and
with weights that differ from token to token but are never materialised (`PerTokenWeights`). Which of these it is, the learner
does not know.

With `z = aW` for token s and `δ_s = ∂ℓ_s/∂z_s`, the gradient of ℓ_s is `a_sᵀδ_s` (arXiv 2407.04620, App. A). Recording
keeps `a` and `δ`; reading replaces `q_t W_t` by `Σ_B rows_B(t) (q_t B) − Σ_s mix_ts (q_t·a_s) δ_s`. The same holds for
a bias (a = 1), a scale (δ ∘ x), an embedding (a one-hot) and a convolution (a unfolded); a weight used at several
places sums over all of them.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.modules import transformed
from metattt.ops.chunk import matmul
from metattt.state import Tensors


class UnsupportedOperation(MetaTTTError):
    """A fast weight was used outside the primitives, so that its per-token gradient has no factored form."""


def per_token(vector: Tensor, like: Tensor) -> Tensor:
    """Inserts axes so that `vector` `[B, H, d]` (or any shape with d numbers) broadcasts against `like`
    `[B, H, T, ..., d]`."""
    return vector.reshape(*vector.shape[:2], *(1,) * (like.ndim - 3), vector.shape[2:].numel())


class FastWeights:
    """Named weights of one learner for `B` sequences and `H` heads.

    Args:
        fast: weights that the inner loop trains, each `[B, H, *shape]`.
        slow: weights that only the outer loop trains (a norm's affine, say), each `[H, *shape]`.
        matmul_dtype: type to which matmul operands are rounded (bf16 under autocast); sums stay in the weights' own type.

    Inputs `x` are `[B, H, T, ..., d]`: axes between `T` and `d` are positions inside one token.
    """

    factored = False  #: True if the weights exist only inside the primitives, so that no other operation can use them

    def __init__(self, fast: Mapping[str, Tensor], slow: Mapping[str, Tensor], matmul_dtype: torch.dtype):
        self._fast, self._slow, self._matmul_dtype = fast, slow, matmul_dtype

    def _value(self, name: str) -> Tensor:
        """The tensor behind `name`, `[B or 1, H, *shape]`."""
        if name in self._fast:
            return self._fast[name]
        if name not in self._slow:
            known = [*self._fast, *self._slow]
            near = difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise MetaTTTError(f"the learner declares no weight {name!r}: it has {', '.join(known)}.{hint}")
        return self._slow[name].unsqueeze(0)

    def __getitem__(self, name: str) -> Tensor:
        """The raw weight, for operations that no primitive covers; such a learner loses the dual form."""
        return self._value(name)

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
        return z if bias is None else z + per_token(self._value(bias), z)

    def bias(self, x: Tensor, bias: str) -> Tensor:
        """`x + b`, b of shape `(d,)`, or of any shape with d numbers."""
        return x + per_token(self._value(bias), x)

    def scale(self, x: Tensor, scale: str) -> Tensor:
        """`x ∘ s`, s of shape `(d,)`."""
        return x * per_token(self._value(scale), x)

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


class OpaqueWeight:
    """Stands for a raw fast weight while recording: any operation on it is refused by the weight's name."""

    def __init__(self, name: str, value: Tensor):
        self._name, self.shape, self.ndim, self.dtype, self.device = (
            name,
            value.shape,
            value.ndim,
            value.dtype,
            value.device,
        )

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = next((a._name for a in (*args, *(kwargs or {}).values()) if isinstance(a, OpaqueWeight)), "?")
        raise UnsupportedOperation(f"fast weight {name!r} is used by {getattr(function, '__name__', function)}")

    def __getattr__(self, attribute: str) -> Any:
        raise UnsupportedOperation(f"fast weight {self._name!r} is used by .{attribute}")

    def _refuse(self, *_: Any) -> Any:
        raise UnsupportedOperation(f"fast weight {self._name!r} is used by an arithmetic operator or by indexing")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __matmul__ = __rmatmul__ = __pow__ = __neg__ = __getitem__ = _refuse


class WeightUse(NamedTuple):
    """One use of a fast weight: the input of the primitive, its output, and the weights it served."""

    weight: str | None
    bias: str | None
    input: Tensor | None
    transpose: bool
    scale: bool


def needs_probes() -> bool:
    """Whether gradients inside the forward pass are `torch.func`'s to take.

    `torch.func.vjp` does not run under saved-tensor hooks (any non-reentrant checkpoint, also a user's own), and
    `torch.autograd.grad` does not run under compile, inside functorch transforms or in inference mode. So each is used
    where the other fails.
    """
    return torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or transformed()


def for_probes() -> AbstractContextManager[Any]:
    """Around `torch.func.vjp` and what it returns: in inference mode, torch 2.11 differentiates to zeros."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return nullcontext()
    outside = ExitStack()
    outside.enter_context(torch.inference_mode(False))
    outside.enter_context(torch.no_grad())
    return outside


class RecordingWeights(FastWeights):
    """Plain weights that remember, at each use, what a per-token gradient is made of.

    Args:
        probes: zeros added to the outputs in order, so that `torch.func.vjp` can ask for δ. None: the outputs
            themselves are what `torch.autograd.grad` differentiates by.
    """

    factored = True

    def __init__(
        self,
        fast: Mapping[str, Tensor],
        slow: Mapping[str, Tensor],
        matmul_dtype: torch.dtype,
        probes: Iterable[Tensor | float] | None = None,
    ):
        super().__init__(fast, slow, matmul_dtype)
        self.probes: Iterator[Tensor | float] | None = None if probes is None else iter(probes)
        self.uses: list[WeightUse] = []
        self.outputs: list[Tensor] = []

    def __getitem__(self, name: str) -> Any:
        return OpaqueWeight(name, self._value(name)) if name in self._fast else self._value(name)

    def _use(
        self,
        z: Tensor,
        weight: str | None,
        bias: str | None,
        x: Tensor | None,
        transpose: bool = False,
        scale: bool = False,
    ) -> Tensor:
        weight = weight if weight in self._fast else None
        bias = bias if bias in self._fast else None
        if weight is None and bias is None:
            return z
        if self.probes is not None:
            z = z + next(self.probes)
        elif not z.requires_grad:
            z = z.detach().requires_grad_()
        self.uses.append(WeightUse(weight, bias, x if weight else None, transpose, scale))
        self.outputs.append(z)
        return z

    def linear(self, x: Tensor, weight: str, bias: str | None = None, *, transpose: bool = False) -> Tensor:
        if bias is not None and self._is_number(bias):
            return self.bias(self.linear(x, weight, transpose=transpose), bias)
        return self._use(super().linear(x, weight, bias, transpose=transpose), weight, bias, x, transpose=transpose)

    def bias(self, x: Tensor, bias: str) -> Tensor:
        if self._is_number(bias) and x.shape[-1] != 1:
            return x + self._number(bias, x)
        return self._use(super().bias(x, bias), None, bias, None)

    def scale(self, x: Tensor, scale: str) -> Tensor:
        if self._is_number(scale) and x.shape[-1] != 1:
            return x * self._number(scale, x)
        return self._use(super().scale(x, scale), scale, None, x, scale=True)

    def _is_number(self, name: str) -> bool:
        return name in self._fast and self._fast[name].shape[2:].numel() == 1

    def _number(self, name: str, x: Tensor) -> Tensor:
        """A weight of one number at every place of `x`, `[..., 1]`: δ of all features that it meets is their sum."""
        return self.bias(x.new_zeros(*x.shape[:-1], 1), name)

    def embedding(self, index: Tensor, weight: str) -> Tensor:
        z = super().embedding(index, weight)
        return (
            self._use(z, weight, None, F.one_hot(index, self._value(weight).shape[2]).to(z.dtype))
            if weight in self._fast
            else z
        )


class Gradients(Protocol):
    """What `PerTokenWeights` asks of the tokens' gradients G_s."""

    @property
    def paired(self) -> Collection[tuple[str, str, bool]]:
        """(weight, bias, transpose) of those that were only ever used together."""

    def mixed(self, name: str, mix: Tensor) -> Tensor | None:
        """`Σ_s mix_ts G_s` of a vector, one per query: `[B, H, m, d]`; None if the weight was not used."""

    def product(self, name: str, x: Tensor, mix: Tensor, transpose: bool, plus_one: bool) -> Tensor | None:
        """`Σ_s mix_ts x_t G_s` of a matrix, `x` `[B, H, m·P, d]`, mix `[B, H, m, n]`; with `plus_one` the paired bias
        is included."""


class PerTokenWeights(FastWeights):
    """Weights that differ from query to query: `W_t = Σ_B rows_B(t) · B − Σ_s mix_ts G_s`, never materialised.

    Args:
        terms: (row `[B, H, m]` or None for ones, weights by name) of each term.
        mix: `[B, H, m, n]`, η included.
        gradients: what `RecordingWeights` found at the anchor.
        slow, matmul_dtype: as in `FastWeights`.
    """

    factored = True

    def __init__(
        self,
        terms: Sequence[tuple[Tensor | None, Tensors]],
        mix: Tensor,
        gradients: Gradients,
        slow: Mapping[str, Tensor],
        matmul_dtype: torch.dtype,
    ):
        super().__init__(terms[0][1], slow, matmul_dtype)
        self.terms, self.mix, self.gradients = terms, mix, gradients
        self.parts = [FastWeights(weights, slow, matmul_dtype) for _, weights in terms]

    def __getitem__(self, name: str) -> Any:
        return OpaqueWeight(name, self._value(name)) if name in self._fast else self._value(name)

    def _combine(self, parts: Sequence[Tensor]) -> Tensor:
        """`Σ_B rows_B(t) part_B` over parts `[B, H, m, ..., d]`."""
        total: Tensor | None = None
        for (row, _), part in zip(self.terms, parts, strict=True):
            part = part if row is None else part * row.view(*row.shape, *(1,) * (part.ndim - 3))
            total = part if total is None else total + part
        assert total is not None
        return total

    def _vector(self, name: str, like: Tensor) -> Tensor:
        """The vector of every query, broadcast against `like` `[B, H, m, ..., d]`."""
        if name not in self._fast:
            return per_token(self._value(name), like)
        vector = self._combine([part._value(name).flatten(2).unsqueeze(2) for part in self.parts])  # [B, H, m or 1, d]
        moved = self.gradients.mixed(name, self.mix)
        vector = vector if moved is None else vector - moved
        return vector.view(*vector.shape[:3], *(1,) * (like.ndim - 4), vector.shape[-1])

    def linear(self, x: Tensor, weight: str, bias: str | None = None, *, transpose: bool = False) -> Tensor:
        if weight not in self._fast:
            z = super().linear(x, weight, transpose=transpose)
            return z if bias is None else z + self._vector(bias, z)
        paired = (weight, bias, transpose) in self.gradients.paired
        z = self._combine(
            [part.linear(x, weight, bias if paired else None, transpose=transpose) for part in self.parts]
        )
        moved = self.gradients.product(weight, x.flatten(2, -2), self.mix, transpose, paired)
        z = z if moved is None else z - moved.view(z.shape)
        return z if bias is None or paired else z + self._vector(bias, z)

    def bias(self, x: Tensor, bias: str) -> Tensor:
        return x + self._vector(bias, x)

    def scale(self, x: Tensor, scale: str) -> Tensor:
        return x * self._vector(scale, x)

    def embedding(self, index: Tensor, weight: str) -> Tensor:
        if weight not in self._fast:
            return super().embedding(index, weight)
        rows = F.one_hot(index, self._value(weight).shape[2]).to(self._value(weight).dtype)
        return self.linear(rows, weight)
