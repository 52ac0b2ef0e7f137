"""The inner loop: one learner trained along the sequence, mini-batch by mini-batch.

A mini-batch of b tokens begins at the committed weights W_a. For its tokens t, in words of `docs/mathematics.md`,

`G_t = ∇ℓ(f(k_t; W_g), v_t)`, `S_t = β_t S_{t−1} − η_t G_t`, `W_t = α_t W_{t−1} + κ_t S_t`, `y_t = f(q_t; W_r)`.

| `optimizer.anchor` | W_g, where the gradients of a token are taken |
|---|---|
| `minibatch`, `batch` | W_a; the weights that the sequence began with |
| `online` | the newest weights W_{t−1}, or `α_t W_{t−1}` (`gradient_at=decayed`) |

| `optimizer.read` | W_r, what a query sees |
|---|---|
| `inclusive`, `exclusive` | W_t; W_{t−1} |
| `previous`, `committed` | W_a; the last commit, also one that token t completes |
| `block`, `final` | the weights at the end of the mini-batch; of the call (`metattt.inner.final`) |

After token b of a mini-batch it is committed: `W_a ← W_t`. A rule may write other things (`InnerOptimizer.commit`), and
may take several steps on a mini-batch before. The forms (`metattt.inner.forms`) compute what is said here for a chunk
of tokens; how many of them are run together, and with which of them kept for a backward pass, never changes a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from metattt.inner.by_kernel import scan
from metattt.inner.checks import check_call, say_cut
from metattt.inner.committed import gated
from metattt.inner.execution import in_groups
from metattt.inner.final import predictions, steps
from metattt.inner.forms import FORMS, SHARE
from metattt.inner.implicit import converged
from metattt.inner.packing import Packing, make_layout, mask_gates
from metattt.inner.replay import begun_again, tail
from metattt.inner.tokens import Block, Tokens, consecutive, joined
from metattt.learners.base import Learner
from metattt.learners.fast_weights import FastWeights
from metattt.memory import Memory, at_start, choose
from metattt.modules import expand_like
from metattt.optimizers.base import InnerOptimizer
from metattt.state import Context, State, Tensors
from metattt.tasks.base import Task

if TYPE_CHECKING:
    from metattt.inner.plan import Plan



class Result(NamedTuple):
    """Predictions `[B, H, T, d]`, and what the next call needs."""

    y: Tensor
    weights: Memory
    phase: int | None
    learner: Tensors


@dataclass(eq=False)
class InnerLoop:
    """The three parts at work along a sequence; made for one call.

    Args:
        rule: the inner optimizer.
        plan: what is known of the combination.
        group_size: mini-batches that are recomputed together in the backward pass; None takes √(T/b), 0 stores
            everything (a kernel takes a size of its own then).
        matmul_dtype: type to which matmul operands are rounded: that of the views.
        slow: the learner's outer-loop weights `[H, *shape]` in the type of the fast ones, while mini-batches are run.
    """

    task: Task
    learner: Learner
    rule: InnerOptimizer
    plan: Plan
    group_size: int | None = None
    matmul_dtype: torch.dtype = torch.float32
    slow: Tensors = field(default_factory=dict)

    def but(
        self,
        *,
        task: Task | None = None,
        learner: Learner | None = None,
        rule: InnerOptimizer | None = None,
        matmul_dtype: torch.dtype | None = None,
        slow: Tensors | None = None,
    ) -> InnerLoop:
        """The same loop with some of its parts exchanged. (Compilers do not follow `dataclasses.replace`.)"""
        return InnerLoop(
            self.task if task is None else task,
            self.learner if learner is None else learner,
            self.rule if rule is None else rule,
            self.plan,
            self.group_size,
            self.matmul_dtype if matmul_dtype is None else matmul_dtype,
            self.slow if slow is None else slow,
        )

    def start(self, batch: int, dtype: torch.dtype) -> Memory:
        """What a fresh sequence carries: W0, or what the rule makes of it."""
        return self.rule.begin(at_start(self.plan.slots, self.learner.init.items(), batch, dtype))

    def run(
        self, tokens: Tokens, state: State, after: Tensor, ctx: Context, packing: Packing | None, donate_state: bool = False
    ) -> Result:
        """One call: lays the tokens out in mini-batches, runs them, and returns predictions and the hidden state.

        Args:
            tokens: views and gates by token, padding last.
            state: the state before the call; its `weights` are empty at the start of a sequence.
            after: `[B]` tokens since the start of the document, after the call.
            donate_state: the state's weights may be written over.
        """
        check_call(self, tokens, state, ctx)
        loop, plan, memory = self.but(matmul_dtype=tokens.views.k.dtype), self.plan, state.weights
        if not memory:
            memory, donate_state = self.start(tokens.views.k.shape[0], tokens.gates.eta.dtype), True
        if plan.replays:
            size, count = self.rule.mini_batch_size, tokens.views.k.shape[2]
            placed, layout = begun_again(plan, tokens, state, ctx, size)
            say_cut(self, state.phase, layout.phase, layout.blocks, tokens)
            y, memory = loop.columns(placed, memory, layout.blocks, layout.is_filled, after, False)
            y = layout.gather(y)
            return Result(y[:, :, y.shape[2] - count :], memory, layout.phase, tail(placed, layout, after, size))
        plain: list[Block] = []
        phase = 0 if plan.period is None else state.phase
        if phase is not None and ctx.first is None:
            plain, end = consecutive(tokens.views.k.shape[2], phase, plan.block)
            if ctx.valid is None:
                say_cut(self, phase, end, plain, tokens)
                y, memory = loop.columns(tokens, memory, plain, None, after, donate_state)
                return Result(y, memory, 0 if plan.period is None else end, {})
        make = make_layout if packing is None else packing.layout
        layout = make(ctx, state, plan.period, plan.block, plain)
        say_cut(self, phase, layout.phase, layout.blocks, tokens)
        placed = mask_gates(tokens if layout.source is None else tokens.map(layout.scatter), layout.is_filled)
        y, memory = loop.columns(placed, memory, layout.blocks, layout.is_filled, after, donate_state)
        return Result(layout.gather(y), memory, layout.phase, {})

    def columns(
        self, tokens: Tokens, memory: Memory, blocks: Sequence[Block], is_filled: Tensor | None, after: Tensor, donate_state: bool
    ) -> tuple[Tensor, Memory]:
        """All columns of a call: predictions `[B, H, columns, d]` and the new memory. `is_filled` `[B, columns]`: filled
        columns."""
        if self.rule.read != "final":
            if self.plan.kernels:
                return scan(self, tokens, memory, blocks, is_filled is not None, donate_state)
            return in_groups(self, tokens, memory, blocks, True)  # type: ignore[return-value]
        if self.plan.outer == "implicit":
            now, memory = converged(self, tokens, memory, blocks, is_filled, after)
        else:
            *_, memory = steps(self, tokens, memory, blocks, is_filled, after)
            now = self.rule.current(memory, after % self.rule.mini_batch_size)
        return predictions(self, tokens, {"commit": now}, blocks), memory

    def mini_batches(
        self, tokens: Tokens, memory: Memory, blocks: Sequence[Block], read: bool
    ) -> tuple[Tensor | None, Memory]:
        """Consecutive mini-batches, or parts of them, one after the other: predictions if `read`, and the memory."""
        if tokens.gates.decay is not None and self.plan.form == "solved" and self.rule.period is None:
            blocks = joined(blocks)
        outputs: list[Tensor] = []
        parts = [tokens] if len(blocks) == 1 else tokens.split([block.length for block in blocks])
        for block, part in zip(blocks, parts, strict=True):
            if block.restart is not None:
                fresh = self.start(len(block.restart), tokens.gates.eta.dtype)
                memory = choose(block.restart, fresh, memory, memory)
            if read:
                y, memory = self.mini_batch(part, memory, block)
                outputs.append(y)
            else:
                memory = self.learn(part, memory, block)[2]
        return (None if not read else torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]), memory

    def mini_batch(self, tokens: Tokens, memory: Memory, block: Block) -> tuple[Tensor, Memory]:
        """What the queries of a mini-batch, or of a part of one, read, and the memory after it."""
        read, q = self.rule.read, tokens.views.q
        if read in ("inclusive", "exclusive") and self.rule.steps == 1:
            y, _, after = self.learn(tokens, memory, block, read)
            return y, after  # type: ignore[return-value]
        if read in ("previous", "final"):
            y = self.predict(memory["commit"], q)
            learns = read == "previous" and not (self.plan.replays and block.commit is False)
            return y, self.learn(tokens, memory, block)[2] if learns else memory
        if read == "committed":
            ys = [self.predict(memory["commit"], q)[:, :, :-1]] if block.length > 1 else []
            after = self.learn(tokens, memory, block)[2]
            last = self.predict(after["commit"], q if self.learner.mixes_tokens else q[:, :, -1:])[:, :, -1:]
            return torch.cat([*ys, last], dim=2), after
        _, before, after = self.learn(tokens, memory, block)  # `block`; or several steps on a mini-batch of one token
        return self.predict(self.rule.current(before, block.filled), q), after

    def learn(
        self, tokens: Tokens, memory: Memory, block: Block, read: str | None = None
    ) -> tuple[Tensor | None, Memory, Memory]:
        """The inner steps on one block: what queries see if `read` says which weights, the memory before the commit and
        after it."""
        entering, rule, y = memory, self.rule, None
        steps = rule.steps if rule.read != "final" else 1
        in_common = self.task.together and self.plan.form in SHARE and tokens.in_common
        size = self._chunk_size(tokens, block, in_common)
        for step in range(1, steps + 1):
            phase, ys = block.phase, []
            for piece in [tokens] if size >= block.length else tokens.split(size):
                if self.plan.sees_weights:
                    piece = gated(self, piece, memory["commit"])
                memory = rule.observe(memory, piece.gates)
                piece = piece if piece.views.k.ndim == 4 else piece.apart(in_common and piece.in_common)
                y, memory = FORMS[self.plan.form](self, piece, memory, phase, read)
                phase = phase + piece.views.q.shape[2]
                ys.append(y)
            before = memory
            if "commit" in memory and (step < steps or block.commit is not False):
                memory = self._commit(memory, block, step == steps)
        if self.plan.replays or steps > 1:
            memory = _only_complete(entering, memory, block.commit)
        return (torch.cat(ys, dim=2) if read is not None and len(ys) > 1 else y), before, memory  # type: ignore[arg-type]

    def _chunk_size(self, tokens: Tokens, block: Block, in_common: bool) -> int:
        """Tokens whose gradients are taken together."""
        if tokens.gates.decay is not None and self.plan.form == "solved":
            return block.length  # it splits them itself
        size = self.plan.chunk or block.length
        return size if tokens.views.k.ndim == 4 or in_common else max(1, size // tokens.views.k.shape[3])

    # -- the parts, at one set of weights per sequence -----------------------------------------------------------------

    def predict(self, weights: Tensors, q: Tensor) -> Tensor:
        """Queries `[B, H, n, d]` answered by one set of weights per sequence."""
        return self.learner.predict(FastWeights(weights, self.slow, self.matmul_dtype), q)

    def losses(self, weights: FastWeights, k: Tensor, v: Tensor) -> Tensor:
        """ℓ per token, `[B, H, T]`."""
        return self.task.loss(self.learner.predict(weights, k), v)

    def anchor(self, tokens: Tokens, memory: Memory, phase: int | Tensor) -> Tensors:
        """The weights at which the chunk's gradients are taken."""
        if self.rule.anchor != "online":
            return memory["anchor" if self.rule.anchor == "batch" else "commit"]
        weights = self.rule.current(memory, phase)
        if self.rule.gradient_at == "decayed":
            return decayed(weights, tokens, 0)
        return weights

    def _commit(self, memory: Memory, block: Block, last: bool) -> Memory:
        """`W_a ← W_t` where the mini-batch is complete."""
        after = self.rule.commit(memory, block.filled)
        if not last or block.commit is True:
            return after
        assert isinstance(block.commit, Tensor)
        return choose(block.commit, after, memory, [slot for slot in {**memory, **after} if slot != "factors"])


def decayed(weights: Tensors, tokens: Tokens, at: int) -> Tensors:
    """The weights after the decay of a token."""
    if tokens.gates.alpha is not None:
        weights = {name: expand_like(tokens.gates.alpha[:, :, at], x) * x for name, x in weights.items()}
    if tokens.gates.decay is not None:
        weights = {name: tokens.gates.decay[:, :, at].exp().unsqueeze(-1) * x for name, x in weights.items()}
    return weights


def _only_complete(before: Memory, after: Memory, complete: bool | Tensor) -> Memory:
    """What a mini-batch leaves behind that is replayed when it goes on, or has no token: nothing, until complete."""
    if isinstance(complete, bool):
        return after if complete else before
    left_out = {"update", *(("weights",) if "commit" in after else ())}  # the newest weights are the commit then
    return choose(complete, after, before, [slot for slot in after if slot not in left_out])
