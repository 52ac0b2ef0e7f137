"""The composer: Task x Learner x InnerOptimizer -> a sequence layer that learns while it reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from metattt.component import unchanged_on_error
from metattt.errors import MetaTTTError, check_choice, check_flag
from metattt.inner.loop import InnerLoop
from metattt.inner.packing import Packing
from metattt.inner.plan import Plan
from metattt.inner.planning import make_plan
from metattt.inner.tokens import Tokens
from metattt.kernels.base import kernels
from metattt.layer_checks import check_kept, check_memory, check_parts, fitted
from metattt.learners.base import Learner, NonParametric
from metattt.modules import draw_xavier, projection, transformed
from metattt.optimizers.base import Gates, InnerOptimizer
from metattt.output import GATES, check_output, make_gate, make_norm
from metattt.sequence_layer import Call, SequenceLayer
from metattt.state import Context, DataGates, State, Tensors
from metattt.tasks.base import Task, Views

PARTS = ("task", "learner", "optimizer")


class TTTLayer(SequenceLayer):
    """A sequence layer whose hidden state is a learner, trained on every token it reads; called like `torch.nn.GRU`.

    ```
    k, v, q = task.views(x)              # training, label and test view of each token
    η, α, β, κ = optimizer.gates(x)
    W_t = rule(W, ∇ task.loss(f(k_t; W), v_t))
    y_t = f(q_t; W_t)                    # then norm, gate and output projection
    ```

    Args:
        dim: model width D.
        num_heads: heads H, each with a learner of its own; D must be a multiple.
        task: what is learned from a token. Made for this layer, as are the next two (their parameters are created here).
        learner: the hidden state, and how it predicts.
        optimizer: how a gradient moves it, and which weights a query reads.
        output_norm: of the predictions, before the output projection: true is LayerNorm over D, `rms` RMSNorm over D, `head_rms`
            and `head_layer` RMSNorm and LayerNorm of every head by itself.
        norm_eps: ε of this norm, added to the mean square; None: 1e-6 for LayerNorm over D, 1e-5 for the others.
        norm_eps_scale: `head_dim` multiplies ε by the width d of a head: the norm of predictions for q/√d with ε is the norm
            of predictions for q with d ε, so layers have this that are published with queries of q/√d.
        gate: multiply by gelu(x Wg) (true), silu(x Wg) or sigmoid(x Wg) before the output projection.
        gate_rank: of Wg, `head_dim`: the width of a head, with a bias after its second map; None: full, without bias.
        output_bias: a bias in the output projection.
        init: of the weights of all projections: `normal` N(0, 0.02²), as in the published TTT models, or `xavier`, uniform
            with the variance 2/(d_in + d_out), as in the Transformer, whose predictions have no norm: 0.02 is then too small for
            narrow models.
        form: how the inner loop is computed (`auto`, `fused`, `dual`, `summed`, `primal`); every form gives the same
            result. `fused` takes a kernel or refuses; `auto` takes one where there is one, and `dual` elsewhere.
        outer: what the outer loop differentiates. `exact`: everything, through the inner gradients G too. `first_order`:
            every G is a constant, as in first-order MAML (arXiv 1703.03400): no second-order graph; k, v and the task's
            parameters get no derivative from them, W0, the gates and the read keep theirs. `implicit`: the fixed point
            of a converged inner loop (arXiv 1909.04630), for `optimizer.read=final` alone; see
            `metattt.inner.implicit`.
        group_size: mini-batches recomputed together in the backward pass; None takes √(T/b), 0 stores everything.

    Raises:
        MetaTTTError: widths that do not fit, or parts that cannot be combined exactly.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        task: Task,
        learner: Learner,
        optimizer: InnerOptimizer,
        *,
        output_norm: bool | str = True,
        norm_eps: float | None = None,
        norm_eps_scale: Literal["head_dim", "none"] = "none",
        gate: bool | str = False,
        gate_rank: int | str | None = None,
        output_bias: bool = False,
        form: str = "auto",
        group_size: int | None = None,
        outer: Literal["exact", "first_order", "implicit"] = "exact",
        init: Literal["normal", "xavier"] = "normal",
    ):
        super().__init__()
        check_parts(dim, num_heads, task, learner, optimizer)
        check_flag("layer.output_bias", output_bias)
        check_output(output_norm, gate, gate_rank, norm_eps, norm_eps_scale)
        check_choice("layer.init", init, ("normal", "xavier"))
        head = dim // num_heads
        self.dim, self.num_heads, self.group_size = dim, num_heads, group_size
        self._form, self.outer = form, outer
        with unchanged_on_error(task, learner, optimizer):
            self.task = task.setup(dim, num_heads, head)
            self.learner = learner.setup(num_heads, self.task.input_dim, head)
            if learner.step_scales and optimizer.scale_free:
                raise MetaTTTError(
                    f"learner.step_scale multiplies gradients, whose length {type(optimizer).__name__} does not look at: "
                    "set learner.step_scale=null"
                )
            self.optimizer = optimizer.setup(dim, num_heads, head, tuple(learner.init))
            self._plan = self._planned()
        self.norm = make_norm(output_norm, dim, head, norm_eps, norm_eps_scale)
        self.gate = make_gate(gate, gate_rank, dim, head)
        self.gate_function = gate if isinstance(gate, str) else "gelu"
        self.out = projection(dim, dim, output_bias)
        if init == "xavier":
            draw_xavier(self.task, self.gate, self.out)

    task: Task
    learner: Learner
    optimizer: InnerOptimizer
    norm: nn.Module | None
    out: nn.Linear
    gate: nn.Module | None
    _plan: Plan

    # -- one call ------------------------------------------------------------------------------------------------------

    def run(
        self, x: Tensor, state: State, packing: Packing | None = None, donate_state: bool = False
    ) -> tuple[Tensor, State]:
        """What the three parts make of the tokens; see `SequenceLayer.run`."""
        call = self.call(x, state, packing, donate_state)
        views, gates, *carried = self.tokens(x, state, call.ctx)
        y, state = self.learn(views, gates, state, call, carried)
        return self.output(x, y), state

    def tokens(
        self, x: Tensor, state: State, ctx: Context, projected: tuple[Tensor, ...] | None = None
    ) -> tuple[Views, Gates, Tensors, Tensors]:
        """What the layer learns of the tokens `x` `[B, T, D]`, before any of it is learned.

        Args:
            projected: what `task.project(x)` returns, where a caller has it already (see `Task.borrow`).

        Returns:
            Views; gates (`Gates`, or `DataGates` for a learner that keeps data) in fp32 or wider; and what the task and
            the optimizer carry on.
        """
        given = {} if projected is None else {"projected": projected}  # tasks that share nothing do not take it
        views, task_state = self.task.views(x, state.task, ctx, **given)
        if not self.learner.takes_groups and views.k.shape[1] != views.q.shape[1]:
            views = views.for_every_head()
        found, rule_state = self.optimizer.gates(x, state.optimizer, ctx)
        gates = cast(Gates, found)
        if self.learner.has_weights:
            views, gates, rule_state = self.optimizer.prepare(views, gates, x, rule_state, ctx)
        views, gates = fitted(self, views, gates, (x.shape[0], self.num_heads, x.shape[1]))
        if any(state[2:]):  # an earlier call has returned it
            check_kept(self.task, state.task, task_state)
            check_kept(self.optimizer, state.optimizer, rule_state)
        if views.weight is not None and self.learner.has_weights:
            eta = gates.eta if gates.eta.ndim == 4 else gates.eta.unsqueeze(-1)
            gates = gates._replace(eta=eta * views.weight)
        accum_dtype = torch.promote_types(views.k.dtype, torch.float32)
        if gates[0].dtype != accum_dtype or [gate for gate in gates[1:] if gate is not None]:
            gates = type(gates)(*[None if gate is None else gate.to(accum_dtype) for gate in gates])  # type: ignore[arg-type]
        return views, gates, task_state, rule_state

    def learn(
        self, views: Views, gates: Gates | DataGates, state: State, call: Call, carried: Sequence[Tensors] = ({}, {})
    ) -> tuple[Tensor, State]:
        """Learns the tokens and answers their queries: `[B, H, T, d]`, and the state after them, with what the task and the
        optimizer have `carried`."""
        task, rule = carried
        if isinstance(self.learner, NonParametric):
            y, data = self.learner.scan(views, state.learner, call.ctx, gates.masked(call.ctx.valid))  # type: ignore[union-attr]
            return y, State(call.after, 0, {}, task, rule, data)
        alone = views if views.weight is None else views._replace(weight=None)  # which is in η
        tokens = Tokens(alone, cast(Gates, gates))
        y, weights, phase, data = self.inner.run(tokens, state, call.after, call.ctx, call.packing, call.donate_state)
        return y, State(call.after, phase, weights, task, rule, data)

    def output(self, x: Tensor, y: Tensor) -> Tensor:
        """The outputs `[B, T, D]`: the predictions `y` `[B, H, T, d]` of all heads after the norm, the gate of the tokens `x`
        and the projection."""
        y = y.transpose(1, 2).flatten(2).to(x.dtype)
        if self.norm is not None:
            y = self.norm(y)
        if self.gate is not None:
            y = y * GATES[self.gate_function](self.gate(x))
        return self.out(y)

    def check_state(self, x: Tensor, state: Any) -> None:
        super().check_state(x, state)
        check_memory(self, x, state)

    # -- what is known of the parts ------------------------------------------------------------------------------------

    @property
    def causal(self) -> bool:  # type: ignore[override]
        """Whether no output depends on a later token, as the parts declare it."""
        return self.task.causal and self.learner.causal and self.optimizer.causal

    @property
    def mini_batch_size(self) -> int:  # type: ignore[override]
        """b of the inner optimizer (tokens)."""
        return self.optimizer.mini_batch_size

    @property
    def inner(self) -> InnerLoop:
        """The inner loop over the layer's parts as they are now."""
        return InnerLoop(self.task, self.learner, self.optimizer, self.plan, self.group_size)

    @property
    def plan(self) -> Plan:
        """How the inner loop is computed; made anew when a setting of a part has been changed.

        Raises:
            MetaTTTError: the parts, as they have been changed, cannot be combined exactly.
        """
        if torch.compiler.is_compiling():  # what is looked at would be a guard
            return self._plan
        if self._plan.basis != self._basis() and not transformed():
            self.__dict__["_plan"] = self._planned()
        return self._plan

    @property
    def form(self) -> str:
        """How the inner loop is computed: `primal`, `dual`, `summed`, `fused`, or `scan` for a learner without
        weights."""
        return self.plan.shown

    def _planned(self) -> Plan:
        with torch.inference_mode(False):  # the parts are looked at with derivatives
            width = self.task.input_dim
            parts = self.task, self.learner, self.optimizer
            plan = make_plan(self._form, *parts, self.dim, self.num_heads, width, kernels(), self.outer)
        plan.basis = self._basis()
        return plan

    def _basis(self) -> tuple[object, ...]:
        """What a plan rests on: settings, methods and hooks of the parts."""
        task, learner, rule = self.task, self.learner, self.optimizer
        hooks = len(learner._forward_hooks) + len(learner._forward_pre_hooks)
        return (
            task.changes,
            learner.changes,
            rule.changes,
            hooks,
            type(task).loss,
            type(learner).forward,
            type(learner).predict,
            self.outer,
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in PARTS and name in self._modules and not getattr(value, "_is_replica", False):
            raise MetaTTTError(
                f"layer.{name} was made together with the other parts and cannot be replaced: build a new TTTLayer"
            )
        super().__setattr__(name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__["_plan"] = self._planned()  # a plan is not written to disk

    def extra_repr(self) -> str:
        outer = "" if self.outer == "exact" else f", outer={self.outer!r}"
        return f"dim={self.dim}, num_heads={self.num_heads}, form={self.form!r}{outer}"
