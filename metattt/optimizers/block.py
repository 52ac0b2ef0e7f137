"""Rules that act once per mini-batch, on the sum of its gradients: block momentum and decay, Muon, sign, Adam, row
norms."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metattt.errors import MetaTTTError
from metattt.memory import Memory, where, zeros
from metattt.modules import affine, expand_like
from metattt.ops.linear_rule import Coefficients, token_step_coefficients
from metattt.optimizers.base import Gates, InnerOptimizer, Read
from metattt.optimizers.gradient_descent import SHARING, StepSize
from metattt.optimizers.momentum import Gate, check_gate
from metattt.registry import register
from metattt.setting import setting
from metattt.state import WHOLE_CALL, Context, Tensors

RESERVED = {"commit", "anchor", "origin", "weights", "update", "pool"}  #: slots that every rule may have


class BlockRule(StepSize):
    """`W_{j+1} = rule(W_j, −Σ_s η_s G_s)` at the end of mini-batch j; until then W stays, so any rule, linear or not,
    is exact.

    Subclasses define `move`. Gates `alpha` and `beta` are pooled: `move` receives their mean over the tokens of the
    mini-batch, weighted by `kappa` if the rule has one.
    """

    #: the slots that `move` keeps from mini-batch to mini-batch; zeros in the first one, unless `begin` sets them
    own_slots: tuple[str, ...] = setting(default=(), init=False)

    #: `move` needs the tokens of the mini-batch: `memory["pool"]["count"]`, which sums up κ. Then `gates` gives κ = 1,
    #: which is 0 at padding
    counts = False

    read: Read = "previous"

    def check_settings(self) -> None:
        super().check_settings()
        if isinstance(self.own_slots, str) or {*self.own_slots} & RESERVED:
            raise MetaTTTError(
                f"{type(self).__name__}.own_slots={self.own_slots!r} is not allowed: it must be a tuple of names, "
                f"none of them {', '.join(sorted(RESERVED))}"
            )
        if self.read in ("inclusive", "exclusive"):
            raise MetaTTTError(
                f"optimizer.read={self.read} needs weights per token, and {type(self).__name__} moves them once per "
                "mini-batch: set optimizer.read=previous, committed, block or final"
            )
        if self.anchor == "online":
            raise MetaTTTError(
                f"optimizer.anchor=online is token by token, and {type(self).__name__} acts on mini-batches: set "
                "optimizer.anchor=minibatch, or optimizer=online"
            )
        steps = self.belongs and self.token_steps() is not None
        if steps or self.max_norm is not None or self.nesterov:
            raise MetaTTTError(
                f"{type(self).__name__} moves its weights once per mini-batch, by `move`, which does not use "
                "token_steps, max_norm and nesterov: leave them out"
            )

    @property
    def size(self) -> float:
        """Size of a step whose length the gradients do not set; its sign is that of the η in the gradients' sum."""
        return abs(self.scale)

    @abstractmethod
    def move(self, memory: Memory, alpha: Tensor | None, beta: Tensor | None) -> Memory:
        """New `commit` (and `own_slots`) from the memory, whose `update` holds `−Σ_s η_s G_s`; pooled gates are `[B,
        H]`."""

    def equations(self) -> list[str]:
        """The equations of η_t and of the sum that `move` receives; the subclass adds those of `move`."""
        eta = [line.replace("_t", "_s") for line in super().equations()]
        own = type(self).equations is BlockRule.equations
        whole = self.mini_batch_size == WHOLE_CALL
        tokens = "all tokens of the call, those" if whole else f"the {self.mini_batch_size} tokens"
        unsaid = [f"W_j = {type(self).__name__}.move(W_{{j−1}}, U_j)", *InnerOptimizer.equations(self)] if own else []
        return [
            *eta,
            f"U_j = −Σ_s {'η_s G_s' if eta else 'G_s'}, s over {tokens} of mini-batch j",
            *unsaid,
        ]

    @property
    def slots(self) -> tuple[str, ...]:
        anchor = ("anchor",) if self.anchor == "batch" else ()
        origin = ("origin",) if self.decay_to_init else ()
        return ("commit", *anchor, *origin, "update", *self.own_slots, "pool")

    def current(self, memory: Memory, filled: int | Tensor) -> Tensors:
        if "update" not in memory:
            return memory["commit"]
        now = self.commit(memory, filled)["commit"]
        return now if isinstance(filled, int) else where(filled > 0, now, memory["commit"])

    def commit(self, memory: Memory, filled: int | Tensor) -> Memory:
        pool = memory.get("pool", {})
        count = torch.where(pool["count"] == 0, 1, pool["count"]) if "count" in pool else 1
        alpha = pool["alpha"] / count if "alpha" in pool else None
        beta = pool["beta"] / count if "beta" in pool else None
        kept = {slot: weights for slot, weights in memory.items() if slot in ("anchor", "origin", *self.own_slots)}
        begun = {slot: zeros(slot, memory["commit"]) for slot in self.own_slots if slot not in memory}
        moved = self.move(memory | begun, alpha, beta)
        if {"commit", *self.own_slots}.symmetric_difference(moved):  # one left out would be 0, `update` added twice
            raise MetaTTTError(
                f"{type(self).__name__}.move returns {[*moved]}: it must return {['commit', *self.own_slots]} and no "
                "other slot, each with a tensor for every weight"
            )
        return kept | moved

    def pool_gates(self, memory: Memory, gates: Gates) -> Memory:
        given = {name: gate for name, gate in (("alpha", gates.alpha), ("beta", gates.beta)) if gate is not None}
        pool = memory.get("pool")
        if "update" in memory and [*given] != [name for name in pool or () if name != "count"]:
            raise MetaTTTError(
                f"{type(self).__name__} gives alpha or beta for some tokens of a mini-batch and not for others: give "
                "them in every call"
            )
        if not given and not self.counts:
            return memory
        # κ is 0 at padding, which must not count; without any, all tokens do
        counted = torch.ones_like(next(iter(given.values()))) if gates.kappa is None else gates.kappa
        new = {name: (gate * counted).sum(-1) for name, gate in given.items()}
        new["count"] = counted.sum(-1)
        return memory | {"pool": new if pool is None else {name: pool[name] + x for name, x in new.items()}}

    def coefficients(
        self, gates: Gates, phase: int | Tensor, carried: Collection[str], read: str | None
    ) -> Coefficients:
        return token_step_coefficients(gates.eta, None, phase, "update" in carried, None)


