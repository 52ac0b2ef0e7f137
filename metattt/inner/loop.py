"""The inner loop: one learner trained along the sequence, in three exact forms.

| form | how |
|---|---|
| `primal` | per-token gradients and per-token weights, token by token: the oracle |
| `dual` | one backward pass gives every token's output gradients; queries read through matmuls, no per-token weight exists |
| `summed` | the gradient of a weighted sum of losses: for reads that need no per-token weights; any function of the weights |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from metattt.inner.accessors import PerTokenGradients, ReadRows, Record, Site
from metattt.inner.gradients import functional, in_transform, vjp
from metattt.inner.packing import Block, Frame
from metattt.inner.recompute import recompute
from metattt.learners.base import Learner
from metattt.learners.fast_weights import FastWeights, matmul
from metattt.optimizers.base import Coefficients, Gates, InnerOptimizer
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

    def split(self, lengths: Sequence[int]) -> list[Tokens]:
        """Consecutive pieces. One split for all, since a slice per piece would make the backward pass quadratic in T."""
        parts = [[None] * len(lengths) if x is None else x.split(list(lengths), dim=2) for x in self]
        return [Tokens(*piece) for piece in zip(*parts, strict=True)]

    def to(self, dtype: torch.dtype) -> Tokens:
        return Tokens(*(None if x is None else x.to(dtype) for x in self))

    @property
    def gates(self) -> Gates:
        return Gates(self.eta, self.alpha, self.beta, self.kappa)


def mask_gates(gates: Gates, live: Tensor | None) -> Gates:
    """Gates under which unfilled columns change nothing: η = 0, α = β = 1, κ = 0."""
    if live is None:
        return gates
    live = live.unsqueeze(1)
    general = any(gate is not None for gate in gates[1:])
    kappa = gates.kappa if gates.kappa is not None else torch.ones_like(gates.eta) if general else None
    return Gates(
        torch.where(live, gates.eta, 0),
        None if gates.alpha is None else torch.where(live, gates.alpha, 1),
        None if gates.beta is None else torch.where(live, gates.beta, 1),
        None if kappa is None else torch.where(live, kappa, 0),
    )


class InnerLoop(nn.Module):
    """Runs a learner through time. Holds no parameters but those of its three parts.

    Args:
        form: `primal`, `dual` or `summed`.
        group_size: mini-batches that are recomputed together in the backward pass; None takes √(T/b), 0 stores everything.
    """

    def __init__(self, task: Task, learner: Learner, optimizer: InnerOptimizer, form: str, group_size: int | None):
        super().__init__()
        self.task, self.learner, self.optimizer = task, learner, optimizer
        self.form, self.group_size = form, group_size
        self._probe_shapes: dict[tuple[object, ...], list[torch.Size]] = {}

    @property
    def replays(self) -> bool:
        """Whether an open mini-batch is carried as raw tokens and run again when it goes on."""
        rule = self.optimizer
        return rule.read != "final" and (self.learner.mixes_tokens or (rule.steps > 1 and rule.mini_batch_size > 1))

    @property
    def solves(self) -> bool:
        """Whether an online rule is a linear system: a linear learner with squared loss, every gradient taken at the newest weights."""
        rule = self.optimizer
        closed = self.learner.linear_map is not None and self.task.squared_error
        return self.form == "dual" and rule.anchor == "online" and closed and rule.token_steps() is None and rule.steps == 1

    def start(self, batch: int, dtype: torch.dtype) -> Carry:
        """W0 in every role that a fresh sequence carries."""
        weights = {name: value.to(dtype).expand(batch, *value.shape) for name, value in self.learner.init.items()}
        roles = [role for role in self.optimizer.bases if role in ("commit", "anchor")] or ["weights"]
        return {role: dict(weights) for role in roles}

    # -- through time ----------------------------------------------------------------------------------------------------------

    def run(self, tokens: Tokens, carry: Carry, frame: Frame, filled: Tensor, operand: torch.dtype) -> tuple[Tensor, Carry]:
        """All columns of a call.

        Args:
            tokens: views and gates by column.
            carry: weights by role and name.
            filled: `[B]` tokens of the open mini-batch after the call.
            operand: type of matmul operands.

        Returns:
            Predictions `[B, H, columns, d]` and the new carry.
        """
        if self.optimizer.read != "final":
            y, carry = self._scan(tokens, carry, frame.blocks, True, operand)
            assert y is not None
            return y, carry
        for step in range(self.optimizer.steps):
            _, carry = self._scan(tokens, carry, frame.blocks, False, operand)
            if step + 1 < self.optimizer.steps:  # the next pass takes its gradients where this one ended
                now = self.optimizer.current(carry, filled)
                carry = {role: now for role in carry if role not in ("update", "momentum", "weights")} or {"weights": now}
        weights = FastWeights(self.optimizer.current(carry, filled), self._slow(tokens.k), operand)
        return self.learner.predict(weights, tokens.q.to(tokens.eta.dtype)), carry

    def _scan(
        self, tokens: Tokens, carry: Carry, blocks: Sequence[Block], read: bool, operand: torch.dtype
    ) -> tuple[Tensor | None, Carry]:
        size = self.group_size if self.group_size is not None else max(1, round(math.sqrt(len(blocks))))
        if size == 0 or not torch.is_grad_enabled() or torch.compiler.is_compiling() or in_transform():
            return self(tokens, carry, blocks, read, operand)
        groups = [blocks[i : i + size] for i in range(0, len(blocks), size)]
        outputs = []
        for group, piece in zip(groups, tokens.split([sum(b.length for b in group) for group in groups]), strict=True):
            y, carry = self._recomputed(piece, carry, group, read, operand)
            outputs.append(y)
        return (torch.cat(outputs, dim=2) if read else None), carry

    def _recomputed(
        self, tokens: Tokens, carry: Carry, blocks: Sequence[Block], read: bool, operand: torch.dtype
    ) -> tuple[Tensor | None, Carry]:
        """`forward`, recomputed in the backward pass. Parameters travel as inputs, so that `functional_call` around us stays right."""
        parameters = dict(self.named_parameters())
        present = [x is not None for x in tokens]
        keys = [(role, name) for role, weights in carry.items() for name in weights]
        after: list[tuple[str, str]] = []

        def body(*tensors: Tensor) -> list[Tensor]:
            rest = iter(tensors)
            given = Tokens(*(next(rest) if here else None for here in present))  # type: ignore[arg-type]
            entering: Carry = {}
            for role, name in keys:
                entering.setdefault(role, {})[name] = next(rest)
            values = dict(zip(parameters, rest, strict=True))
            y, leaving = functional_call(self, values, (given, entering, blocks, read, operand))
            after[:] = [(role, name) for role, weights in leaving.items() for name in weights]
            return ([y] if read else []) + [leaving[role][name] for role, name in after]

        entering = [carry[role][name] for role, name in keys]
        outputs = iter(recompute(body, *(x for x in tokens if x is not None), *entering, *parameters.values()))
        y = next(outputs) if read else None
        leaving: Carry = {}
        for role, name in after:
            leaving.setdefault(role, {})[name] = next(outputs)
        return y, leaving

    def forward(
        self, tokens: Tokens, carry: Carry, blocks: Sequence[Block], read: bool, operand: torch.dtype
    ) -> tuple[Tensor | None, Carry]:
        """Consecutive blocks in a plain loop, with autocast off: `operand` says where rounding is allowed."""
        outputs = []
        with torch.autocast(tokens.k.device.type, enabled=False):
            tokens = tokens.to(tokens.eta.dtype)
            slow = self._slow(tokens.k)
            for block, piece in zip(blocks, tokens.split([b.length for b in blocks]), strict=True):
                y, carry = self._block(piece, carry, block, read, slow, operand)
                outputs.append(y)
            return (torch.cat(outputs, dim=2) if read else None), carry

    def _slow(self, like: Tensor) -> Tensors:
        return {name: value.to(like.dtype) for name, value in self.learner.slow.items()}

    # -- one mini-batch, or a part of it ---------------------------------------------------------------------------------------

    def _block(
        self, tokens: Tokens, carry: Carry, block: Block, read: bool, slow: Tensors, operand: torch.dtype
    ) -> tuple[Tensor | None, Carry]:
        rule = self.optimizer
        if block.restart is not None:
            carry = self._restart(carry, block.restart, tokens.k)
        entering = carry
        ys: list[Tensor] = []
        if read and rule.read == "previous":
            ys = [self.learner.predict(FastWeights(carry["commit"], slow, operand), tokens.q)]
        if self.replays and block.commit is False and rule.read != "block":
            return (ys[0] if ys else None), entering
        rows = rule.read if read and rule.read in ("inclusive", "exclusive") and rule.steps == 1 else None
        size = block.length if self.learner.mixes_tokens else 1 if rule.anchor == "online" and not self.solves else rule.chunk
        lengths = [min(size, block.length - i) for i in range(0, block.length, size)]
        steps = rule.steps if rule.read != "final" else 1
        for step in range(1, steps + 1):
            phase = block.phase
            for piece in tokens.split(lengths) if len(lengths) > 1 else [tokens]:
                y, carry = self._chunk(piece, carry, phase, rows, slow, operand)
                phase = phase + piece.k.shape[2]
                ys += [] if y is None else [y]
            if step == steps and read and not ys:  # the weights at the end of the block answer all its queries
                now = FastWeights(rule.current(carry, block.filled), slow, operand)
                ys = [self.learner.predict(now, tokens.q)]
            carry = self._commit(carry, block if step == steps else block._replace(commit=True))
        if self.replays:
            carry = self._only_complete(entering, carry, block.commit)
        return (torch.cat(ys, dim=2) if len(ys) > 1 else ys[0] if ys else None), carry

    def _commit(self, carry: Carry, block: Block) -> Carry:
        """`W_a ← W_t` where the mini-batch is complete."""
        if "commit" not in carry or block.commit is False:
            return carry
        now = self.optimizer.current(carry, block.filled)
        kept = {role: weights for role, weights in carry.items() if role in ("anchor", "momentum")}
        if block.commit is True:
            return {"commit": now, **kept}
        done = block.commit
        carry = carry | {"commit": _where(done, now, carry["commit"])}
        if "update" in carry:
            carry["update"] = {name: torch.where(_spread(done, x), 0, x) for name, x in carry["update"].items()}
        return carry

    def _restart(self, carry: Carry, restart: Tensor, like: Tensor) -> Carry:
        """The state that sequences start with, where `restart` says so."""
        fresh = self.start(like.shape[0], like.dtype)
        origin = next(iter(fresh.values()))
        return {
            role: {name: torch.where(_spread(restart, x), 0, x) for name, x in weights.items()}
            if role in ("update", "momentum")
            else _where(restart, origin, weights)
            for role, weights in carry.items()
        }

    def _only_complete(self, before: Carry, after: Carry, complete: bool | Tensor) -> Carry:
        """What a replayed mini-batch leaves behind: nothing, until it is complete."""
        if isinstance(complete, bool):
            return after if complete else before
        return {
            role: _where(complete, after[role], before[role])
            if role in before
            else {name: torch.where(_spread(complete, x), x, 0) for name, x in after[role].items()}
            for role in after
            if role in before or role == "momentum"
        }

    # -- one compute chunk -------------------------------------------------------------------------------------------------------

    def _chunk(
        self, tokens: Tokens, carry: Carry, phase: int | Tensor, read: str | None, slow: Tensors, operand: torch.dtype
    ) -> tuple[Tensor | None, Carry]:
        """Gradients at the anchor, the rows that queries read, and the tensors carried on."""
        rule = self.optimizer
        anchor = carry["anchor"] if rule.anchor == "batch" else carry["commit"] if rule.anchor == "minibatch" else rule.current(carry, phase)
        if self.form == "primal":
            return self._primal(tokens, anchor, carry, phase, read, slow, operand)
        how = rule.coefficients(tokens.gates, phase, carry, read)  # type: ignore[arg-type]
        if self.form == "summed":
            return None, carry | self._summed(tokens, anchor, carry, how, slow, operand)
        if self.solves:
            gradients = self._solve(tokens, carry, phase, operand)
        else:
            gradients = self._record(anchor, tokens, slow, operand)
        y = None
        if read is not None:
            assert how.mix is not None
            bases = [(row, carry[base]) for base, row in how.rows.items()]
            y = self.learner.predict(ReadRows(bases, how.mix, gradients, slow, operand), tokens.q)
        moved = {
            base: {
                name: _combine(carry, factors, name, gradients.weighted_sum(name, weight, value.shape[2:]))
                for name, value in anchor.items()
            }
            for base, (factors, weight) in how.carry.items()
        }
        return y, carry | moved

    def losses(self, weights: FastWeights, k: Tensor, v: Tensor) -> Tensor:
        """ℓ per token, `[B, H, T]`."""
        return self.task.loss(self.learner.predict(weights, k), v)

    def _record(self, anchor: Tensors, tokens: Tokens, slow: Tensors, operand: torch.dtype) -> PerTokenGradients:
        """Per-token gradients in factored form, from one backward pass of the summed loss."""
        k, v = tokens.k, tokens.v
        if functional():
            probes = [k.new_zeros(shape) for shape in self._shapes(anchor, k, v, slow, operand)]
            sites = []

            def probed(*probes: Tensor) -> tuple[Tensor, list[Tensor]]:
                record = Record(anchor, slow, operand, probes)
                total = self.losses(record, k, v).sum()
                sites[:] = record.sites
                return total, [site.input for site in record.sites if site.input is not None]

            total, pull, inputs = torch.func.vjp(probed, *probes, has_aux=True)
            rest = iter(inputs)
            sites = [site if site.input is None else site._replace(input=next(rest)) for site in sites]
            return PerTokenGradients(sites, pull(torch.ones_like(total)), operand)
        keep = torch.is_grad_enabled()
        with torch.enable_grad():
            record = Record(anchor, slow, operand)
            total = self.losses(record, k, v).sum()
            deltas = torch.autograd.grad(total, record.outputs, create_graph=keep, allow_unused=True, materialize_grads=True)
        if not keep:
            record.sites = [site if site.input is None else site._replace(input=site.input.detach()) for site in record.sites]
        return record.gradients(deltas)

    def _solve(self, tokens: Tokens, carry: Carry, phase: int | Tensor, operand: torch.dtype) -> PerTokenGradients:
        """Online gradients of a linear learner, all tokens at once: with errors `E_s = k_s W_{s−1} − v_s` and `G_s = k_sᵀ E_s`,

        `(I + T) E = R`, `T_sr = mix_{s−1,r} (k_s·k_r)`, `R_s = k_s (Σ_B rows_B(s−1) B) − v_s` (the UT transform of DeltaNet, arXiv 2406.06484).
        """
        assert self.learner.linear_map is not None
        weight, bias = self.learner.linear_map
        how = self.optimizer.coefficients(tokens.gates, phase, carry, "exclusive")
        k = tokens.k
        right = -tokens.v
        for base, row in how.rows.items():
            z = FastWeights(carry[base], {}, operand).linear(k, weight, bias)
            right = right + (z if row is None else row.unsqueeze(-1) * z)
        gram = matmul(k, k.mT, operand) + (0 if bias is None else 1)
        system = torch.eye(k.shape[2], dtype=k.dtype, device=k.device) + how.mix * gram
        errors = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        return PerTokenGradients([Site(weight, bias, k, False, False)], [errors], operand)

    def _shapes(self, anchor: Tensors, k: Tensor, v: Tensor, slow: Tensors, operand: torch.dtype) -> list[torch.Size]:
        """Output shapes of the primitives: probes must exist before the forward pass. Cached, but for the compiler, which folds them."""
        key = (k.shape, v.shape, k.dtype, operand)
        if torch.compiler.is_compiling() or key not in self._probe_shapes:
            with torch.no_grad():
                record = Record(anchor, slow, operand, probes=_Blank())
                self.losses(record, k, v)
            shapes = [z.shape for z in record.outputs]
            if torch.compiler.is_compiling():
                return shapes
            self._probe_shapes[key] = shapes
        return self._probe_shapes[key]

    def _summed(
        self, tokens: Tokens, anchor: Tensors, carry: Carry, how: Coefficients, slow: Tensors, operand: torch.dtype
    ) -> Carry:
        names = list(anchor)

        def losses(*weights: Tensor) -> Tensor:
            return self.losses(FastWeights(dict(zip(names, weights, strict=True)), slow, operand), tokens.k, tokens.v)

        found = vjp(losses, [anchor[name] for name in names], [weight for _, weight in how.carry.values()])
        return {
            base: {name: _combine(carry, factors, name, g) for name, g in zip(names, sums, strict=True)}
            for (base, (factors, _)), sums in zip(how.carry.items(), found, strict=True)
        }

    def _primal(
        self, tokens: Tokens, anchor: Tensors, carry: Carry, phase: int | Tensor, read: str | None, slow: Tensors, operand: torch.dtype
    ) -> tuple[Tensor | None, Carry]:
        """The recurrences of the rule, written out: `S_t = β_t S_{t−1} − η_t G_t`, `W_t = α_t W_{t−1} + κ_t S_t`."""
        rule, names = self.optimizer, list(anchor)
        batch, heads, count = tokens.eta.shape

        def alone(x: Tensor) -> Tensor:
            """Every token as a sequence of its own: `[B, H, n, d]` to `[B·n, H, 1, d]`."""
            return x.transpose(1, 2).flatten(0, 1).unsqueeze(2)

        def losses(*weights: Tensor) -> Tensor:
            return self.losses(FastWeights(dict(zip(names, weights, strict=True)), slow, operand), alone(tokens.k), alone(tokens.v))

        copies = [anchor[name].unsqueeze(1).expand(-1, count, *anchor[name].shape[1:]).flatten(0, 1) for name in names]
        ones = tokens.eta.new_ones(batch * count, heads, 1)
        found = vjp(losses, copies, [ones])[0]
        gradients = {name: g.unflatten(0, (batch, count)) for name, g in zip(names, found, strict=True)}  # [B, n, H, *shape]
        seen = []
        for t in range(count):
            before = rule.current(carry, phase + t)
            step = {name: -_spread(tokens.eta[:, :, t], g[:, t]) * g[:, t] for name, g in gradients.items()}
            if "update" in rule.bases:
                carry = carry | {"update": _add(carry.get("update"), step)}
            else:
                gates = [None if gate is None else gate[:, :, t] for gate in (tokens.alpha, tokens.beta, tokens.kappa)]
                alpha, beta, kappa = gates
                if beta is not None:
                    step = _add(_scaled(carry.get("momentum"), beta), step)
                    carry = carry | {"momentum": step}
                moved = _add(_scaled(before, alpha), _scaled(step, kappa))
                carry = carry | {"weights": moved}
            seen.append(before if read == "exclusive" else rule.current(carry, phase + t + 1))
        if read is None:
            return None, carry
        rows = {name: torch.stack([w[name] for w in seen], dim=1).flatten(0, 1) for name in names}
        y = self.learner.predict(FastWeights(rows, slow, operand), alone(tokens.q))
        return y.squeeze(2).unflatten(0, (batch, count)).transpose(1, 2), carry


class _Blank:
    """Probes that add nothing, for the pass that finds their shapes."""

    def __iter__(self) -> _Blank:
        return self

    def __next__(self) -> float:
        return 0.0


def _spread(factor: Tensor, like: Tensor) -> Tensor:
    """`[B]` or `[B, H]` with trailing axes, to broadcast against `[B, H, *shape]`."""
    return factor[(...,) + (None,) * (like.ndim - factor.ndim)]


def _where(condition: Tensor, a: Tensors, b: Tensors) -> Tensors:
    return {name: torch.where(_spread(condition, b[name]), a[name], b[name]) for name in b}


def _scaled(weights: Tensors | None, factor: Tensor | None) -> Tensors | None:
    if weights is None or factor is None:
        return weights
    return {name: _spread(factor, x) * x for name, x in weights.items()}


def _add(a: Tensors | None, b: Tensors | None) -> Tensors:
    assert b is not None
    return b if a is None else {name: a[name] + x for name, x in b.items()}


def _combine(carry: Carry, factors: dict[str, Tensor | None], name: str, moved: Tensor) -> Tensor:
    """`Σ_A factor_A · A − moved` for one weight."""
    total = -moved
    for base, factor in factors.items():
        value = carry[base][name]
        total = total + (value if factor is None else _spread(factor, value) * value)
    return total


