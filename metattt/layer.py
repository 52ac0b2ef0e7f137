"""The composer: Task x Learner x InnerOptimizer -> a sequence layer that learns while it reads."""

from __future__ import annotations

from typing import Literal, cast

from torch import Tensor

from metattt.component import unchanged_on_error
from metattt.inner.final import read_only
from metattt.inner.packing import Call, Packing
from metattt.inner.tokens import Tokens, fitted
from metattt.learners.non_parametric import NonParametric
from metattt.modules import draw_xavier, projection
from metattt.optimizers.base import Gates
from metattt.output import GATES, make_gate, make_norm
from metattt.planned import PlannedLayer
from metattt.setting import setting
from metattt.state import Context, DataGates, State
from metattt.tasks.base import Views


class TTTLayer(PlannedLayer):
    """A sequence layer whose hidden state is a learner, trained on every token it reads; called like `torch.nn.GRU`.

    ```
    k, v, q = task.views(x)              # training, label and test view of each token
    η, α, β, κ = optimizer.gates(x)      # β = 0 and α = κ = 1 where a rule has none
    G_t = ∇ task.loss(f(k_t; W), v_t)    # f is the learner; `optimizer.anchor` says at which W
    S_t = β_t S_{t−1} − η_t G_t
    W_t = α_t W_{t−1} + κ_t S_t
    y_t = f(q_t; W_t)                    # then norm, gate and output projection
    ```

    Tasks with an erase view p (Comba, RWKV-7) use `kᵀ(p W − v)` instead of the gradient. Learners without weights
    (attention, MesaNet) keep data instead of W, and read it by their own `scan`.

    Args:
        dim: model width D.
        num_heads: heads H, each with a learner of its own.
        of_heads: heads that share D, which must be a multiple: a head is d = D/of_heads wide. None: `num_heads`. The
            predictions of all heads are H d wide, and the output projection makes D of them.
        task: what is learned from a token. Made for this layer, as are the next two (their parameters are created
            here).
        learner: the hidden state, and how it predicts.
        optimizer: how a gradient moves it, and which weights a query reads.
        output_norm: of the predictions, before the output projection: true is LayerNorm over D, `rms` RMSNorm over D,
            `head_rms` RMSNorm of every head by itself, with one scale `[d]` for all heads, `head_layer` LayerNorm of
            every head, with a scale and an offset `[D]`.
        norm_eps: ε of this norm, added to the mean square; None: 1e-6 for LayerNorm over D, 1e-5 for the others.
        norm_eps_scale: `head_dim` multiplies ε by the width d of a head: the norm of predictions for q/√d with ε is the
            norm of predictions for q with d ε. Set for layers whose published code reads with q/√d.
        gate: multiply by gelu(x Wg) (true), silu(x Wg) or sigmoid(x Wg) before the output projection.
        gate_rank: of Wg, `head_dim`: the width of a head, with a bias after its second map; None: full, without bias.
        output_bias: a bias in the output projection.
        init: of the weights of all projections: `normal` N(0, 0.02²), as in the published TTT models, or `xavier`,
            uniform with the variance 2/(d_in + d_out), as in the Transformer, whose predictions have no norm: 0.02 is
            then too small for narrow models.
        form: how the inner loop is computed (`auto`, `fused`, `dual`, `summed`, `primal`); every form gives the same
            result. `fused` uses a kernel or raises an error; `auto` uses a kernel if there is one, otherwise `dual`.
        outer: what the outer loop differentiates. `exact`: everything, through the inner gradients G too.
            `first_order`: every G is a constant, as in first-order MAML (arXiv 1703.03400): no second-order graph; k, v
            and the task's parameters get no derivative from them, W0, the gates and the read keep theirs.
        group_size: mini-batches recomputed together in the backward pass; None takes √(T/b), 0 stores everything.

    Raises:
        MetaTTTError: widths that do not fit, or parts that cannot be combined exactly.
    """

    # dim, num_heads, the parts, form, group_size and outer are declared in the base classes
    output_norm: bool | Literal["head_rms", "head_layer", "rms"] = setting(
        default=True, advice=" (LayerNorm)", fixed=True
    )
    norm_eps: float | None = setting(default=None, above=0, fixed=True)
    norm_eps_scale: Literal["head_dim", "none"] = setting(default="none", fixed=True)
    output_gate: bool | Literal["gelu", "silu", "sigmoid"] = setting(
        default=False, alias="gate", advice=" (gelu)", fixed=True
    )
    gate_rank: int | Literal["head_dim"] | None = setting(
        default=None, advice=", head_dim, or null for a full projection", fixed=True
    )
    output_bias: bool = setting(default=False, fixed=True)
    init: Literal["normal", "xavier"] = setting(default="normal", kw_only=True, fixed=True)

    def create_modules(self) -> None:
        dim, head, width = self.dim, self.head_dim, self.num_heads * self.head_dim
        with unchanged_on_error(self.task, self.learner, self.optimizer):
            self.task.setup(dim, self.num_heads, head)
            self.learner.setup(self.num_heads, self.task.input_dim, head)
            self.optimizer.setup(dim, self.num_heads, head, tuple(self.learner.init))
            self._plan = self._planned()
            self.norm = make_norm(self.output_norm, width, head, self.norm_eps, self.norm_eps_scale)
            self.gate = make_gate(self.output_gate, self.gate_rank, dim, width, head)
        self.gate_function: str = self.output_gate if isinstance(self.output_gate, str) else "gelu"
        self.out = projection(width, dim, self.output_bias)
        if self.init == "xavier":
            draw_xavier(self.task, self.gate, self.out)

    # -- one call ------------------------------------------------------------------------------------------------------

    def run(
        self, x: Tensor, state: State, packing: Packing | None = None, donate_state: bool = False
    ) -> tuple[Tensor, State]:
        """One call: `tokens`, the inner loop, `output`; see `SequenceLayer.run`."""
        call = self.call(x, state, packing, donate_state)
        views, gates, state = self.tokens(x, state, call.ctx)
        y, state = self.inner_loop(views, gates, state, call)
        return self.output(x, y), state

    def tokens(
        self, x: Tensor, state: State, ctx: Context, projected: tuple[Tensor, ...] | None = None
    ) -> tuple[Views, Gates, State]:
        """Views and gates of the tokens `x` `[B, T, D]`; nothing is learned yet.

        Args:
            projected: what `task.project(x)` returns, where a caller has it already (see `Task.borrow`).

        Returns:
            Views; gates (`Gates`, or `DataGates` for a learner that keeps data) in fp32 or wider; and the state, with
            what the task and the optimizer carry to the next call.
        """
        given = {} if projected is None else {"projected": projected}  # tasks that share nothing do not take it
        views, task_state = self.task.views(x, state.task, ctx, **given)
        if not self.learner.takes_groups and views.k.shape[1] != views.q.shape[1]:
            views = views.for_every_head()
        gates, rule_state = self.optimizer.gates(x, state.optimizer, ctx)
        if self.learner.has_weights:
            views, gates, rule_state = self.optimizer.prepare(views, cast(Gates, gates), x, rule_state, ctx)
        shape = x.shape[0], self.num_heads, x.shape[1]
        views, gates = fitted(views, gates, self.learner, self.optimizer, shape)
        if any(state[2:]):  # an earlier call has returned it
            self.check_carried(state, task_state, rule_state)
        # (What `_replace` makes, torch 2.11 loses where a compiled function is interrupted.)
        return views, gates, State(*state[:3], task_state, rule_state, state.learner)

    def inner_loop(self, views: Views, gates: Gates | DataGates, state: State, call: Call) -> tuple[Tensor, State]:
        """Learns the tokens and reads their queries: predictions `[B, H, T, d]` and the new state."""
        if isinstance(self.learner, NonParametric):
            masked = cast(DataGates, gates).masked(call.ctx.valid)
            y, data = self.of_data(self.learner.scan, views, state.learner, call.ctx, masked)
            return y, State(call.after, 0, {}, state.task, state.optimizer, data)
        alone = views if views.weight is None else views._replace(weight=None)  # which is in η
        return self.inner.run(Tokens(alone, cast(Gates, gates)), state, call)

    def answer(self, x: Tensor, state: State, packing: Packing | None = None) -> Tensor:
        """Outputs for tokens that are read and not learned; see `SequenceLayer.answer`."""
        ctx = self.call(x, state, packing).ctx
        views, gates, *_ = self.tokens(x, state, ctx)
        return self.output(x, self.predictions(views, gates, state, ctx))

    def predictions(self, views: Views, gates: Gates | DataGates, state: State, ctx: Context) -> Tensor:
        """What the learners of all heads predict for those queries, `[B, H, T, d]`; `output` makes outputs of it."""
        if isinstance(self.learner, NonParametric):
            return self.of_data(self.learner.read, views, state.learner, ctx, gates)
        return read_only(self.inner, views.q, state, cast(Gates, gates).eta.dtype)

    def output(self, x: Tensor, y: Tensor) -> Tensor:
        """The outputs `[B, T, D]`: the predictions `y` `[B, H, T, d]` of all heads after the norm, the gate of the
        tokens `x` and the projection."""
        y = y.transpose(1, 2).flatten(2).to(x.dtype)
        if self.norm is not None:
            y = self.norm(y)
        if self.gate is not None:
            y = y * GATES[self.gate_function](self.gate(x))
        return self.out(y)