@register(group="optimizer", name="block_momentum")
class BlockMomentum(BlockRule):
    """`S_j = β_j S_{j−1} − Σ η G`, `W_j = α_j W_{j−1} + S_j` (Titans, arXiv 2501.00663, Eq. 13–14), optionally
    orthogonalised (Muon).

    Args:
        mini_batch_size, anchor, read, steps, base_lr, lr, lr_scale, compute_chunk: see `GradientDescent`. `lr` may also
            be `per_weight`: η = softplus(θ x + c) per head and fast weight, which is η_base where θ x + c is at
            its start (LaCT).
        momentum, momentum_init: β, as in `Momentum`, pooled over the mini-batch.
        decay, decay_init: α likewise.
        pool: what is averaged over a mini-batch: the gates' `logits` (Titans) or the `gates` themselves (LaCT).
        orthogonalize: replace the step of each matrix by its polar factor, by Newton–Schulz iterations (Muon).
        newton_schulz: the coefficients of these iterations: `constant`, Muon's in all five, or `scheduled`, five of
            their own (LaCT's language models).
        row_norm: rescale the weights of every output of a matrix to the norm they have in W0 (LaCT, arXiv 2505.23884;
            rows of its matrices, which are `(d_out, d_in)`).
    """

    mini_batch_size = 64
    lr: Literal["per_head", "shared", "constant", "per_weight"] = setting(  # type: ignore[assignment]
        default="per_head", fixed=True
    )
    momentum: Literal["none", "constant", "shared", "per_head"] = setting(default="per_head", fixed=True)
    momentum_init: float = setting(default=0.9, fixed=True)
    decay: Literal["none", "constant", "shared", "per_head"] = setting(default="none", fixed=True)
    decay_init: float = setting(default=0.99, fixed=True)
    pool: Literal["logits", "gates"] = setting(default="logits")
    orthogonalize: bool = setting(default=False)
    row_norm: bool = setting(default=False, fixed=True)
    newton_schulz: Literal["constant", "scheduled"] = setting(default="constant", kw_only=True)

    def configure(self) -> None:
        super().configure()
        self.per_weight = self.lr == "per_weight"
        self.lr, self.follows_base_lr = "constant" if self.per_weight else self.lr, not self.per_weight
        self.own_slots = ("momentum",) if self.momentum != "none" else ()
        self.decay_to_init = self.row_norm  # W0 is carried, for its norms
        self.scale_free = self.orthogonalize

    def check_settings(self) -> None:
        check_gate("momentum_init", self.momentum, self.momentum_init)
        check_gate("decay_init", self.decay, self.decay_init)
        super().check_settings()
        if self.per_weight and not self.base_lr > 0:
            raise MetaTTTError(
                f"optimizer.base_lr={self.base_lr} has no meaning with optimizer.lr=per_weight, whose softplus is "
                "positive: set it above 0, or optimizer.lr=per_head"
            )

    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        super().build(dim, num_heads, head_dim)
        self.momentum_gate = Gate(self.momentum, self.momentum_init, dim, num_heads)
        self.decay_gate = Gate(self.decay, self.decay_init, dim, num_heads)
        if self.per_weight:
            count = num_heads * len(self.weight_names)
            self.rate_weight = nn.Parameter(torch.randn(count, dim) * 0.02)
            start = self.scale + math.log(-math.expm1(-self.scale))  # softplus of it is η_base
            self.rate_bias = nn.Parameter(torch.full((count,), start))

    def equations(self) -> list[str]:
        *eta, step = super().equations()
        if self.per_weight:
            eta = [f"η_s = softplus(θ_η x_s + c_η), θ and c of each head and weight; {self.scale:g} at the start"]
            step = step.replace("Σ_s G_s", "Σ_s η_s G_s")
        lines, moved, decay = self._pool("α", self.decay_gate), "U_j", "" if self.decay == "none" else "α_j "
        if self.momentum != "none":
            moved = "S_j"
            lines += [*self._pool("β", self.momentum_gate), "S_j = β_j S_{j−1} + U_j"]
        if self.orthogonalize:
            kind = "Muon" if self.newton_schulz == "constant" else f"{self.newton_schulz} coefficients"
            iterations = f"{len(SCHEDULES[self.newton_schulz])} Newton–Schulz iterations on matrices ({kind})"
            moved = f"NS({moved}), NS: {iterations}"
        lines.append(f"W_j = {decay}W_{{j−1}} + {moved}")
        if self.orthogonalize:
            factors = "; ".join(f"{a:g}, {b:g}, {c:g}" for a, b, c in dict.fromkeys(SCHEDULES[self.newton_schulz]))
            lines.append("NS: S ← S/√(‖S‖² + 1e-14), then S ← a S + (b A + c A²) S, A = S Sᵀ (a tall S is transposed)")
            lines.append(f"a, b, c = {factors}")
        if self.row_norm:
            lines.append(
                "then the weights of every output of a matrix are rescaled to their norm √(Σ w² + 1e-12) in W_0"
            )
        return [*eta, step, *lines]

    def _pool(self, symbol: str, gate: Gate) -> list[str]:
        """The equation of a gate, as `move` receives it."""
        if gate.source not in SHARING:
            return [line.replace(f"{symbol}_t", f"{symbol}_j") for line in gate.equations(symbol)]
        logit, words = f"θ_{symbol} x_s + c_{symbol}", SHARING[gate.source]
        value = f"σ(mean_s({logit}))" if self.pool == "logits" else f"mean_s σ({logit})"
        return [f"{symbol}_j = {value}, {words}; {gate.initial:g} at the start"]

    def gates(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[Gates, Tensors]:
        gates, state = super().gates(x, state, ctx)
        alpha, beta = self._pooled(self.decay_gate, x), self._pooled(self.momentum_gate, x)
        ones = torch.ones_like(gates.eta)
        if not self.per_weight:
            return Gates(gates.eta, alpha, beta, ones), state
        rates = F.softplus(affine(x, self.rate_weight, self.rate_bias))  # of every fast weight
        return Gates(ones, alpha, beta, ones, rates.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)), state

    def _pooled(self, gate: Gate, x: Tensor) -> Tensor | None:
        """What is averaged over a mini-batch of a gate."""
        logits = self.pool == "logits" and gate.source in SHARING
        return gate.logit(x).expand(-1, self.num_heads, -1) if logits else gate(x)

    def _gate(self, gate: Gate, mean: Tensor | None) -> Tensor | None:
        """The gate of a mini-batch, from that mean."""
        logits = self.pool == "logits" and gate.source in SHARING
        return torch.sigmoid(mean) if logits and mean is not None else mean

    def move(self, memory: Memory, alpha: Tensor | None, beta: Tensor | None) -> Memory:
        alpha, beta = self._gate(self.decay_gate, alpha), self._gate(self.momentum_gate, beta)
        sums = dict(memory["update"])
        if beta is not None:
            sums = {name: expand_like(beta, x) * memory["momentum"][name] + x for name, x in sums.items()}
        after = {}
        for name, weight in memory["commit"].items():
            step = sums[name]
            if self.orthogonalize and weight.ndim == 4:
                step = newton_schulz(step, SCHEDULES[self.newton_schulz])
            moved = (weight if alpha is None else expand_like(alpha, weight) * weight) + step
            if self.row_norm and weight.ndim == 4:
                moved = moved * (_output_norms(memory["origin"][name]) / _output_norms(moved))
            after[name] = moved
        return {"commit": after} | ({"momentum": sums} if self.own_slots else {})


