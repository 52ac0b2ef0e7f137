"""The contract of an inner optimizer: how gradients move the weights, and which weights a query reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from metattt.component import Component
from metattt.memory import Memory, newest
from metattt.ops import linear_rule
from metattt.ops.linear_rule import Coefficients
from metattt.optimizers.committed import Committed
from metattt.optimizers.together import check_together
from metattt.setting import setting
from metattt.state import WHOLE_CALL, Context, DataGates, Tensors
from metattt.tasks.base import Views

Anchor = Literal["minibatch", "online", "batch"]
Read = Literal["inclusive", "exclusive", "previous", "committed", "block", "final"]

MAX_STEPS = 100_000  # more steps are a mistake, and would not end


class Gates(NamedTuple):
    """Per-token numbers of the rule `S_t = β_t S_{t−1} − η_t G_t`, `W_t = α_t W_{t−1} + κ_t S_t`, each `[B, H, T]`.

    Absent gates are None: α = 1, β = 0, κ = 1. `weight_lr` `[B, H, T, n]` multiplies η by a factor of its own for each
    of the learner's n fast weights, in the order of their names; only rules without weights per token (`BlockRule`) may
    give it. `decay` `[B, H, T, d_in]` is the logarithm of a decay for every input channel of a linear learner,
    `W_t = Diag(exp(decay_t)) W_{t−1} + S_t`, from −∞ to 0. Where a token has n pairs (`Views`), η may be `[B, H, T,
    n]`.
    """

    eta: Tensor
    alpha: Tensor | None = None
    beta: Tensor | None = None
    kappa: Tensor | None = None
    weight_lr: Tensor | None = None
    decay: Tensor | None = None


class InnerOptimizer(Component, ABC):
    """A linear update rule: subclasses define `build` and `gates`. Rules that act once per mini-batch are
    `BlockRule`s (`metattt/optimizers/block.py`), with other defaults.

    Args:
        mini_batch_size: b, tokens per commit of the weights; None: all tokens of a call (of each document in it) are
            one mini-batch, committed at the end of the call. A split of a sequence into calls is then part of the rule.
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
    mini_batch_size: int = setting(
        default=16, most=WHOLE_CALL - 1, null=WHOLE_CALL, advice=", or null for all tokens of a call"
    )
    anchor: Anchor = setting(default="minibatch")
    read: Read = setting(default="inclusive")
    steps: int = setting(default=1, most=MAX_STEPS)
    compute_chunk: int | None = setting(default=None, most=2**31 - 1, kw_only=True)

    # -- what a rule may say of itself ---------------------------------------------------------------------------------

    updates = True  #: False for the rule that learns nothing itself: the learner keeps the data
    #: the rule carries S between tokens: found from its gates when a layer is built. Set it only if the gates have a β
    #: in some calls and not in others
    has_momentum = False
    nesterov = False  #: write the look-ahead `β_t S_t − η_t G_t` instead of S_t
    #: largest norm of what a mini-batch adds to a head's weights: `W_t = W_a + τ_t min(1, c/‖M_t‖) M_t`
    max_norm: float | None = setting(default=None, init=False, above=0)
    scale_free = False  #: a step stays the same when all gradients of a weight are multiplied by a number
    decay_to_init = False  #: decay towards W0 instead of zero: `W_t = α_t W_{t−1} + (1 − α_t) W_0 + κ_t S_t`
    whole = False  #: all tokens of a call are one mini-batch, whatever `mini_batch_size` is
    #: online rules: gradient at W_{t−1}, or at `α_t W_{t−1}`
    gradient_at: Literal["previous", "decayed"] = setting(default="previous", init=False)

    # -- what a rule may define ----------------------------------------------------------------------------------------

    weight_names: ClassVar[tuple[str, ...]] = ()  #: the learner's fast weights, known when `build` is called
    has_token_steps = False  #: whether `token_steps` gives any, known once the parameters are made

    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        """Creates outer-loop parameters (θ_lr, τ, gates), if the rule has any."""

    @abstractmethod
    def gates(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[Gates | DataGates, Tensors]:
        """`x` `[B, T, D]` to the rule's gates, and what the next call needs. `state` is empty at the start.

        A rule with `updates = False` returns `DataGates`, all others return `Gates`.
        """

    def prepare(
        self, views: Views, gates: Gates, x: Tensor, state: Tensors, ctx: Context
    ) -> tuple[Views, Gates, Tensors]:
        """Views and gates as they enter the inner loop, and the state for the next call. For rules whose gates depend
        on the views (a step size from the key, a preconditioner), or that change the views. `state` is what `gates`
        returned, with the entries of the last call."""
        return views, gates, state

    def gates_at(self, gates: Gates, committed: Committed) -> Gates:
        """The gates of `n` tokens `[B, H, n]`, computed from the gates of `gates` and the weights of the last commit.

        Called in every inner step. It may change any gate that `gates` returns, and must treat each token by itself.
        Tokens with η = 0, which includes padding, keep their gates. A rule that defines it cannot use kernels or the
        solved form.
        """
        return gates

    def token_steps(self) -> Tensor | None:
        """τ, `[1 or H, b]`: then `W_t = W_a + τ_{pos mod b} Σ_s −η_s G_s` over the open mini-batch. None: τ = 1."""
        return None

    def begin(self, memory: Memory) -> Memory:
        """The memory at the start of a sequence: W0 in every slot that holds weights."""
        return memory

    def pool_gates(self, memory: Memory, gates: Gates) -> Memory:
        """Accumulates statistics of the gates of `n` tokens for the next commit."""
        return memory

    def permutation(self, count: int, device: torch.device) -> Tensor | None:
        """`[1, H, T]` order in which a `final` read takes the tokens, one part a step; None: every step takes all."""
        return None

    # -- the rule: what is carried, and what becomes of it -------------------------------------------------------------

    @property
    def slots(self) -> tuple[str, ...]:
        """The tensors carried for every fast weight (`metattt.memory`)."""
        has_phase, sees_commit = self.accumulates, self.read in ("previous", "committed") or self.state_dependent
        names = ["commit"] if has_phase or sees_commit or self.anchor == "minibatch" else []
        names += ["anchor"] if self.anchor == "batch" else []
        names += ["origin"] if self.decay_to_init else []
        names += ["update"] if has_phase else ["weights"]
        return (*names, "momentum") if self.has_momentum else tuple(names)

    def current(self, memory: Memory, filled: int | Tensor) -> Tensors:
        """The newest weights W_t by name, when `filled` tokens of the open mini-batch have been seen (`[B]` or a
        number)."""
        base, update = memory[newest(memory)], memory.get("update")
        if update is None:
            return base
        return linear_rule.stepped(base, update, self.token_steps(), filled, self.max_norm)

    def commit(self, memory: Memory, filled: int | Tensor) -> Memory:
        """The memory after a mini-batch is complete: `W_a ← W_t`, and a new one begins."""
        kept = {slot: weights for slot, weights in memory.items() if slot in ("anchor", "origin", "momentum")}
        return {"commit": self.current(memory, filled), **kept}

    def coefficients(
        self, gates: Gates, phase: int | Tensor, carried: Collection[str], read: str | None
    ) -> Coefficients:
        """The rule over `n` tokens of one mini-batch.

        Args:
            gates: `[B, H, n]` each, fp32 or wider.
            phase: place of the first token in its mini-batch; `[B]` if it differs, and then n = 1.
            carried: slots at hand; an absent `update` or `momentum` is zero, absent `weights` are the commit or the
                anchor.
            read: which rows to compute, `inclusive` or `exclusive`; None: only the new memory.
        """
        eta, alpha, beta, kappa, *_ = gates
        if self.accumulates:
            steps = None if read is None else self.token_steps()
            return linear_rule.token_step_coefficients(eta, steps, phase, "update" in carried, read)
        if alpha is None and beta is None and kappa is None:
            return linear_rule.plain_coefficients(eta, newest(carried), read)
        return linear_rule.general_coefficients(
            eta, alpha, beta, kappa, newest(carried), read, "momentum" in carried, self.nesterov, self.decay_to_init
        )

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

    def check_settings(self) -> None:
        super().check_settings()
        check_together(self.mini_batch_size, self.anchor, self.read, self.steps, self.gradient_at)

    def bound(self, **attributes: object) -> InnerOptimizer:
        """A copy of this rule with other attributes: token steps that are computed already, or another size."""
        bound = object.__new__(type(self))
        bound.__dict__.update(self.__dict__, **attributes)
        return bound

    @property
    def accumulates(self) -> bool:
        """Whether the sum of the open mini-batch is stored apart from the weights, because it is scaled for each token
        (τ, clipping)."""
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
    def period(self) -> int | None:
        """Tokens after which the rule repeats itself, or None if all tokens are alike to it."""
        return self.mini_batch_size if "commit" in self.slots or self.read == "block" else None

    @property
    def block(self) -> int:
        """Tokens per step of the scan: a mini-batch, or any number if the rule has no period."""
        return self.period or self.compute_chunk or 64
