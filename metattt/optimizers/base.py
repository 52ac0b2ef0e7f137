"""The contract of an inner optimizer: how gradients move the weights, and which weights a query reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from metattt.component import Component
from metattt.errors import MetaTTTError
from metattt.memory import Memory, newest
from metattt.ops.chunk import decays
from metattt.setting import setting
from metattt.state import Context, DataGates, Tensors
from metattt.tasks.base import Views

if TYPE_CHECKING:
    from metattt.inner.committed import Committed

Anchor = Literal["minibatch", "online", "batch"]
Read = Literal["inclusive", "exclusive", "previous", "committed", "block", "final"]

MAX_STEPS = 100_000  # more are a slip, and would not end


class Gates(NamedTuple):
    """Per-token numbers of the rule `S_t = β_t S_{t−1} − η_t G_t`, `W_t = α_t W_{t−1} + κ_t S_t`, each `[B, H, T]`.

    Absent gates are None: α = 1, β = 0, κ = 1. `weight_lr` `[B, H, T, n]` multiplies η by a factor of its own for each of
    the learner's n fast weights, in the order of their names; only rules without weights per token (`BlockRule`) may
    give it. `decay` `[B, H, T, d_in]` is the logarithm of a decay for every input channel of a linear learner,
    `W_t = Diag(exp(decay_t)) W_{t−1} + S_t`, from −∞ to 0. Where a token has n pairs (`Views`), η may be `[B, H, T, n]`.
    """

    eta: Tensor
    alpha: Tensor | None = None
    beta: Tensor | None = None
    kappa: Tensor | None = None
    weight_lr: Tensor | None = None
    decay: Tensor | None = None


class Coefficients(NamedTuple):
    """The rule over `n` tokens as linear combinations of the tensors carried in and the tokens' gradients.

    `W_t = Σ_B rows[B]_t · B − Σ_{s≤t} mix_ts G_s` is what the read row t sees; after the tokens
    `B' = Σ_A advance[B][0][A] · A − Σ_s advance[B][1]_s G_s`. A factor None stands for 1; slots that `advance` does not name
    are unchanged. η is inside `mix` and the gradient weights.
    """

    rows: dict[str, Tensor | None]  # [B, H, n]
    mix: Tensor | None  # [B, H, n, n]; None if no row is read
    advance: dict[str, tuple[dict[str, Tensor | None], Tensor]]  # factors [B, H], gradient weights [B, H, n]


class InnerOptimizer(Component, ABC):
    """A linear update rule with its knobs; subclasses define `build` and `gates`.

    Args:
        mini_batch_size: b, tokens per commit of the weights.
        anchor: where gradients are taken: at the last commit (`minibatch`), at the newest weights (`online`), or always
            at the weights the sequence started with (`batch`).
        read: the weights that query t sees: `inclusive` W_t, `exclusive` W_{t−1}, `previous` the last commit before its
            mini-batch, `committed` the last commit, also one that token t completes, `block` those at the end of its
            mini-batch, `final` those at the end of the call. The last two are not causal.
        steps: inner steps per mini-batch (for `final`, passes over the tokens).
        compute_chunk: c, tokens per compute step; changes memory and speed, never a result. None chooses.

    Raises:
        MetaTTTError: a value that is not allowed, or more than one step where a query would see the future.
    """

    _group = "optimizer"
    _reserved = Component._reserved | {"weight_names", "has_token_steps"}
    mini_batch_size: int = setting(default=16, most=2**31 - 1)
    anchor: Anchor = setting(default="minibatch")
    read: Read = setting(default="inclusive")
    steps: int = setting(default=1, most=MAX_STEPS)
    compute_chunk: int | None = setting(default=None, most=2**31 - 1, kw_only=True)
    updates = True  #: False for the rule that learns nothing itself: the learner keeps the data
    #: of a rule with `updates = False`, the gates that it gives (`write`, `keep`, `levels`), each with the override that
    #: turns it off
    data_gates: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def check_settings(self) -> None:
        super().check_settings()
        anchor, read, steps = self.anchor, self.read, self.steps
        if steps > 1 and not (
            read in ("previous", "committed", "block", "final") or (self.mini_batch_size == 1 and read == "inclusive")
        ):
            raise MetaTTTError(
                f"optimizer.steps={steps} with optimizer.read={read} would show queries the future: "
                "set optimizer.read to previous, committed, block or final, or optimizer.mini_batch_size=1"
            )
        if steps > 1 and anchor != "minibatch" and read != "final":
            raise MetaTTTError(
                f"optimizer.steps={steps} needs optimizer.anchor=minibatch (or optimizer.read=final), not {anchor}"
            )
        if self.gradient_at == "decayed" and anchor != "online":
            raise MetaTTTError(
                f"optimizer.gradient_at=decayed is for token by token rules: set optimizer.anchor=online, not {anchor}"
            )

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        """Creates outer-loop parameters (θ_lr, τ, gates), if the rule has any."""

    @abstractmethod
    def gates(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[Gates | DataGates, Tensors]:
        """`x` `[B, T, D]` to the rule's gates, and what the next call needs. `state` is empty at the start.

        A rule with `updates = False` gives `DataGates`, all others `Gates`.
        """

    def prepare(
        self, views: Views, gates: Gates, x: Tensor, state: Tensors, ctx: Context
    ) -> tuple[Views, Gates, Tensors]:
        """Views and gates as they enter the inner loop, for rules that change what a step is made of (a preconditioner,
        a window of tokens), and what the next call needs. `state` is what `gates` returned, with what the last call
        left."""
        return views, gates, state

    def gates_at(self, gates: Gates, committed: Committed) -> Gates:
        """The gates of `n` tokens `[B, H, n]` in sight of the weights of the last commit, from those that `gates` gave.

        Called inside the inner loop, in every inner step. It may change any gate that `gates` gives, and must treat
        every token alone. Tokens of η = 0, as all padding is, keep theirs. A rule that defines it has no fast path:
        neither a kernel nor the solved form.
        """
        return gates

    def token_steps(self) -> Tensor | None:
        """τ, `[1 or H, b]`: then `W_t = W_a + τ_{pos mod b} Σ_s −η_s G_s` over the open mini-batch. None: no token
        steps."""
        return None

    weight_names: ClassVar[tuple[str, ...]] = ()  #: the learner's fast weights, known when `build` is called
    has_token_steps = False  #: whether `token_steps` gives any, known once the parameters are made
    #: the rule carries S between tokens: found out from its gates when a layer is built. Only a rule whose gates have a β in
    #: some calls and none in others must say so itself
    has_momentum = False
    nesterov = False  #: write the look-ahead `β_t S_t − η_t G_t` instead of S_t
    #: largest norm of what a mini-batch adds to a head's weights: `W_t = W_a + τ_t min(1, c/‖M_t‖) M_t`
    max_norm: float | None = setting(default=None, init=False, above=0)
    scale_free = False  #: a step stays the same when all gradients of a weight are multiplied by a number
    decay_to_init = False  #: decay towards W0 instead of zero: `W_t = α_t W_{t−1} + (1 − α_t) W_0 + κ_t S_t`
    whole = False  #: all tokens of a call are one mini-batch, whatever `mini_batch_size` is
    #: online rules: gradient at W_{t−1}, or at `α_t W_{t−1}`
    gradient_at: Literal["previous", "decayed"] = setting(default="previous", init=False)

    def begin(self, memory: Memory) -> Memory:
        """What a sequence starts with, from W0 in every slot that holds weights."""
        return memory

    # -- what the layer asks -------------------------------------------------------------------------------------------

    def setup(self, dim: int, num_heads: int, head_dim: int, weight_names: Sequence[str] = ()) -> InnerOptimizer:
        """Creates the parameters. Called once, by the layer, with the names of the learner's fast weights.

        Raises:
            MetaTTTError: the optimizer already belongs to a layer.
        """
        with self.claimed():
            self.__dict__["weight_names"] = tuple(weight_names)
            self.build(dim, num_heads, head_dim)
            self.__dict__["has_token_steps"] = self.token_steps() is not None
        return self

    def look(self, num_heads: int, gates: object) -> None:
        """Finds out what the rule gives, when a layer is built and when a setting has been assigned since.

        Args:
            num_heads: H.
            gates: what `gates` gives for a token, if it is known before the first call.

        Raises:
            MetaTTTError: settings, token steps and gates that cannot go together.
        """
        self.check_settings()
        tau, size = self.token_steps(), self.mini_batch_size
        if tau is not None and tau.shape not in ((1, size), (num_heads, size)):
            raise MetaTTTError(
                f"{type(self).__name__}.token_steps has shape {list(tau.shape)}, expected [1 or {num_heads}, {size}] for "
                f"optimizer.mini_batch_size={size}"
            )
        # (not by assignment: that would say that a setting has changed)
        self.__dict__["has_token_steps"] = tau is not None
        if isinstance(gates, Gates):
            if gates.beta is not None:
                self.__dict__["has_momentum"] = True
            self.check(gates)

    def check(self, gates: Gates) -> None:
        """Refuses gates that the rule's algebra would drop: asked when a layer is built, and in every call before its inner
        loop.

        Raises:
            MetaTTTError: naming the gate, and what to leave out or to set.
        """
        kind = type(self).__name__
        if gates.weight_lr is not None and gates.weight_lr.shape[-1] != len(self.weight_names):
            raise MetaTTTError(
                f"{kind} gives rates of shape {list(gates.weight_lr.shape)}, expected [B, H, T, {len(self.weight_names)}]: one for "
                f"each of {', '.join(self.weight_names)}"
            )
        if gates.weight_lr is not None and (self.read in ("inclusive", "exclusive") or self.anchor == "online"):
            raise MetaTTTError(
                f"{kind} gives rates, which weights per token do not have (optimizer.anchor={self.anchor}, "
                f"optimizer.read={self.read}): set anchor=minibatch and read=previous, or learner.step_scale in their place"
            )
        if type(self).coefficients is not InnerOptimizer.coefficients:
            return  # what it makes of its gates is its own
        if not self.has_token_steps and self.token_steps() is not None:
            raise MetaTTTError(
                f"{kind}.token_steps gives τ, and gave none when the layer was built: give it at any time, of ones"
            )
        if gates.alpha is None and gates.beta is None and gates.kappa is None and gates.decay is None:
            return
        if self.accumulates:
            extra = [n for n in ("alpha", "beta", "kappa", "decay") if getattr(gates, n) is not None]
            what = "token_steps" if self.has_token_steps else "max_norm"
            raise MetaTTTError(
                f"{kind} gives {', '.join(extra)} beside {what}, whose W_t = W_a + τ_t M_t has no other gate than η: leave out "
                f"one of them, or set optimizer.{what}={'none' if what == 'token_steps' else 'null'}"
            )
        if gates.beta is not None and not self.has_momentum:
            raise MetaTTTError(
                f"{kind} gives beta, and gave none when the layer was built: set has_momentum = True on the class"
            )

    def with_token_steps(self, tau: Tensor | None) -> InnerOptimizer:
        """This rule with its token steps at hand: they are made once for many mini-batches."""
        bound = object.__new__(type(self))
        bound.__dict__.update(self.__dict__, token_steps=lambda: tau)
        return bound

    @property
    def accumulates(self) -> bool:
        """Whether the step of the open mini-batch is carried apart from the weights, because rows scale it (τ,
        clipping)."""
        return self.has_token_steps or self.max_norm is not None

    @property
    def state_dependent(self) -> bool:
        """Whether gates depend on the weights."""
        return getattr(self.gates_at, "__func__", None) is not InnerOptimizer.gates_at

    @property
    def causal(self) -> bool:
        """Whether no query reads weights that later tokens have trained."""
        return self.read not in ("block", "final")

    @property
    def slots(self) -> tuple[str, ...]:
        """Roles of the tensors carried for every fast weight; the first is W0 at the start, as are all but `update` and
        `momentum`."""
        has_phase, sees_commit = self.accumulates, self.read in ("previous", "committed") or self.state_dependent
        names = ["commit"] if has_phase or sees_commit or self.anchor == "minibatch" else []
        names += ["anchor"] if self.anchor == "batch" else []
        names += ["origin"] if self.decay_to_init else []
        names += ["update"] if has_phase else ["weights"]
        return (*names, "momentum") if self.has_momentum else tuple(names)

    @property
    def period(self) -> int | None:
        """Tokens after which the rule repeats itself, or None if all tokens are alike to it."""
        return self.mini_batch_size if "commit" in self.slots or self.read == "block" else None

    @property
    def block(self) -> int:
        """Tokens that the scan hands on together: a mini-batch, or any number where the rule has no period."""
        return self.period or (self.compute_chunk or 64)

    @property
    def chunk(self) -> int:
        """Tokens per compute step, at most a block. (An online rule that is not solved goes token by token.)"""
        return min(self.compute_chunk or 128, self.block)

    def current(self, memory: Memory, filled: int | Tensor) -> Tensors:
        """The newest weights W_t by name, when `filled` tokens of the open mini-batch have been seen (`[B]` or a plain
        integer)."""
        base = memory[newest(memory)]
        if "update" not in memory:
            return base
        update = memory["update"]
        tau = self._token_steps_at(filled, 1, next(iter(update.values()))).squeeze(-1)
        if self.max_norm is not None:
            tau = tau * clip_factor(sum(x.flatten(2).square().sum(-1) for x in update.values()), self.max_norm)
        return {
            name: value + tau.view(*tau.shape, *(1,) * (value.ndim - 2)) * update[name] for name, value in base.items()
        }

    def _token_steps_at(self, first: int | Tensor, count: int, like: Tensor) -> Tensor:
        """τ after `first`, `first + 1`, … tokens of the mini-batch, `[B or 1, H or 1, count]`; τ = 0 before its first
        token."""
        steps = self.token_steps()
        if steps is None:  # all 1, and as many as are asked for: a mini-batch may be longer than any call
            begin = first if isinstance(first, int) else first.unsqueeze(-1)
            places = begin + torch.arange(count, device=like.device)
            return (places > 0).to(like.dtype).view(-1, 1, count)
        steps = steps.to(like.dtype)
        if isinstance(first, int) and first > 0:
            return steps[:, first - 1 : first - 1 + count].unsqueeze(0)
        shifted = F.pad(steps, (1, 0))
        if isinstance(first, int):
            return shifted[:, first : first + count].unsqueeze(0)
        return shifted[:, first].mT.unsqueeze(-1)  # one place per sequence: count is 1

    def commit(self, memory: Memory, filled: int | Tensor) -> Memory:
        """The memory after a mini-batch is complete: `W_a ← W_t`, and a new one begins."""
        kept = {slot: weights for slot, weights in memory.items() if slot in ("anchor", "origin", "momentum")}
        return {"commit": self.current(memory, filled), **kept}

    def again(self, memory: Memory, filled: int | Tensor) -> Memory:
        """What the next pass of a `final` read begins with, from the memory after one: all weights are the newest."""
        now = self.current(memory, filled)
        kept = {slot: memory[slot] for slot in ("origin", "momentum") if slot in memory}
        return kept | ({slot: now for slot in memory if slot in ("commit", "anchor")} or {"weights": now})

    def observe(self, memory: Memory, gates: Gates) -> Memory:
        """Accumulates what the next commit needs of the gates of `n` tokens."""
        return memory

    def permutation(self, count: int, device: torch.device) -> Tensor | None:
        """`[1, H, T]` order in which the steps of a `final` read take the tokens, one part a step; None: every step
        takes all."""
        return None

    def in_token_space(self, phase: int | Tensor, count: int, memory: Memory) -> bool:
        """Whether `commit` can use the step of a whole mini-batch in factored form (slot `factors`), which then must be
        one chunk."""
        return False

    def coefficients(
        self,
        gates: Gates,
        phase: int | Tensor,
        carried: Collection[str],
        read: Literal["inclusive", "exclusive"] | None,
    ) -> Coefficients:
        """The rule over `n` tokens of one mini-batch.

        Args:
            gates: `[B, H, n]` each, fp32 or wider.
            phase: place of the first token in its mini-batch; `[B]` if it differs, and then n = 1.
            carried: slots at hand; an absent `update` or `momentum` is zero, absent `weights` are the commit or the
                anchor.
            read: which rows to compute; None for the carried tensors alone.
        """
        if self.accumulates:
            return self._token_step_coefficients(gates, phase, "update" in carried, read)
        if gates.alpha is None and gates.beta is None and gates.kappa is None:
            return self._plain_coefficients(gates.eta, newest(carried), read)
        return self._general_coefficients(gates, newest(carried), "momentum" in carried, read)

    # -- the algebra: DESIGN.md section 3 in code ----------------------------------------------------------------------

    def _token_step_coefficients(
        self, gates: Gates, phase: int | Tensor, started: bool, read: str | None
    ) -> Coefficients:
        eta = gates.eta
        rows: dict[str, Tensor | None] = {"commit": None}
        mix = None
        if read is not None:
            first = phase + 1 if read == "inclusive" else phase
            tau = self._token_steps_at(first, eta.shape[-1], eta)
            mix = (tau.unsqueeze(-1) * eta.unsqueeze(-2)).tril(0 if read == "inclusive" else -1)
            if started:
                rows["update"] = tau
        return Coefficients(rows, mix, {"update": ({"update": None} if started else {}, eta)})

    def _plain_coefficients(self, eta: Tensor, base: str, read: str | None) -> Coefficients:
        mix = None
        if read is not None:
            mix = eta.unsqueeze(-2).expand(*eta.shape, eta.shape[-1]).tril(0 if read == "inclusive" else -1)
        return Coefficients({base: None}, mix, {"weights": ({base: None}, eta)})

    def _general_coefficients(self, gates: Gates, base: str, momentum: bool, read: str | None) -> Coefficients:
        eta = gates.eta
        alpha = torch.ones_like(eta) if gates.alpha is None else gates.alpha
        decay, start = decays(alpha)  # A, c0
        written = decay if gates.kappa is None else decay * gates.kappa.unsqueeze(-2)  # A diag(κ)
        rows = {base: start}
        if self.decay_to_init:
            rows["origin"] = (decay @ (1 - alpha).unsqueeze(-1)).squeeze(-1)
        advance: dict[str, tuple[dict[str, Tensor | None], Tensor]] = {}
        mix = written
        if gates.beta is not None:
            sums, kept = decays(gates.beta)  # P, p
            if self.nesterov:  # what is written is diag(β) S − diag(η) G
                ahead = written * gates.beta.unsqueeze(-2)
                mix, written = ahead @ sums + written, ahead
            else:
                mix = written @ sums
            if momentum:
                rows["momentum"] = (written @ kept.unsqueeze(-1)).squeeze(-1)  # cS
            advance["momentum"] = ({"momentum": kept[..., -1]} if momentum else {}, sums[..., -1, :] * eta)
        mix = mix * eta.unsqueeze(-2)
        advance["weights"] = ({name: row[..., -1] for name, row in rows.items()}, mix[..., -1, :])
        if read == "exclusive":  # row t − 1 for query t
            rows = {name: F.pad(row[..., :-1], (1, 0), value=float(name == base)) for name, row in rows.items()}
            mix = F.pad(mix[..., :-1, :], (0, 0, 1, 0))
        return Coefficients({**rows}, None if read is None else mix, advance)


def clip_factor(squared_norm: Tensor | int, max_norm: float) -> Tensor:
    """`min(1, c/‖M‖)` from `‖M‖²`, with a derivative everywhere."""
    return max_norm * torch.as_tensor(squared_norm).clamp(min=max_norm**2).rsqrt()


