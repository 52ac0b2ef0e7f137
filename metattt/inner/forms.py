"""One compute chunk in three exact forms: gradients at the anchor, the rows that queries read, and the tensors carried on.

| form | how |
|---|---|
| `primal` | per-token gradients and per-token weights, token by token: the oracle |
| `dual` | one backward pass gives every token's output gradients; queries read through matmuls, no per-token weight exists |
| `summed` | the gradient of a weighted sum of losses: for reads that need no per-token weights; any function of the weights |
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from metattt.inner.accessors import PerTokenGradients, ReadRows, Record, Site
from metattt.inner.gradients import functional, vjp
from metattt.inner.mixing import MixedGradients
from metattt.learners.base import Learner
from metattt.learners.fast_weights import FastWeights, matmul
from metattt.optimizers.base import Coefficients, Gates, InnerOptimizer, clip_factor
from metattt.state import Tensors
from metattt.tasks.base import Task

Carry = dict[str, Tensors]


class Tokens(NamedTuple):
    """What the inner loop reads: views `[B, H, T, ·]` and gates `[B, H, T]`."""

    k: Tensor
    v: Tensor
    q: Tensor
    eta: Tensor
    alpha: Tensor | None = None
    beta: Tensor | None = None
    kappa: Tensor | None = None
    rates: Tensor | None = None

    def split(self, lengths: Sequence[int]) -> list[Tokens]:
        """Consecutive pieces. One split for all, since a slice per piece would make the backward pass quadratic in T."""
        parts = [[None] * len(lengths) if x is None else x.split(list(lengths), dim=2) for x in self]
        return [Tokens(*piece) for piece in zip(*parts, strict=True)]

    def to(self, dtype: torch.dtype) -> Tokens:
        return self.map(lambda x: x.to(dtype))

    def map(self, function: Callable[[Tensor], Tensor]) -> Tokens:
        """Applies `function` to every tensor at hand."""
        return Tokens(*(None if x is None else function(x) for x in self))  # type: ignore[arg-type]

    @property
    def gates(self) -> Gates:
        return Gates(self.eta, self.alpha, self.beta, self.kappa, self.rates)

    def rated(self, factor: Tensor, index: int) -> Tensor:
        """`factor` `[B, H, n]` of the tokens' gradients as it is for fast weight number `index`."""
        return factor if self.rates is None else factor * self.rates[..., index]


