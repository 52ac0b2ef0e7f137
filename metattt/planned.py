"""A layer and its three parts: checks that they fit together, plans the inner loop, and checks states."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from metattt.component import assigned
from metattt.errors import MetaTTTError, check_heads
from metattt.inner.diagnostics import FAILURES
from metattt.inner.loop import InnerLoop
from metattt.inner.plan import Plan
from metattt.inner.planning import make_plan
from metattt.kernels.base import kernels
from metattt.learners.base import Learner
from metattt.memory import fits
from metattt.modules import transformed
from metattt.optimizers.base import InnerOptimizer
from metattt.sequence_layer import FSDP_CASTS, SequenceLayer
from metattt.setting import setting
from metattt.state import WHOLE_CALL, Context, State, Tensors
from metattt.tasks.base import Task, Views
from metattt.torch_private import saved_tensor_hooks


class PlannedLayer(SequenceLayer):
    """The part of `TTTLayer` that checks and plans; its settings are documented there."""

    num_heads: int = setting(fixed=True)
    task: Task = setting()
    learner: Learner = setting()
    optimizer: InnerOptimizer = setting()
    _form: str = setting(default="auto", kw_only=True, alias="form", fixed=True)
    group_size: int | None = setting(default=None, kw_only=True, least=0, advice=" (0 stores everything, null chooses)")
    outer: Literal["exact", "first_order"] = setting(default="exact", kw_only=True)
    of_heads: int | None = setting(default=None, kw_only=True, advice=", or null for num_heads", fixed=True)
    _plan: Plan = setting(init=False)

    def check_settings(self) -> None:
        super().check_settings()
        dim, num_heads, learner, optimizer = self.dim, self.num_heads, self.learner, self.optimizer
        for key, kind in (("task", Task), ("learner", Learner), ("optimizer", InnerOptimizer)):
            if not isinstance(part := getattr(self, key), kind):
                name = f"class ({part.__name__})" if isinstance(part, type) else type(part).__name__
                raise MetaTTTError(f"layer.{key} is a {name}: it must be of class {kind.__name__}, set {key}=<name>")
        check_heads(dim, self.of_heads or num_heads)
        if learner.has_weights != optimizer.updates:
            wrong = "needs a rule that updates" if learner.has_weights else "keeps its data itself"
            right = "minibatch" if learner.has_weights else "append"
            raise MetaTTTError(
                f"{type(learner).__name__} {wrong}, not {type(optimizer).__name__}: set optimizer={right}"
            )

    @property
    def causal(self) -> bool:  # type: ignore[override]
        """Whether no output depends on a later token, as the parts declare it."""
        return self.task.causal and self.learner.causal and self.optimizer.causal

    @property
    def mini_batch_size(self) -> int:  # type: ignore[override]
        """b of the inner optimizer (tokens)."""
        return self.optimizer.mini_batch_size

    @property
    def head_dim(self) -> int:
        """d, the width of a head."""
        return self.dim // (self.of_heads or self.num_heads)

    @property
    def inner(self) -> InnerLoop:
        """The inner loop over the layer's parts as they are now."""
        return InnerLoop(self.task, self.learner, self.optimizer, self.plan, self.group_size)

    @property
    def plan(self) -> Plan:
        """How the inner loop is computed; made again if a setting of a part has changed.

        Raises:
            MetaTTTError: the parts, as they have been changed, cannot be combined exactly.
        """
        if torch.compiler.is_compiling():  # what else is looked at would be a guard
            if self._plan.basis[:4] != (self.task.changes, self.learner.changes, self.optimizer.changes, self.outer):
                self._plan_outside_of_the_graph()
            return self._plan
        for part, module, before in self._plan.inside:
            now = assigned(module)
            if len(now) != len(before) or not all(map(operator.is_, now, before)):
                part.__dict__["changes"] = part.changes + 1
        if self._plan.basis != self._basis() and not transformed():
            self.__dict__["_plan"] = self._planned()
        return self._plan

    @torch.compiler.disable
    def _plan_outside_of_the_graph(self) -> None:
        self.__dict__["_plan"] = self._planned()

    @property
    def form(self) -> str:
        """How the inner loop is computed: `primal`, `dual`, `summed`, `fused`, or `scan` for a learner without
        weights."""
        return self.plan.shown

    def _planned(self) -> Plan:
        learner, rule, width = self.learner, self.optimizer, self.task.input_dim
        for part in (self.task, learner, rule):
            part.check_settings()  # which may have been assigned since
        if learner.step_scales and rule.scale_free:
            raise MetaTTTError(
                f"learner.step_scale multiplies gradients, whose length {type(rule).__name__} ignores: "
                "set learner.step_scale=null"
            )
        hooks = saved_tensor_hooks(False)  # of a checkpoint around the call: what is tried out here is none of its
        apart = nullcontext() if hooks is None else saved_tensors_hooks(lambda x: x, lambda x: x)
        with torch.inference_mode(False), apart:  # the parts are looked at with derivatives
            sizes = self.dim, self.num_heads, self.head_dim, width
            plan = make_plan(self._form, self.task, learner, rule, *sizes, kernels(), self.outer)
        plan.basis = self._basis()
        closed = plan.kernels or plan.linear  # what rests on tests of the task and the learner, and never on parameters
        plan.inside = [
            (part, module, assigned(module))
            for part in ((self.task, learner) if closed else ())
            for module in list(part.modules())[1:]
            if not isinstance(module, nn.ParameterDict) and not any(x is not None for x in module._parameters.values())
        ]
        return plan

    def _basis(self) -> tuple[object, ...]:
        """What a plan depends on: settings, methods and hooks of the parts."""
        task, learner = self.task, self.learner
        hooks = len(learner._forward_hooks) + len(learner._forward_pre_hooks)
        settings = task.changes, learner.changes, self.optimizer.changes, self.outer
        return *settings, hooks, type(task).loss, type(learner).forward, type(learner).predict

    def check_state(self, x: Tensor, state: Any) -> None:
        super().check_state(x, state)
        known, plan, size = self._plan, self.plan, self.mini_batch_size
        counted = plan is not known and plan.period and size < WHOLE_CALL and state.phase is not None
        if counted and (state.pos % size != state.phase).any():  # only in the first call after a setting has changed
            raise MetaTTTError(
                f"the state is at token {state.phase} of a mini-batch, and optimizer.mini_batch_size={size} was set "
                "since: set it before a sequence begins"
            )
        wanted = {name: (x.shape[0], *shape) for name, shape in plan.weights.items()}
        for slot, weights in state.weights.items():
            if slot not in plan.slots or not fits(slot, weights, wanted):
                found = {name: tuple(w.shape) for name, w in weights.items()}
                raise MetaTTTError(
                    f"the state is from another layer: it carries {slot} {found}, this layer {plan.slots} {wanted}"
                )
        # Kernels read memory directly, so types must be exact.
        accum_dtype = torch.promote_types(x.dtype, torch.float32)
        types = {w.dtype for slot, weights in state.weights.items() if slot != "pool" for w in weights.values()}
        if state.pos.dtype != torch.long or types - {accum_dtype}:
            raise MetaTTTError(
                f"the state has positions of {state.pos.dtype} and weights of {types}, expected torch.int64 and "
                f"{accum_dtype}: move it with State.to, which keeps integers, or start with state=None{FSDP_CASTS}"
            )
        if state.phase is not None and (type(state.phase) is not int or not 0 <= state.phase < size):
            raise MetaTTTError(f"the state is from another layer: it is at token {state.phase!r} of {size}")
        if (len(state.weights) > 0) != self.learner.has_weights:
            raise MetaTTTError(f"the state is from another layer: this one's learner is {type(self.learner).__name__}")

    def check_carried(self, state: State, *found: Tensors) -> None:
        """Checks that a state's entries of the task and the optimizer have the names and shapes of `found`.

        Raises:
            MetaTTTError: other names or shapes.
        """
        parts = (self.task, state.task), (self.optimizer, state.optimizer)
        for (part, before), after in zip(parts, found, strict=True):
            if len(before) != len(after) or any(
                n not in before or before[n].shape != x.shape for n, x in after.items()
            ):
                given, made = ({name: list(x.shape) for name, x in tensors.items()} for tensors in (before, after))
                kind = type(part).__name__
                raise MetaTTTError(f"the state is from another layer: {kind} carries {made}, the state {given}")

    def of_data(self, method: Callable[..., Any], views: Views, data: Tensors, ctx: Context, gates: Any) -> Any:
        """`scan` or `read` of a learner that keeps data.

        Raises:
            MetaTTTError: it fails on `data`, and runs without.
        """
        if torch.compiler.is_compiling():  # which cannot plan again inside of the graph
            return method(views, data, ctx, gates)
        _ = self.plan  # nothing else asks for it: settings that were assigned since are checked
        if not data:
            return method(views, data, ctx, gates)
        try:
            return method(views, data, ctx, gates)
        except FAILURES as error:
            if isinstance(error, torch.OutOfMemoryError) or "Inference tensors" in str(error):
                raise
            learner: Any = self.learner
            learner.scan(views, {}, ctx, gates)  # which raises what else is wrong
            held = ", ".join(f"{name} {list(x.shape)} of {x.dtype}" for name, x in data.items())
            other = f"{type(learner).__name__} cannot go on from {held}"
            raise MetaTTTError(f"the state is from another layer, or of other numbers: {other}") from error

    def __setattr__(self, name: str, value: Any) -> None:
        there = name in ("task", "learner", "optimizer") and name in self._modules
        if there and value is not self._modules[name] and not getattr(value, "_is_replica", False):
            raise MetaTTTError(
                f"layer.{name} was made together with the other parts and cannot be replaced: build a new TTTLayer"
            )
        if "_plan" in self.__dict__:
            self.refuse_late(name, value)
        super().__setattr__(name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__["_plan"] = self._planned()  # a plan is not written to disk

    def extra_repr(self) -> str:
        outer = "" if self.outer == "exact" else f", outer={self.outer!r}"
        return f"dim={self.dim}, num_heads={self.num_heads}, form={self.form!r}{outer}"
