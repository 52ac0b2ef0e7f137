"""Fast weights that record per-token gradients, and fast weights that differ from token to token without being materialised.

With `z = aW` for token s and `δ_s = ∂ℓ_s/∂z_s`, the gradient of ℓ_s is `a_sᵀδ_s` (arXiv 2407.04620, App. A). Recording keeps `a` and `δ`;
reading replaces `q_t W_t` by `Σ_B rows_B(t) (q_t B) − Σ_s mix_ts (q_t·a_s) δ_s`. The same holds for a bias (a = 1), a scale (δ ∘ x), an
embedding (a one-hot) and a convolution (a unfolded); a weight used at several places sums over all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from metattt.learners.fast_weights import FastWeights, UnsupportedOperation, matmul, per_token
from metattt.state import Tensors


class OpaqueWeight:
    """Stands for a raw fast weight while recording: any operation on it is refused by the weight's name."""

    def __init__(self, name: str, value: Tensor):
        self._name, self.shape, self.ndim, self.dtype, self.device = name, value.shape, value.ndim, value.dtype, value.device

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


class Outer(NamedTuple):
    """Gradients `G_s = Σ_p left_{s,p}ᵀ right_{s,p}` of a matrix, P positions a token: `[B, H, n·P, d_in]`, `[B, H, n·P, d_out]`."""

    left: Tensor
    right: Tensor
    positions: int


class Direct(NamedTuple):
    """Per-token gradients of a vector (or of any weight used as one), `[B, H, n, d]`."""

    value: Tensor


class Site(NamedTuple):
    """One use of a fast weight: the input of the primitive, its output, and the weights it served."""

    weight: str | None
    bias: str | None
    input: Tensor | None
    transpose: bool
    scale: bool


class Record(FastWeights):
    """Plain weights that remember, at each use, what a per-token gradient is made of.

    Args:
        probes: zeros added to the outputs in order, so that `torch.func.vjp` can ask for δ. None: the outputs themselves are what
            `torch.autograd.grad` differentiates by.
    """

    factored = True

    def __init__(
        self, fast: Mapping[str, Tensor], slow: Mapping[str, Tensor], operand: torch.dtype, probes: Iterable[Tensor | float] | None = None
    ):
        super().__init__(fast, slow, operand)
        self.probes: Iterator[Tensor | float] | None = None if probes is None else iter(probes)
        self.sites: list[Site] = []
        self.outputs: list[Tensor] = []

    def __getitem__(self, name: str) -> Any:
        return OpaqueWeight(name, self._value(name)) if name in self._fast else self._value(name)

    def _site(
        self, z: Tensor, weight: str | None, bias: str | None, x: Tensor | None, transpose: bool = False, scale: bool = False
    ) -> Tensor:
        weight = weight if weight in self._fast else None
        bias = bias if bias in self._fast else None
        if weight is None and bias is None:
            return z
        if self.probes is not None:
            z = z + next(self.probes)
        elif not z.requires_grad:
            z = z.detach().requires_grad_()
        self.sites.append(Site(weight, bias, x if weight else None, transpose, scale))
        self.outputs.append(z)
        return z

    def linear(self, x: Tensor, weight: str, bias: str | None = None, *, transpose: bool = False) -> Tensor:
        return self._site(super().linear(x, weight, bias, transpose=transpose), weight, bias, x, transpose=transpose)

    def bias(self, x: Tensor, bias: str) -> Tensor:
        return self._site(super().bias(x, bias), None, bias, None)

    def scale(self, x: Tensor, scale: str) -> Tensor:
        return self._site(super().scale(x, scale), scale, None, x, scale=True)

    def embedding(self, index: Tensor, weight: str) -> Tensor:
        z = super().embedding(index, weight)
        return self._site(z, weight, None, F.one_hot(index, self._value(weight).shape[2]).to(z.dtype)) if weight in self._fast else z

    def gradients(self, deltas: Sequence[Tensor]) -> PerTokenGradients:
        """Per-token gradients from `∂Σℓ/∂output`, one per site."""
        return PerTokenGradients(self.sites, deltas, self._operand)


