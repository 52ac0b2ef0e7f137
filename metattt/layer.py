"""The composer: Task x Learner x InnerOptimizer -> a sequence layer that learns while it reads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metattt.errors import MetaTTTError
from metattt.inner.inspect import choose_form
from metattt.inner.loop import InnerLoop
from metattt.inner.packing import pack
from metattt.inner.stream import Result, stream
from metattt.learners.base import Learner, NonParametric
from metattt.modules import projection
from metattt.optimizers.base import InnerOptimizer
from metattt.state import State, Tensors
from metattt.tasks.base import Task


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
        task, learner, optimizer: the three parts, made for this layer (their parameters are created here).
        output_norm: LayerNorm over D before the output projection.
        gate: multiply by gelu(x Wg) before the output projection.
        output_bias: a bias in the output projection.
        form: how the inner loop is computed (`auto`, `fused`, `dual`, `summed`, `primal`); every form gives the same result. `fused`
            takes a kernel or refuses; `auto` takes one where there is one, and `dual` elsewhere.
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
        output_norm: bool = True,
        gate: bool = False,
        output_bias: bool = False,
        form: str = "auto",
        group_size: int | None = None,
    ):
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            raise MetaTTTError(f"num_heads={num_heads} does not divide dim={dim}: choose num_heads from {_divisors(dim)}")
        if group_size is not None and group_size < 0:
            raise MetaTTTError(
                f"layer.group_size={group_size} is not allowed: null chooses, 0 stores everything, n recomputes n mini-batches"
            )
        if learner.has_weights != optimizer.updates:
            wrong = "needs a rule that updates" if learner.has_weights else "keeps its data itself"
            right = "minibatch" if learner.has_weights else "append"
            raise MetaTTTError(f"{type(learner).__name__} {wrong}, not {type(optimizer).__name__}: set optimizer={right}")
        head = dim // num_heads
        self.dim, self.num_heads = dim, num_heads
        self.task = task.setup(dim, num_heads, head)
        self.learner = learner.setup(num_heads, head, head)
        self.optimizer = optimizer.setup(dim, num_heads, head, tuple(learner.init))
        self.form = choose_form(form, task, learner, optimizer, num_heads, head) if learner.has_weights else "scan"
        self.norm = nn.LayerNorm(dim, eps=1e-6) if output_norm else None
        self.gate = projection(dim, dim, False) if gate else None
        self.out = projection(dim, dim, output_bias)
        # The loop shares the three parts, so it must not register them a second time.
        self.__dict__["inner"] = InnerLoop(task, learner, optimizer, self.form, group_size, strict=form == "fused")

    inner: InnerLoop
    task: Task
    learner: Learner
    optimizer: InnerOptimizer
    norm: nn.LayerNorm | None
    out: nn.Linear
    gate: nn.Linear | None

    @property
    def causal(self) -> bool:
        """Whether no output depends on a later token, as the parts declare it."""
        return self.task.causal and self.learner.causal and self.optimizer.causal

    def forward(
        self, x: Tensor, state: State | None = None, *, mask: Tensor | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Reads the tokens `x` and returns the outputs and the state to go on from.

        Args:
            x: `[B, T, D]`.
            state: what the previous call returned; None starts from W0. Calls may cut a sequence anywhere.
            mask: `[B, T]` bool, True for real tokens. Padding may stand anywhere and changes nothing; its outputs are 0.
            reset: `[B, T]` bool, True where a packed document starts: the state begins again from W0.

        Returns:
            Outputs `[B, T, D]` and the new state.

        Raises:
            MetaTTTError: shapes that do not fit, a state of another layer or batch size, or NaN in `x` (checked on CPU).
        """
        continues = state is not None
        state = self._check(x, state, mask, reset)
        packed = pack(x, mask, reset, state.pos, self.optimizer.mini_batch_size)
        ctx = packed.context
        views, task_state = self.task.views(packed.x, state.task, ctx)
        gates, rule_state = self.optimizer.gates(packed.x, state.optimizer, ctx)
        for part, given, kept in ((self.task, state.task, task_state), (self.optimizer, state.optimizer, rule_state)):
            if continues and _shapes(given) != _shapes(kept):
                raise MetaTTTError(
                    f"the state is from another layer: {type(part).__name__} carries {_shapes(kept)}, the state {_shapes(given)}"
                )
        if isinstance(self.learner, NonParametric):
            y, data = self.learner.scan(views, state.learner, ctx)
            read = Result(y, {}, 0, data)
        else:
            read = stream(self.inner, views, gates, state, packed.pos, ctx)
        y = read.y.transpose(1, 2).flatten(2).to(packed.x.dtype)
        if self.norm is not None:
            y = self.norm(y)
        if self.gate is not None:
            y = y * F.gelu(self.gate(packed.x), approximate="tanh")
        return packed.restore(self.out(y)), State(packed.pos, read.phase, read.weights, task_state, rule_state, read.learner)

    def _check(self, x: Tensor, state: State | None, mask: Tensor | None, reset: Tensor | None) -> State:
        if x.ndim != 3 or x.shape[2] != self.dim or x.shape[1] == 0:
            raise MetaTTTError(f"x has shape {list(x.shape)}, expected [B, T, {self.dim}] with at least one token")
        for name, flags in (("mask", mask), ("reset", reset)):
            if flags is not None and (flags.shape != x.shape[:2] or flags.dtype != torch.bool):
                raise MetaTTTError(
                    f"{name} is {flags.dtype} of shape {list(flags.shape)}, expected torch.bool of shape {list(x.shape[:2])}"
                )
        if x.device.type == "cpu" and not torch.compiler.is_compiling() and not _finite(x if mask is None else x[mask]):
            raise MetaTTTError("x contains NaN or infinite values: look for the first layer or loss that produced them")
        if state is None:
            return State(x.new_zeros(x.shape[0], dtype=torch.long), 0, {}, {}, {}, {})
        if state.pos.shape[0] != x.shape[0]:
            raise MetaTTTError(f"the state is for {state.pos.shape[0]} sequences, x holds {x.shape[0]}: start with state=None")
        expected = {name: (x.shape[0], *w.shape) for name, w in self.learner.init.items()}
        for role, weights in state.weights.items():
            found = {name: tuple(w.shape) for name, w in weights.items()}
            if role not in self.optimizer.bases or (role != "pool" and found != expected):
                raise MetaTTTError(
                    f"the state is from another layer: it carries {role} {found}, this layer {self.optimizer.bases} {expected}"
                )
        if state.phase is not None and state.phase >= self.optimizer.mini_batch_size:
            raise MetaTTTError(f"the state is from another layer: it stands at token {state.phase} of {self.optimizer.mini_batch_size}")
        if bool(state.weights) != self.learner.has_weights:
            raise MetaTTTError(f"the state is from another layer: this one's learner is {type(self.learner).__name__}")
        return state


def _finite(x: Tensor) -> bool:
    # In a transform the values are not at hand; whoever differentiates through us sees NaN in the result.
    return torch._C._functorch.peek_interpreter_stack() is not None or bool(x.isfinite().all())


def _shapes(tensors: Tensors) -> dict[str, list[int]]:
    return {name: list(x.shape) for name, x in tensors.items()}


def _divisors(dim: int) -> str:
    return ", ".join(str(n) for n in range(1, dim + 1) if dim % n == 0)