@dataclass
class Forms:
    """The three parts at work on one compute chunk.

    Args:
        form: `primal`, `dual` or `summed`.
        slow: the learner's outer-loop weights, `[H, *shape]`.
        operand: type to which matmul operands are rounded.
        shapes: output shapes of the learner's primitives by input shape, kept between calls.
    """

    task: Task
    learner: Learner
    optimizer: InnerOptimizer
    form: str
    slow: Tensors
    operand: torch.dtype
    shapes: dict[tuple[object, ...], list[torch.Size]] = field(default_factory=dict)

    @property
    def solves(self) -> bool:
        """Whether an online rule is a linear system: a linear learner with squared loss, every gradient taken at the newest weights."""
        rule = self.optimizer
        closed = self.learner.linear_map is not None and self.task.squared_error
        return self.form == "dual" and rule.anchor == "online" and closed and not rule.accumulates and rule.steps == 1

    def read(self, weights: Tensors, q: Tensor) -> Tensor:
        """Queries `[B, H, n, d]` answered by one set of weights per sequence."""
        return self.learner.predict(FastWeights(weights, self.slow, self.operand), q)

    def chunk(self, tokens: Tokens, carry: Carry, phase: int | Tensor, read: str | None) -> tuple[Tensor | None, Carry]:
        """Predictions `[B, H, n, d]` for the rows `read` (None: no rows are read), and the carry after the tokens."""
        rule = self.optimizer
        carry = rule.observe(carry, tokens.gates)
        anchor = self._anchor(tokens, carry, phase)
        if self.form == "primal":
            return self._primal(tokens, anchor, carry, phase, read)
        how = rule.coefficients(tokens.gates, phase, carry, read)  # type: ignore[arg-type]
        if self.form == "summed":
            return None, carry | self._summed(tokens, anchor, carry, how)
        if self.solves:
            gradients = self._solve(tokens, carry, phase)
        elif self.learner.mixes_tokens:
            gradients = self._record_mixed(anchor, tokens)
        else:
            gradients = self._record(anchor, tokens)
        y = None
        if read is not None:
            if rule.max_norm is not None:
                how = self._clipped(how, gradients, tokens.eta, carry.get("update"), read, rule.max_norm)
            assert how.mix is not None
            bases = [(row, carry[base]) for base, row in how.rows.items()]
            y = self.learner.predict(ReadRows(bases, how.mix, gradients, self.slow, self.operand), tokens.q)
        moved = {
            base: {
                name: _combine(carry, factors, name, gradients.weighted_sum(name, tokens.rated(weight, i), value.shape[2:]))
                for i, (name, value) in enumerate(anchor.items())
            }
            for base, (factors, weight) in how.carry.items()
        }
        if rule.in_token_space(phase, tokens.k.shape[2], carry) and not self.learner.mixes_tokens:
            moved["factors"] = self._factors(gradients, tokens, anchor)
        return y, carry | moved

    def _factors(self, gradients: PerTokenGradients, tokens: Tokens, anchor: Tensors) -> Tensors:
        """`−Σ_s η_s G_s` of a whole mini-batch as products of `[B, H, n, d_in]` and `[B, H, n, d_out]`, where these are smaller."""
        found = {}
        for i, (name, weight) in enumerate(anchor.items()):
            pair = gradients.factors(name)
            if pair is not None and tokens.k.shape[2] < min(weight.shape[2:]):
                found[f"{name}.left"] = -pair[0] * tokens.rated(tokens.eta, i).unsqueeze(-1)
                found[f"{name}.right"] = pair[1]
        return found

    def _clipped(
        self, how: Coefficients, gradients: PerTokenGradients, eta: Tensor, update: Tensors | None, read: str, max_norm: float
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

    def _anchor(self, tokens: Tokens, carry: Carry, phase: int | Tensor) -> Tensors:
        """The weights at which the chunk's gradients are taken."""
        if self.optimizer.anchor != "online":
            return carry["anchor" if self.optimizer.anchor == "batch" else "commit"]
        weights = self.optimizer.current(carry, phase)
        if self.optimizer.gradient_at == "decayed" and tokens.alpha is not None and not self.solves:
            return {name: spread(tokens.alpha[:, :, 0], x) * x for name, x in weights.items()}
        return weights

    def losses(self, weights: FastWeights, k: Tensor, v: Tensor) -> Tensor:
        """ℓ per token, `[B, H, T]`."""
        return self.task.loss(self.learner.predict(weights, k), v)

    def _record(self, anchor: Tensors, tokens: Tokens) -> PerTokenGradients:
        """Per-token gradients in factored form, from one backward pass of the summed loss."""
        k, v = tokens.k, tokens.v
        if functional():
            probes = [k.new_zeros(shape) for shape in self._shapes(anchor, k, v)]
            sites: list[Site] = []

            def probed(*probes: Tensor) -> tuple[Tensor, list[Tensor]]:
                record = Record(anchor, self.slow, self.operand, probes)
                total = self.losses(record, k, v).sum()
                sites[:] = record.sites
                return total, [site.input for site in record.sites if site.input is not None]

            total, pull, inputs = torch.func.vjp(probed, *probes, has_aux=True)  # type: ignore[misc]
            rest = iter(inputs)
            sites = [site if site.input is None else site._replace(input=next(rest)) for site in sites]
            return PerTokenGradients(sites, pull(torch.ones_like(total)), self.operand)
        keep = torch.is_grad_enabled()
        with torch.enable_grad():
            record = Record(anchor, self.slow, self.operand)
            total = self.losses(record, k, v).sum()
            deltas = torch.autograd.grad(total, record.outputs, create_graph=keep, allow_unused=True, materialize_grads=True)
        if not keep:
            record.sites = [site if site.input is None else site._replace(input=site.input.detach()) for site in record.sites]
        return record.gradients(deltas)

    def _solve(self, tokens: Tokens, carry: Carry, phase: int | Tensor) -> PerTokenGradients:
        """Online gradients of a linear learner, all tokens at once: with errors `E_s = k_s W_{s−1} − v_s` and `G_s = k_sᵀ E_s`,

        `(I + T) E = R`, `T_sr = m_s mix_{s−1,r} (k_s·k_r)`, `R_s = m_s k_s (Σ_B rows_B(s−1) B) − v_s`,
        with m = α for gradients at `α_s W_{s−1}` and 1 otherwise: the UT
        transform of DeltaNet (arXiv 2406.06484).
        """
        assert self.learner.linear_map is not None
        weight, bias = self.learner.linear_map
        how = self.optimizer.coefficients(tokens.gates, phase, carry, "exclusive")
        k = tokens.k
        right = torch.zeros_like(tokens.v)
        for base, row in how.rows.items():
            z = FastWeights(carry[base], {}, self.operand).linear(k, weight, bias)
            right = right + (z if row is None else row.unsqueeze(-1) * z)
        gram = matmul(k, k.mT, self.operand) + (0 if bias is None else 1)
        assert how.mix is not None
        system = how.mix * gram
        if self.optimizer.gradient_at == "decayed" and tokens.alpha is not None:
            system, right = system * tokens.alpha.unsqueeze(-1), right * tokens.alpha.unsqueeze(-1)
        system = system + torch.eye(k.shape[2], dtype=k.dtype, device=k.device)
        errors = torch.linalg.solve_triangular(system, right - tokens.v, upper=False, unitriangular=True)
        return PerTokenGradients([Site(weight, bias, k, False, False)], [errors], self.operand)

    def _record_mixed(self, anchor: Tensors, tokens: Tokens) -> MixedGradients:
        """The same for learners that mix tokens: one backward pass per loss."""
        k, v = tokens.k, tokens.v
        count = k.shape[2]
        if functional():
            probes = [k.new_zeros(shape) for shape in self._shapes(anchor, k, v)]
            sites: list[Site] = []

            def probed(*probes: Tensor) -> tuple[Tensor, list[Tensor]]:
                record = Record(anchor, self.slow, self.operand, probes)
                losses = self.losses(record, k, v)
                sites[:] = record.sites
                return losses, [site.input for site in record.sites if site.input is not None]

            losses, pull, inputs = torch.func.vjp(probed, *probes, has_aux=True)  # type: ignore[misc]
            rest = iter(inputs)
            sites = [site if site.input is None else site._replace(input=next(rest)) for site in sites]
            each = [pull(_only(losses, s)) for s in range(count)]
            return MixedGradients(sites, [torch.stack(column) for column in zip(*each, strict=True)], self.operand)
        keep = torch.is_grad_enabled()
        options = {"create_graph": keep, "retain_graph": True, "allow_unused": True, "materialize_grads": True}
        with torch.enable_grad():
            record = Record(anchor, self.slow, self.operand)
            losses = self.losses(record, k, v)
            each = [torch.autograd.grad(losses, record.outputs, _only(losses, s), **options) for s in range(count)]
        if not keep:
            record.sites = [site if site.input is None else site._replace(input=site.input.detach()) for site in record.sites]
        return MixedGradients(record.sites, [torch.stack(column) for column in zip(*each, strict=True)], self.operand)

    def _shapes(self, anchor: Tensors, k: Tensor, v: Tensor) -> list[torch.Size]:
        """Output shapes of the primitives, since probes must exist first. Cached, but for the compiler, which folds the pass away."""
        key = (k.shape, v.shape, k.dtype, self.operand)
        if torch.compiler.is_compiling() or key not in self.shapes:
            with torch.no_grad():
                record = Record(anchor, self.slow, self.operand, probes=itertools.repeat(0.0))
                self.losses(record, k, v)
            shapes = [z.shape for z in record.outputs]
            if torch.compiler.is_compiling():
                return shapes
            self.shapes[key] = shapes
        return self.shapes[key]

    def _summed(self, tokens: Tokens, anchor: Tensors, carry: Carry, how: Coefficients) -> Carry:
        names = list(anchor)

        def losses(*weights: Tensor) -> Tensor:
            return self.losses(FastWeights(dict(zip(names, weights, strict=True)), self.slow, self.operand), tokens.k, tokens.v)

        weights, count = [anchor[name] for name in names], len(names)
        if tokens.rates is None:
            found = vjp(losses, weights, [weight for _, weight in how.carry.values()])
        else:  # a backward pass per weight, each with the weight's own step sizes
            each = vjp(losses, weights, [tokens.rated(weight, i) for _, weight in how.carry.values() for i in range(count)])
            found = [[each[start + i][i] for i in range(count)] for start in range(0, len(each), count)]
        return {
            base: {name: _combine(carry, factors, name, g) for name, g in zip(names, sums, strict=True)}
            for (base, (factors, _)), sums in zip(how.carry.items(), found, strict=True)
        }

    def _primal(self, tokens: Tokens, anchor: Tensors, carry: Carry, phase: int | Tensor, read: str | None) -> tuple[Tensor | None, Carry]:
        """The recurrences of the rule, written out: `S_t = β_t S_{t−1} − η_t G_t`, `W_t = α_t W_{t−1} + κ_t S_t`."""
        rule, names = self.optimizer, list(anchor)
        batch, heads, count = tokens.eta.shape

        def alone(x: Tensor) -> Tensor:
            """Every token as a sequence of its own: `[B, H, n, d]` to `[B·n, H, 1, d]`."""
            return x.transpose(1, 2).flatten(0, 1).unsqueeze(2)

        def losses(*weights: Tensor) -> Tensor:
            return self.losses(
                FastWeights(dict(zip(names, weights, strict=True)), self.slow, self.operand), alone(tokens.k), alone(tokens.v)
            )

        copies = [anchor[name].unsqueeze(1).expand(-1, count, *anchor[name].shape[1:]).flatten(0, 1) for name in names]
        ones = tokens.eta.new_ones(batch * count, heads, 1)
        found = vjp(losses, copies, [ones])[0]
        gradients = {name: g.unflatten(0, (batch, count)) for name, g in zip(names, found, strict=True)}  # [B, n, H, *shape]
        seen = []
        for t in range(count):
            step = {name: -spread(tokens.rated(tokens.eta, i)[:, :, t], g[:, t]) * g[:, t] for i, (name, g) in enumerate(gradients.items())}
            before = rule.current(carry, phase + t) if read == "exclusive" or "update" not in rule.bases else {}
            if "update" in rule.bases:
                carry = carry | {"update": _add(carry.get("update"), step)}
            else:
                gates = [None if gate is None else gate[:, :, t] for gate in (tokens.alpha, tokens.beta, tokens.kappa)]
                alpha, beta, kappa = gates
                if beta is not None:
                    memory = _add(_scaled(carry.get("momentum"), beta), step)
                    step = _add(_scaled(memory, beta), step) if rule.nesterov else memory
                    carry = carry | {"momentum": memory}
                moved = _add(_scaled(before, alpha), _scaled(step, kappa))
                if rule.pull and alpha is not None:
                    moved = _add(_scaled(carry["origin"], 1 - alpha), moved)
                carry = carry | {"weights": moved}
            if read is not None:
                seen.append(before if read == "exclusive" else rule.current(carry, phase + t + 1))
        if read is None:
            return None, carry
        rows = {name: torch.stack([w[name] for w in seen], dim=1).flatten(0, 1) for name in names}
        y = self.learner.predict(FastWeights(rows, self.slow, self.operand), alone(tokens.q))
        return y.squeeze(2).unflatten(0, (batch, count)).transpose(1, 2), carry


def _only(losses: Tensor, s: int) -> Tensor:
    """The cotangent that picks the losses of token s."""
    cotangent = torch.zeros_like(losses)
    cotangent[:, :, s] = 1
    return cotangent


def spread(factor: Tensor, like: Tensor) -> Tensor:
    """`[B]` or `[B, H]` with trailing axes, to broadcast against `[B, H, *shape]`."""
    return factor[(...,) + (None,) * (like.ndim - factor.ndim)]


def _scaled(weights: Tensors | None, factor: Tensor | None) -> Tensors | None:
    if weights is None or factor is None:
        return weights
    return {name: spread(factor, x) * x for name, x in weights.items()}


def _add(a: Tensors | None, b: Tensors | None) -> Tensors:
    assert b is not None
    return b if a is None else {name: a[name] + x for name, x in b.items()}


def _combine(carry: Carry, factors: dict[str, Tensor | None], name: str, moved: Tensor) -> Tensor:
    """`Σ_A factor_A · A − moved` for one weight."""
    total = -moved
    for base, factor in factors.items():
        value = carry[base][name]
        total = total + (value if factor is None else spread(factor, value) * value)
    return total
