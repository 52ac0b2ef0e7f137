"""The default form: one backward pass gives every token's output gradients, and queries read through matmuls."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from metattt.inner.parts import Parts
from metattt.inner.tokens import Tokens, rated
from metattt.learners.fast_weights import PerTokenWeights, RecordingWeights, WeightUse
from metattt.memory import Memory
from metattt.modules import expand_like, for_probes, needs_probes
from metattt.ops.chunk import matmul
from metattt.ops.linear_rule import Coefficients, clip_factor
from metattt.state import Tensors


def chunk(
    loop: Parts, tokens: Tokens, memory: Memory, phase: int | Tensor, read: str | None
) -> tuple[Tensor | None, Memory]:
    """See `FORMS`."""
    anchor = loop.anchor(tokens, memory, phase)
    uses, deltas = record(loop, anchor, tokens)
    gradients = PerTokenGradients(uses, deltas[0], loop.matmul_dtype, loop.learner.step_scales)
    return finish(loop, tokens, memory, phase, read, anchor, gradients)


def record(
    loop: Parts, anchor: Tensors, tokens: Tokens, by_token: bool = False
) -> tuple[list[WeightUse], list[Sequence[Tensor]]]:
    """The uses of the fast weights at the anchor, and the derivatives of the sum of the losses (or of each token's
    loss) with respect to their outputs.

    `torch.func.vjp` differentiates by probes that are added to the outputs, `torch.autograd.grad` by the outputs
    themselves. With `layer.outer=first_order` the inputs and the derivatives are constants.
    """
    k, v, constant = tokens.views.k, tokens.views.v, loop.plan.outer == "first_order"
    if needs_probes():
        with for_probes():
            uses, deltas = _probed(loop, anchor, k, v, by_token)
        return (_constant(uses), [[x.detach() for x in row] for row in deltas]) if constant else (uses, deltas)
    keep = torch.is_grad_enabled() and not constant
    with torch.enable_grad():
        weights = RecordingWeights(anchor, loop.slow, loop.matmul_dtype)
        losses = loop.losses(weights, k, v)
        uses, outputs = list(weights.uses), list(weights.outputs)  # a checkpoint in the learner runs it again
        wanted = losses.sum((0, 1)).unbind() if by_token else [losses.sum()]
        grad = partial(torch.autograd.grad, create_graph=keep, retain_graph=keep or by_token, allow_unused=True)
        found: list[Sequence[Tensor]] = []
        for total in wanted:
            found.append(grad(total, outputs, materialize_grads=True))
    return uses if keep else _constant(uses), found


def _constant(uses: list[WeightUse]) -> list[WeightUse]:
    return [use if use.input is None else use._replace(input=use.input.detach()) for use in uses]


def _probed(
    loop: Parts, anchor: Tensors, k: Tensor, v: Tensor, by_token: bool
) -> tuple[list[WeightUse], list[Sequence[Tensor]]]:
    uses: list[WeightUse] = []

    def recorded(*probes: Tensor) -> tuple[Tensor, list[Tensor]]:
        weights = RecordingWeights(anchor, loop.slow, loop.matmul_dtype, probes)
        losses = loop.losses(weights, k, v)
        uses[:] = weights.uses
        inputs = [use.input for use in weights.uses if use.input is not None]
        return losses.sum((0, 1)) if by_token else losses.sum().view(1), inputs

    probes = [k.new_zeros(shape) for shape in probe_shapes(loop, anchor, k, v)]
    wanted, pull, inputs = torch.func.vjp(recorded, *probes, has_aux=True)  # type: ignore[misc]
    rest = iter(inputs)
    uses = [use if use.input is None else use._replace(input=next(rest)) for use in uses]
    return uses, [pull(row) for row in torch.eye(len(wanted), dtype=wanted.dtype, device=wanted.device)]


def probe_shapes(loop: Parts, anchor: Tensors, k: Tensor, v: Tensor) -> list[torch.Size]:
    """Output shapes of the primitives, which probes need. Cached, except under the compiler, which removes this
    pass."""
    key = (k.shape, v.shape, k.dtype, loop.matmul_dtype)
    if torch.compiler.is_compiling() or key not in loop.plan.shapes:
        with torch.no_grad():
            weights = RecordingWeights(anchor, loop.slow, loop.matmul_dtype, probes=itertools.repeat(0.0))
            loop.losses(weights, k, v)
        shapes = [z.shape for z in weights.outputs]
        if torch.compiler.is_compiling():
            return shapes
        loop.plan.shapes[key] = shapes
    return loop.plan.shapes[key]


def finish(
    loop: Parts,
    tokens: Tokens,
    memory: Memory,
    phase: int | Tensor,
    read: str | None,
    anchor: Tensors,
    gradients: PerTokenGradients,
    how: Coefficients | None = None,
) -> tuple[Tensor | None, Memory]:
    """Predictions and the new memory from the gradients of the chunk's tokens; `how`: the rule's coefficients, if they
    are already computed.

    A pair that several tokens share has one gradient; the factors of these tokens are added.
    """
    rule, band, y = loop.rule, None, None
    if how is None:
        how = rule.coefficients(tokens.gates, phase, memory, read)
    pairs = tokens.gates.eta.shape[2] // tokens.views.q.shape[2]
    if pairs > 1:
        band = band_of(tokens)
    if read is not None:
        if rule.max_norm is not None:
            how = _clipped(how, gradients, tokens.gates.eta, memory.get("update"), read, rule.max_norm)
        if pairs > 1:
            how = _of_tokens(how, pairs, read)
        assert how.mix is not None
        mix = how.mix if band is None else how.mix @ band
        terms = list(zip(how.rows.values(), map(memory.__getitem__, how.rows), strict=True))
        y = loop.learner.predict(PerTokenWeights(terms, mix, gradients, loop.slow, loop.matmul_dtype), tokens.views.q)
    after = dict(memory)
    for base, (factors, weight) in how.advance.items():
        sums: Tensors = {}
        for i, (name, value) in enumerate(anchor.items()):
            factor = weight if tokens.gates.weight_lr is None else rated(weight, tokens.gates.weight_lr, i)
            factor = factor if band is None else factor @ band
            sums[name] = gradients.weighted_sum(name, factor, value.shape[2:])
        after[base] = combine(memory, factors, sums)
    return y, after


def band_of(tokens: Tokens) -> Tensor | None:
    """`[T·n, T + n − 1]`, 1 where a pair of a token is a row of k and v; None: every pair is a row of its own."""
    count, pairs = tokens.views.k.shape[2], tokens.gates.eta.shape[2]
    if count == pairs:
        return None
    place, size = torch.arange(pairs, device=tokens.views.k.device), pairs // tokens.views.q.shape[2]
    row = place // size + place % size
    return (row.unsqueeze(1) == torch.arange(count, device=row.device)).to(tokens.gates.eta.dtype)


def _of_tokens(how: Coefficients, pairs: int, read: str) -> Coefficients:
    """The rows that queries read, where a token has several pairs: after the last of them, or before the first."""
    start = pairs - 1 if read == "inclusive" else 0
    rows = {base: row if row is None else row[..., start::pairs] for base, row in how.rows.items()}
    assert how.mix is not None
    return how._replace(rows=rows, mix=how.mix[..., start::pairs, :])


def combine(memory: Memory, factors: dict[str, Tensor | None], moved: Tensors) -> Tensors:
    """`Σ_A factor_A · A − moved` for every weight."""
    total: Tensors = {}
    for name, x in moved.items():
        total[name] = -x
        for base, factor in factors.items():
            value = memory[base][name]
            total[name] = total[name] + (value if factor is None else expand_like(factor, value) * value)
    return total


def _clipped(
    how: Coefficients, gradients: PerTokenGradients, eta: Tensor, update: Tensors | None, read: str, max_norm: float
) -> Coefficients:
    """Rows scaled by `min(1, c/‖M_t‖)`, where `‖M − Σ_{s≤t} η_s G_s‖²` needs inner products of the gradients only."""
    gram = gradients.gram() * eta.unsqueeze(-1) * eta.unsqueeze(-2)
    squared = gram.cumsum(-1).cumsum(-2).diagonal(dim1=-2, dim2=-1)
    start = torch.zeros_like(squared[..., :1])
    if update is not None:
        start = torch.stack([x.flatten(2).square().sum(-1) for x in update.values()]).sum(0).unsqueeze(-1)
        squared = squared + start - 2 * (eta * gradients.inner(update)).cumsum(-1)
    if read == "exclusive":
        squared = torch.cat([start, squared[..., :-1]], dim=-1)
    factor = clip_factor(squared, max_norm)
    assert how.mix is not None
    rows = {base: row if row is None else row * factor for base, row in how.rows.items()}
    return how._replace(rows=rows, mix=how.mix * factor.unsqueeze(-1))


class Outer(NamedTuple):
    """Gradients `G_s = Σ_p left_{s,p}ᵀ right_{s,p}` of a matrix, P positions a token: `[B, H, n·P, d_in]`,
    `[B, H, n·P, d_out]`."""

    left: Tensor
    right: Tensor
    positions: int


class PerTokenGradients:
    """`G_s` of every fast weight and token s, in factored form.

    `paired` names the weight and bias that were only ever used together, and whether transposed: both then share one
    product, with `q·a + 1` for `q·a`. `scales` multiplies the gradients of a weight by a factor of its own
    (`Learner.step_scale`).
    """

    def __init__(
        self,
        uses: Sequence[WeightUse],
        deltas: Sequence[Tensor],
        matmul_dtype: torch.dtype,
        scales: Mapping[str, float],
    ):
        self.terms: dict[str, list[Outer | Tensor]] = {}  # a tensor [B, H, n, d]: of a weight used as a vector
        self.paired: set[tuple[str, str, bool]] = set()
        self._matmul_dtype = matmul_dtype
        for use, delta in zip(uses, deltas, strict=True):
            weight, bias, inputs, transpose, scale = use
            inner = tuple(range(3, delta.ndim - 1))  # positions inside a token
            if weight and inputs is not None:
                moved = scales[weight] * delta if weight in scales else delta
                if scale:
                    product = inputs * moved
                    term: Outer | Tensor = product.sum(inner) if inner else product
                else:
                    pair = (inputs.flatten(2, -2), moved.flatten(2, -2))
                    left, right = pair[::-1] if transpose else pair
                    term = Outer(left, right, left.shape[2] // delta.shape[2])
                self.terms.setdefault(weight, []).append(term)
            if bias:
                moved = scales[bias] * delta if bias in scales else delta
                self.terms.setdefault(bias, []).append(moved.sum(inner) if inner else moved)
            if weight and bias and not scale and scales.get(weight) == scales.get(bias):
                self.paired.add((weight, bias, transpose))
        for used in list(self.paired):
            if len(self.terms[used[0]]) != 1 or len(self.terms[used[1]]) != 1:
                self.paired.discard(used)

    def weighted_sum(self, name: str, factor: Tensor, shape: Sequence[int]) -> Tensor:
        """`Σ_s factor_s G_s` for one weight, `[B, H, *shape]`; factor `[B, H, n]`."""
        total: Tensor | None = None
        for term in self.terms.get(name, ()):
            if isinstance(term, Tensor):
                part = (factor.unsqueeze(-2) @ term).view(*factor.shape[:2], *shape)
            else:
                each = factor if term.positions == 1 else factor.repeat_interleave(term.positions, -1)
                part = matmul((term.left * each.unsqueeze(-1)).mT, term.right, self._matmul_dtype)
                part = part.view(*term.left.shape[:2], *shape)
            total = part if total is None else total + part
        return factor.new_zeros(*factor.shape[:2], *shape) if total is None else total

    def gram(self) -> Tensor:
        """`⟨G_s, G_r⟩` over all fast weights, `[B, H, n, n]`: `Σ (a_s·a_r)(δ_s·δ_r)`, no gradient is formed."""
        total: Tensor | None = None
        for terms in self.terms.values():
            for one in terms:
                for other in terms:
                    if isinstance(one, Tensor) and isinstance(other, Tensor):
                        part = one @ other.mT
                    else:
                        assert isinstance(one, Outer)
                        assert isinstance(other, Outer)
                        part = (one.left @ other.left.mT) * (one.right @ other.right.mT)
                        part = (
                            part.unflatten(-1, (-1, other.positions)).sum(-1).unflatten(-2, (-1, one.positions)).sum(-2)
                        )
                    total = part if total is None else total + part
        assert total is not None
        return total

    def inner(self, weights: Tensors) -> Tensor:
        """`⟨W, G_s⟩` over all fast weights, `[B, H, n]`."""
        total: Tensor | None = None
        for name, terms in self.terms.items():
            for term in terms:
                if isinstance(term, Tensor):
                    part = (term * weights[name].flatten(2).unsqueeze(2)).sum(-1)
                else:
                    part = (
                        (term.left @ weights[name].view(*term.left.shape[:2], term.left.shape[-1], -1)) * term.right
                    ).sum(-1)
                    part = part.unflatten(-1, (-1, term.positions)).sum(-1)
                total = part if total is None else total + part
        assert total is not None
        return total

    def mixed(self, name: str, mix: Tensor) -> Tensor | None:
        """`Σ_s mix_ts G_s` of a vector, one per query: `[B, H, m, d]`; None if the weight was not used."""
        total: Tensor | None = None
        for term in self.terms.get(name, ()):
            if isinstance(term, Tensor):
                part = mix @ term
                total = part if total is None else total + part
        return total

    def product(self, name: str, x: Tensor, mix: Tensor, transpose: bool, plus_one: bool) -> Tensor | None:
        """`Σ_s mix_ts x_t G_s` of a matrix, `x` `[B, H, m·P, d]`, mix `[B, H, m, n]`; with `plus_one` the paired bias
        is included."""
        total: Tensor | None = None
        queries = x.shape[2] // mix.shape[-2]
        for term in self.terms.get(name, ()):
            assert isinstance(term, Outer)
            left, right = (term.right, term.left) if transpose else (term.left, term.right)
            scores = matmul(x, left.mT, self._matmul_dtype)
            if plus_one:
                scores = scores + 1
            if queries == term.positions == 1:
                scores = scores * mix
            else:
                grid = scores.unflatten(-1, (-1, term.positions)).unflatten(2, (-1, queries))  # [B, H, m, P', n, P]
                scores = (grid * mix[:, :, :, None, :, None]).flatten(4).flatten(2, 3)
            part = matmul(scores, right, self._matmul_dtype)
            total = part if total is None else total + part
        return total