@register(group="optimizer", name="sign")
class Sign(BlockRule):
    """`W_j = W_{j−1} + |η_base| · sign(−Σ η G)` (signSGD, arXiv 1802.04434). The sign has no derivative."""

    scale_free = True

    def equations(self) -> list[str]:
        return [*super().equations(), f"W_j = W_{{j−1}} + {self.size:g} sign(U_j)"]

    def move(self, memory: Memory, alpha: Tensor | None, beta: Tensor | None) -> Memory:
        return {"commit": {name: x + self.size * memory["update"][name].sign() for name, x in memory["commit"].items()}}


@register(group="optimizer", name="adam")
class Adam(BlockRule):
    """Adam (arXiv 1412.6980, Alg. 1) on the mini-batches' gradients, weighted by the tokens' η; its step size is
    `base_lr`.

    Args:
        mini_batch_size, anchor, read, steps, base_lr, lr, lr_scale, compute_chunk: see `GradientDescent`.
        beta1, beta2: decay of the moments, per mini-batch.
        eps: added to the root of the second moment.
    """

    own_slots = ("momentum", "second", "age")
    scale_free = True

    base_lr = 0.01
    lr = "constant"
    lr_scale = "none"
    beta1: float = setting(default=0.9, least=0, below=1)
    beta2: float = setting(default=0.99, least=0, below=1)
    eps: float = setting(default=1e-8, above=0)

    def equations(self) -> list[str]:
        one, two = self.beta1, self.beta2
        return [
            *super().equations(),
            f"m_j = {one:g} m_{{j−1}} + {1 - one:g} U_j",
            f"n_j = {two:g} n_{{j−1}} + {1 - two:g} U_j²",
            f"W_j = W_{{j−1}} + {self.size:g} m̂_j/(√n̂_j + {self.eps:g}), m̂_j = m_j/(1 − {one:g}^j), n̂_j = n_j/(1 "
            f"− {two:g}^j)",
        ]

    def move(self, memory: Memory, alpha: Tensor | None, beta: Tensor | None) -> Memory:
        after: Memory = {slot: {} for slot in ("commit", *self.own_slots)}
        for name, x in memory["update"].items():
            commit, first, second, age = (memory[slot][name] for slot in after)
            first = (self.beta1 * first).add(x, alpha=1 - self.beta1)
            second = (self.beta2 * second).addcmul(x, x, value=1 - self.beta2)
            count = expand_like(age + 1, x)
            mean = first / _begun(self.beta1, count)
            # The root has no derivative at 0: the floor, the smallest normal number, keeps the outer gradient finite.
            root = (second / _begun(self.beta2, count)).clamp(min=torch.finfo(x.dtype).tiny).sqrt()
            moved = torch.addcdiv(commit, mean, root + self.eps, value=self.size)
            for slot, value in zip(after, (moved, first, second, age + 1), strict=True):
                after[slot][name] = value
        return after


def _begun(beta: float, count: Tensor) -> Tensor:
    """`1 − β^count`, also for a β that fp32 rounds to 1."""
    return -torch.expm1(math.log(beta) * count) if beta else torch.ones_like(count)


Schedule = tuple[tuple[float, float, float], ...]
"""The coefficients a, b, c of every iteration `X ← aX + (bG + cG²)X`, `G = XXᵀ`."""

SCHEDULES: dict[str, Schedule] = {
    "constant": ((3.4445, -4.7750, 2.0315),) * 5,
    "scheduled": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}


def newton_schulz(matrix: Tensor, schedule: Schedule = SCHEDULES["constant"], eps: float = 1e-7) -> Tensor:
    """Approximate polar factors of `[..., m, n]`: singular values go towards 1 (Muon, quintic iterations)."""
    transpose = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if transpose else matrix
    x = (x / (x.square().sum((-2, -1), keepdim=True) + eps**2).sqrt()).flatten(0, -3)
    for a, b, c in schedule:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if transpose else x).view_as(matrix)


def _output_norms(matrix: Tensor) -> Tensor:
    """Norm of the weights into every output of `[..., d_in, d_out]`."""
    return (matrix.square().sum(-2, keepdim=True) + 1e-12).sqrt()
