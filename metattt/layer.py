"""The composer: Task x Learner x InnerOptimizer -> a sequence layer that learns while it reads."""

from __future__ import annotations

from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn

from metattt.component import unchanged_on_error
from metattt.errors import MetaTTTError, check_choice, check_flag, check_integer
from metattt.inner.faults import FAILURES, explain
from metattt.inner.inspect import make_plan
from metattt.inner.loop import InnerLoop, Result
from metattt.inner.packing import Packing, check_flags, pack
from metattt.inner.plan import Plan
from metattt.inner.tokens import Tokens
from metattt.kernels.base import kernels
from metattt.learners.base import Learner, NonParametric
from metattt.modules import check_finite, draw_xavier, projection, transformed
from metattt.optimizers.base import Gates, InnerOptimizer
from metattt.output import GATES, check_output, make_gate, make_norm
from metattt.room import check_room
from metattt.state import Context, DataGates, State, Tensors
from metattt.tasks.base import Task, Views

PARTS = ("task", "learner", "optimizer")


class Early(Protocol):
    """Finds what a layer goes on from while the layer reads: where its states need not wait for each other."""

    def views(
        self, layer: TTTLayer, x: Tensor, state: State, ctx: Context
    ) -> tuple[State, tuple[Tensor, ...] | None]:
        """The state with what the task goes on from, and the projections of `x` `[B, T, D]` where they are made already."""

    def weights(
        self, layer: TTTLayer, tokens: Tokens, state: State, ctx: Context, packing: Packing | None
    ) -> tuple[Tokens, State]:
        """What the inner loop reads, and the state with the weights to go on from."""