class PerTokenGradients:
    """`G_s` of every fast weight and token s, in factored form.

    `paired` names the weight and bias that were only ever used together: both then share one product, with `q·a + 1` for `q·a`.
    """

    def __init__(self, sites: Sequence[Site], deltas: Sequence[Tensor], operand: torch.dtype):
        self.terms: dict[str, list[Outer | Direct]] = {}
        self._operand = operand
        for site, delta in zip(sites, deltas, strict=True):
            inner = tuple(range(3, delta.ndim - 1))  # positions inside a token
            if site.weight and site.input is not None:
                if site.scale:
                    product = site.input * delta
                    term: Outer | Direct = Direct(product.sum(inner) if inner else product)
                else:
                    pair = (site.input.flatten(2, -2), delta.flatten(2, -2))
                    left, right = pair[::-1] if site.transpose else pair
                    term = Outer(left, right, left.shape[2] // delta.shape[2])
                self.terms.setdefault(site.weight, []).append(term)
            if site.bias:
                self.terms.setdefault(site.bias, []).append(Direct(delta.sum(inner) if inner else delta))
        uses = [(site.weight, site.bias) for site in sites if not site.scale and not site.transpose]
        count = {name: len(terms) for name, terms in self.terms.items()}
        self.paired = {(w, b) for w, b in uses if w and b and count[w] == count[b] == 1}

    def weighted_sum(self, name: str, factor: Tensor, shape: Sequence[int]) -> Tensor:
        """`Σ_s factor_s G_s` for one weight, `[B, H, *shape]`; factor `[B, H, n]`."""
        total: Tensor | None = None
        for term in self.terms.get(name, ()):
            if isinstance(term, Direct):
                part = (factor.unsqueeze(-2) @ term.value).view(*factor.shape[:2], *shape)
            else:
                spread = factor if term.positions == 1 else factor.repeat_interleave(term.positions, -1)
                part = matmul((term.left * spread.unsqueeze(-1)).mT, term.right, self._operand).view(*term.left.shape[:2], *shape)
            total = part if total is None else total + part
        return factor.new_zeros(*factor.shape[:2], *shape) if total is None else total

    def factors(self, name: str) -> tuple[Tensor, Tensor] | None:
        """`(a, δ)` with `G_s = a_sᵀ δ_s`, `[B, H, n, d_in]` and `[B, H, n, d_out]`, if the matrix has one use a token."""
        terms = self.terms.get(name, [])
        if len(terms) != 1 or not isinstance(terms[0], Outer) or terms[0].positions != 1:
            return None
        return terms[0].left, terms[0].right

    def gram(self) -> Tensor:
        """`⟨G_s, G_r⟩` over all fast weights, `[B, H, n, n]`: `Σ (a_s·a_r)(δ_s·δ_r)`, no gradient is formed."""
        total: Tensor | None = None
        for terms in self.terms.values():
            for one in terms:
                for other in terms:
                    if isinstance(one, Direct) and isinstance(other, Direct):
                        part = one.value @ other.value.mT
                    else:
                        assert isinstance(one, Outer)
                        assert isinstance(other, Outer)
                        part = (one.left @ other.left.mT) * (one.right @ other.right.mT)
                        part = part.unflatten(-1, (-1, other.positions)).sum(-1).unflatten(-2, (-1, one.positions)).sum(-2)
                    total = part if total is None else total + part
        assert total is not None
        return total

    def inner(self, weights: Tensors) -> Tensor:
        """`⟨W, G_s⟩` over all fast weights, `[B, H, n]`."""
        total: Tensor | None = None
        for name, terms in self.terms.items():
            for term in terms:
                if isinstance(term, Direct):
                    part = (term.value * weights[name].flatten(2).unsqueeze(2)).sum(-1)
                else:
                    part = ((term.left @ weights[name].view(*term.left.shape[:2], term.left.shape[-1], -1)) * term.right).sum(-1)
                    part = part.unflatten(-1, (-1, term.positions)).sum(-1)
                total = part if total is None else total + part
        assert total is not None
        return total

    def mixed(self, name: str, mix: Tensor) -> Tensor | None:
        """`Σ_s mix_ts G_s` of a vector, one per query: `[B, H, m, d]`; None if the weight was not used."""
        parts = [mix @ term.value for term in self.terms.get(name, ()) if isinstance(term, Direct)]
        return sum(parts[1:], parts[0]) if parts else None

    def product(self, name: str, x: Tensor, mix: Tensor, transpose: bool, plus_one: bool) -> Tensor | None:
        """`Σ_s mix_ts x_t G_s` of a matrix, `x` `[B, H, m·P, d]`, mix `[B, H, m, n]`; with `plus_one` the paired bias is included."""
        total: Tensor | None = None
        queries = x.shape[2] // mix.shape[-2]
        for term in self.terms.get(name, ()):
            assert isinstance(term, Outer)
            left, right = (term.right, term.left) if transpose else (term.left, term.right)
            scores = matmul(x, left.mT, self._operand)
            if plus_one:
                scores = scores + 1
            if queries == term.positions == 1:
                scores = scores * mix
            else:
                grid = scores.unflatten(-1, (-1, term.positions)).unflatten(2, (-1, queries))  # [B, H, m, P', n, P]
                scores = (grid * mix[:, :, :, None, :, None]).flatten(4).flatten(2, 3)
            part = matmul(scores, right, self._operand)
            total = part if total is None else total + part
        return total


class ReadRows(FastWeights):
    """Weights that differ from query to query: `W_t = Σ_B rows_B(t) · B − Σ_s mix_ts G_s`, never materialised.

    Args:
        bases: (row `[B, H, m]` or None for ones, weights by name) of each base.
        mix: `[B, H, m, n]`, η included.
        gradients: what `Record` found at the anchor.
        slow, operand: as in `FastWeights`.
    """

    factored = True

    def __init__(
        self,
        bases: Sequence[tuple[Tensor | None, Tensors]],
        mix: Tensor,
        gradients: PerTokenGradients,
        slow: Mapping[str, Tensor],
        operand: torch.dtype,
    ):
        super().__init__(bases[0][1], slow, operand)
        self.bases, self.mix, self.gradients = bases, mix, gradients
        self.parts = [FastWeights(weights, slow, operand) for _, weights in bases]

    def __getitem__(self, name: str) -> Any:
        return OpaqueWeight(name, self._value(name)) if name in self._fast else self._value(name)

    def _combine(self, parts: Sequence[Tensor]) -> Tensor:
        """`Σ_B rows_B(t) part_B` over parts `[B, H, m, ..., d]`."""
        total: Tensor | None = None
        for (row, _), part in zip(self.bases, parts, strict=True):
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
        paired = not transpose and (weight, bias) in self.gradients.paired
        z = self._combine([part.linear(x, weight, bias if paired else None, transpose=transpose) for part in self.parts])
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
