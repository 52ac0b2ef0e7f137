"""The three parts in one call, with what the forms need of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from metattt.inner.plan import Plan
from metattt.inner.tokens import Block, Tokens
from metattt.learners.base import Learner
from metattt.learners.fast_weights import FastWeights
from metattt.memory import Memory, at_start
from metattt.modules import expand_like
from metattt.optimizers.base import InnerOptimizer
from metattt.state import Context, State, Tensors
from metattt.tasks.base import Task


class Parts(NamedTuple):
    """A task, a learner and an inner optimizer; made for one call.

    Attributes:
        rule: the inner optimizer.
        plan: what is known of the combination.
        group_size: mini-batches that are recomputed together in the backward pass; None takes √(T/b), 0 stores
            everything (a kernel takes a size of its own then).
        matmul_dtype: type to which matmul operands are rounded: that of the views.
        slow: outer-loop weights `[H, *shape]` in the place of the learner's own; in the type of the fast ones while
            mini-batches are run.
    """

    task: Task
    learner: Learner
    rule: InnerOptimizer
    plan: Plan
    group_size: int | None = None
    matmul_dtype: torch.dtype = torch.float32
    slow: Tensors = {}  # noqa: RUF012 (nothing is written into it)

    def is_checked(self, tokens: Tokens, state: State, ctx: Context) -> bool:
        """Whether a call needs no checks of `metattt.inner.checks`: tokens of a known kind, all real, of one document,
        at one phase."""
        rule, alike = self.rule, ctx.valid is None and ctx.first is None and state.phase is not None
        known = tokens.kind in self.plan.checked and (rule.has_token_steps or rule.token_steps() is None)
        return alike and known and not torch.compiler.is_compiling()

    def start(self, batch: int, dtype: torch.dtype) -> Memory:
        """The memory of a fresh sequence: W0, or what the rule makes of it."""
        return self.rule.begin(at_start(self.plan.slots, self.learner.init.items(), batch, dtype))

    def mini_batches(
        self, tokens: Tokens, memory: Memory, blocks: Sequence[Block], read: bool
    ) -> tuple[Tensor | None, Memory]:
        """`metattt.inner.loop.InnerLoop` defines it: every loop is one, but its module imports those that use this."""
        raise NotImplementedError

    # -- at one set of weights per sequence ----------------------------------------------------------------------------

    def predict(self, weights: Tensors, q: Tensor) -> Tensor:
        """Predictions for queries `[B, H, n, d]` with one set of weights per sequence."""
        return self.learner.predict(FastWeights(weights, self.slow, self.matmul_dtype), q)

    def losses(self, weights: FastWeights, k: Tensor, v: Tensor) -> Tensor:
        """ℓ per token, `[B, H, T]`."""
        return self.task.loss(self.learner.predict(weights, k), v)

    def losses_by(self, names: Iterable[str], k: Tensor, v: Tensor) -> Callable[..., Tensor]:
        """`losses` as a function of the fast weights `names`, `[B, H, *shape]` each."""

        def losses(*weights: Tensor) -> Tensor:
            accessor = FastWeights(dict(zip(names, weights, strict=True)), self.slow, self.matmul_dtype)
            return self.losses(accessor, k, v)

        return losses

    def anchor(self, tokens: Tokens, memory: Memory, phase: int | Tensor) -> Tensors:
        """The weights at which the chunk's gradients are taken."""
        if self.rule.anchor != "online":
            return memory["anchor" if self.rule.anchor == "batch" else "commit"]
        weights = self.rule.current(memory, phase)
        if self.rule.gradient_at == "decayed" and tokens.gates.alpha is not None:
            weights = {name: expand_like(tokens.gates.alpha[:, :, 0], x) * x for name, x in weights.items()}
        if self.rule.gradient_at == "decayed" and tokens.gates.decay is not None:
            weights = {name: tokens.gates.decay[:, :, 0].exp().unsqueeze(-1) * x for name, x in weights.items()}
        return weights