class TTTLayer(nn.Module):
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
        output_norm: of the answers, before the output projection: true is LayerNorm over D, `rms` RMSNorm over D, `head_rms`
            and `head_layer` RMSNorm and LayerNorm of every head by itself.
        norm_eps: ε of this norm, added to the mean square; None: 1e-6 for LayerNorm over D, 1e-5 for the others.
        norm_eps_scale: `head_dim` multiplies ε by the width d of a head: the norm of answers to q/√d with ε is the norm
            of answers to q with d ε, so layers have this that are published with queries of q/√d.
        gate: multiply by gelu(x Wg) (true), silu(x Wg) or sigmoid(x Wg) before the output projection.
        gate_rank: of Wg, `head_dim`: the width of a head, with a bias after its second map; None: full, without bias.
        output_bias: a bias in the output projection.
        init: of the weights of all projections: `normal` N(0, 0.02²), as in the published TTT models, or `xavier`, uniform
            with the variance 2/(d_in + d_out), as in the Transformer, whose answers have no norm: 0.02 is then too small for
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
        check_integer("dim", dim)
        check_integer("num_heads", num_heads)
        check_room(dim * dim, f"a layer of dim={dim}", "lower dim")
        check_flag("layer.output_bias", output_bias)
        check_output(output_norm, gate, gate_rank, norm_eps, norm_eps_scale)
        check_choice("layer.init", init, ("normal", "xavier"))
        for key, part, kind in (("task", task, Task), ("learner", learner, Learner), ("optimizer", optimizer, InnerOptimizer)):
            if not isinstance(part, kind):
                raise MetaTTTError(f"layer.{key} is a {type(part).__name__}: it must be a {kind.__name__}, set {key}=<name>")
        if dim % num_heads:
            raise MetaTTTError(
                f"num_heads={num_heads} does not divide dim={dim}: choose num_heads from {_divisors(dim)}"
            )
        if learner.has_weights != optimizer.updates:
            wrong = "needs a rule that updates" if learner.has_weights else "keeps its data itself"
            right = "minibatch" if learner.has_weights else "append"
            raise MetaTTTError(
                f"{type(learner).__name__} {wrong}, not {type(optimizer).__name__}: set optimizer={right}"
            )
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

    refuse_nan = (
        True  #: NaN in `x` is a mistake; False where somebody looks at what comes out (a training run at its loss)
    )

    @property
    def causal(self) -> bool:
        """Whether no output depends on a later token, as the parts declare it."""
        return self.task.causal and self.learner.causal and self.optimizer.causal

    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        *,
        mask: Tensor | None = None,
        reset: Tensor | None = None,
        packing: Packing | None = None,
        in_place: bool = False,
        early: Early | None = None,
        projected: tuple[Tensor, ...] | None = None,
    ) -> tuple[Tensor, State]:
        """Reads the tokens `x` and returns the outputs and the state to go on from.

        Args:
            x: `[B, T, D]`.
            state: what the previous call returned; None starts from W0. Calls may cut a sequence anywhere.
            mask: `[B, T]` bool, True for real tokens. Padding may stand anywhere and changes nothing; its outputs are
                0.
            reset: `[B, T]` bool, True where a packed document starts: the state begins again from W0.
            packing: what `mask` and `reset` say, worked out once for many layers; then `x` is in its order, and so is
                the output.
            in_place: the caller gives up `state`, and its weights may be written over (decoding without derivatives).
            early: finds what to go on from while the layer reads (another process may have it); `state` then only says
                where the tokens stand.
            projected: what the task would project `x` to, where another layer has done it (`Task.borrow`).

        Returns:
            Outputs `[B, T, D]` and the new state.

        Raises:
            MetaTTTError: shapes, types or devices that do not fit, a state of another layer or batch size, or NaN in
                `x` (checked on CPU, if `refuse_nan`).
        """
        try:
            return self._read(x, state, mask, reset, packing, in_place, early, projected)
        except FAILURES as error:
            explain(error, x, self.parameters(), state, {"mask": mask, "reset": reset})
            raise

    def _read(
        self,
        x: Tensor,
        state: State | None,
        mask: Tensor | None,
        reset: Tensor | None,
        packing: Packing | None,
        in_place: bool,
        early: Early | None,
        projected: tuple[Tensor, ...] | None,
    ) -> tuple[Tensor, State]:
        self._check_tokens(x, mask, reset)
        placed = packing is not None
        if packing is not None:
            x = packing.clear(x)
        elif mask is not None or reset is not None:
            packing = pack(mask, reset, x.device)
            x = x if packing is None else packing.sort(x)
        if self.refuse_nan:
            check_finite(x)
        given = state
        if state is None:
            pos = x.new_zeros(x.shape[0], dtype=torch.long) if packing is None else packing.start
            state = State(pos, 0, {}, {}, {}, {})
        elif early is None:
            self._check_state(x, state)
        ctx, pos = self.context(x, state, packing)
        if early is not None:
            state, projected = early.views(self, x, state, ctx)
        views, gates, task_state, rule_state = self.observe(x, state, ctx, projected)
        if given is not None and early is None:
            self._check_kept(given, task_state, rule_state)
        if isinstance(self.learner, NonParametric):
            if views.p is not None or views.b is not None or views.k.ndim != 4:
                raise MetaTTTError(
                    f"{type(self.learner).__name__} keeps its data, and has no weights that an erase view or several pairs "
                    "a token could change: set learner=linear_map"
                )
            if not isinstance(gates, DataGates):
                raise MetaTTTError(
                    f"{type(self.optimizer).__name__}.gates returned {type(gates).__name__}: a rule with updates = False "
                    "must return DataGates"
                )
            y, data = self.learner.scan(views, state.learner, ctx, gates.masked(ctx.valid))
            read = Result(y, {}, 0, data)
        else:
            if not isinstance(gates, Gates):
                raise MetaTTTError(
                    f"{type(self.optimizer).__name__}.gates returned {type(gates).__name__}: a rule that updates weights must "
                    "return Gates"
                )
            tokens = Tokens(*views[:3], *gates, views.p, views.b)  # type: ignore[arg-type]
            if early is not None:
                tokens, state = early.weights(self, tokens, state, ctx, packing)
            read = self.inner.read(tokens, state, pos, ctx, packing, in_place)
        y = read.y.transpose(1, 2).flatten(2).to(x.dtype)
        if self.norm is not None:
            y = self.norm(y)
        if self.gate is not None:
            y = y * GATES[self.gate_function](self.gate(x))
        y = self.out(y)
        if packing is not None:
            y = packing.blank(y) if placed else packing.restore(packing.blank(y))
        return y, State(pos, read.phase, read.weights, task_state, rule_state, read.learner)

    def observe(
        self, x: Tensor, state: State, ctx: Context, projected: tuple[Tensor, ...] | None = None
    ) -> tuple[Views, Gates, Tensors, Tensors]:
        """Views and gates (`Gates`, or `DataGates` for a learner that keeps data) of the tokens, gates in fp32 or wider,
        and what the task and the optimizer carry on."""
        given = {} if projected is None else {"projected": projected}  # tasks that share nothing do not take it
        views, task_state = self.task.views(x, state.task, ctx, **given)
        if not self.learner.takes_groups and views.k.shape[1] != views.q.shape[1]:
            views = views.for_every_head()
        found, rule_state = self.optimizer.gates(x, state.optimizer, ctx)
        gates = cast(Gates, found)
        if self.learner.has_weights:
            views, gates, rule_state = self.optimizer.prepare(views, gates, x, rule_state, ctx)
        _check_views(views)
        if self.learner.has_weights:
            views, gates = _for_every_token(views, gates, (x.shape[0], self.num_heads, x.shape[1]))
        if views.weight is not None and self.learner.has_weights:
            eta = gates.eta if gates.eta.ndim == 4 else gates.eta.unsqueeze(-1)
            gates = gates._replace(eta=eta * views.weight)
        wide = torch.promote_types(views.k.dtype, torch.float32)
        if gates[0].dtype != wide or [gate for gate in gates[1:] if gate is not None]:
            gates = type(gates)(*[None if gate is None else gate.to(wide) for gate in gates])  # type: ignore[arg-type]
        return views, gates, task_state, rule_state

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
        if torch.compiler.is_compiling() or transformed():  # what is looked at would be a guard
            return self._plan
        if self._plan.basis != self._basis():
            self.__dict__["_plan"] = self._planned()
        return self._plan

    @property
    def form(self) -> str:
        """How the inner loop is computed: `primal`, `dual`, `summed`, `fused`, or `scan` for a learner without
        weights."""
        return self.plan.form

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
        if name == "group_size" and value is not None:
            check_integer("layer.group_size", value, 0, advice=" (0 stores everything, null chooses)")
        super().__setattr__(name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__["_plan"] = self._planned()  # a plan is not written to disk

    def context(self, x: Tensor, state: State, packing: Packing | None = None) -> tuple[Context, Tensor]:
        """What the parts are told of the tokens, and `[B]` tokens since the start of the document after the call."""
        count, size = x.shape[1], self.optimizer.mini_batch_size
        if packing is not None:
            positions, pos = packing.positions(state.pos)
            return Context(positions, packing.valid, packing.first, size), pos
        positions = state.pos.unsqueeze(1)
        if count > 1:
            positions = torch.arange(count, device=x.device) + positions
        return Context(positions, None, None, size), state.pos + count

    def extra_repr(self) -> str:
        outer = "" if self.outer == "exact" else f", outer={self.outer!r}"
        return f"dim={self.dim}, num_heads={self.num_heads}, form={self.form!r}{outer}"

    # -- what a caller can get wrong -----------------------------------------------------------------------------------

    def _check_tokens(self, x: Tensor, mask: Tensor | None, reset: Tensor | None) -> None:
        if x.ndim != 3 or x.shape[2] != self.dim or x.shape[1] == 0:
            raise MetaTTTError(f"x has shape {list(x.shape)}, expected [B, T, {self.dim}] with at least one token")
        if mask is not None or reset is not None:
            check_flags(x, mask, reset)

    def _check_state(self, x: Tensor, state: State) -> None:
        batch = x.shape[0]
        if state.pos.shape[0] != batch:
            raise MetaTTTError(
                f"the state is for {state.pos.shape[0]} sequences, x holds {batch}: start with state=None"
            )
        plan = self.plan
        wanted = {name: (batch, *shape) for name, shape in plan.weights.items()}
        for role, weights in state.weights.items():
            if role not in plan.roles or (role != "pool" and {name: w.shape for name, w in weights.items()} != wanted):
                found = {name: tuple(w.shape) for name, w in weights.items()}
                raise MetaTTTError(
                    f"the state is from another layer: it carries {role} {found}, this layer {plan.roles} {wanted}"
                )
        # Kernels are handed addresses: what they read there must be what they take it for.
        wide = torch.promote_types(x.dtype, torch.float32)
        types = {w.dtype for role, weights in state.weights.items() if role != "pool" for w in weights.values()}
        if state.pos.dtype != torch.long or types - {wide}:
            raise MetaTTTError(
                f"the state has positions of {state.pos.dtype} and weights of {types}, expected torch.int64 and {wide}: "
                "move it with State.to, which keeps integers, or start with state=None"
            )
        if state.phase is not None and (type(state.phase) is not int or state.phase < 0):
            raise MetaTTTError(
                f"the state stands at token {state.phase!r} of a mini-batch: it must be an integer from 0 on, or None"
            )
        if state.phase is not None and state.phase >= self.optimizer.mini_batch_size:
            raise MetaTTTError(
                f"the state is from another layer: it stands at token {state.phase} of {self.optimizer.mini_batch_size}"
            )
        if bool(state.weights) != self.learner.has_weights:
            raise MetaTTTError(f"the state is from another layer: this one's learner is {type(self.learner).__name__}")

    def _check_kept(self, given: State, task_state: Tensors, rule_state: Tensors) -> None:
        for part, before, after in ((self.task, given.task, task_state), (self.optimizer, given.optimizer, rule_state)):
            if (before or after) and _shapes(before) != _shapes(after):
                raise MetaTTTError(
                    f"the state is from another layer: {type(part).__name__} carries {_shapes(after)}, the state {_shapes(before)}"
                )


def _shapes(tensors: Tensors) -> dict[str, list[int]]:
    return {name: list(x.shape) for name, x in tensors.items()}


def _check_views(views: Views) -> None:
    """Refuses views that do not fit each other: a task of the user's own may give any."""
    k = views.k
    for name in ("p", "b"):
        view = getattr(views, name)
        if view is not None and view.shape != k.shape:
            raise MetaTTTError(f"the view {name} has shape {list(view.shape)}: it must be that of k, {list(k.shape)}")
    if views.weight is not None and views.weight.shape != k.shape[:-1]:
        found = list(views.weight.shape)
        raise MetaTTTError(f"the pairs' weight has shape {found}: it must be a number for each pair, {list(k.shape[:-1])}")
    if views.weight is not None and k.ndim != 5:
        raise MetaTTTError("a weight is for tokens with several pairs, k [B, H, T, n, d]: scale v, or the gate η, instead")


def _for_every_token(views: Views, gates: Gates, shape: tuple[int, ...]) -> tuple[Views, Gates]:
    """Views and gates with an entry for every sequence, head and token, `shape`: a part of the user's own may give one
    for all. Kernels are handed addresses, and read what the shapes say."""
    if views.q.shape[:3] != shape or views.k.shape[:3] != shape:
        found = {name: list(view.shape) for name, view in (("k", views.k), ("q", views.q))}
        raise MetaTTTError(f"the task gives views {found}: k and q must be [B, H, T, ·], {[*shape, '·']} here")
    pairs = views.k.shape[3:-1]
    if views.v.shape[: 3 + len(pairs)] != shape + pairs:
        views = views._replace(v=_spread("the view v", views.v, shape + pairs, views.v.shape[3 + len(pairs) :]))
    for name, gate in zip(gates._fields, gates, strict=True):  # (DataGates are refused later, by name)
        if gate is None:
            continue
        own = gate.shape[3:] if name in ("rates", "decay") or (name == "eta" and pairs) else ()
        if gate.shape != (*shape, *own):
            gates = gates._replace(**{name: _spread(f"the gate {name}", gate, shape, own)})
    return views, gates


def _spread(name: str, x: Tensor, shape: tuple[int, ...], own: tuple[int, ...]) -> Tensor:
    """`x` with the axes `shape` and its `own`, where it has 1 in place of the former."""
    wanted = (*shape, *own)
    if x.ndim != len(wanted) or any(n not in (1, size) for n, size in zip(x.shape, wanted, strict=True)):
        raise MetaTTTError(f"{name} has shape {list(x.shape)}: it must be {list(wanted)}, an axis may have length 1")
    return x.expand(wanted)


def _divisors(dim: int) -> str:
    return ", ".join(str(n) for n in range(1, dim + 1) if dim % n == 0)
