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
from metattt.inner.final import answers, steps
from metattt.inner.forms import FORMS, SHARE
from metattt.inner.implicit import converged
from metattt.inner.packing import Packing, make_frame, mask_gates
from metattt.inner.replay import begun_again, tail
from metattt.inner.tokens import Block, Tokens, consecutive, joined
from metattt.learners.base import Learner
from metattt.learners.fast_weights import FastWeights
from metattt.memory import Memory, at_start, choose
from metattt.modules import spread
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
        operand: type to which matmul operands are rounded: that of the views.
        slow: the learner's outer-loop weights `[H, *shape]` in the type of the fast ones, while mini-batches are run.
    """

    task: Task
    learner: Learner
    rule: InnerOptimizer
    plan: Plan
    group_size: int | None = None
    operand: torch.dtype = torch.float32
    slow: Tensors = field(default_factory=dict)

    def but(
        self,
        *,
        task: Task | None = None,
        learner: Learner | None = None,
        rule: InnerOptimizer | None = None,
        operand: torch.dtype | None = None,
        slow: Tensors | None = None,
    ) -> InnerLoop:
        """The same loop with some of its parts exchanged. (Compilers do not follow `dataclasses.replace`.)"""
        return InnerLoop(
            self.task if task is None else task,
            self.learner if learner is None else learner,
            self.rule if rule is None else rule,
            self.plan,
            self.group_size,
            self.operand if operand is None else operand,
            self.slow if slow is None else slow,
        )

    def start(self, batch: int, dtype: torch.dtype) -> Memory:
        """What a fresh sequence carries: W0, or what the rule makes of it."""
        return self.rule.begin(at_start(self.plan.roles, self.learner.init.items(), batch, dtype))

    def run(
        self, tokens: Tokens, state: State, after: Tensor, ctx: Context, packing: Packing | None, own: bool = False
    ) -> Result:
        """One call: lays the tokens out in mini-batches, runs them, and returns predictions and the hidden state.

        Args:
            tokens: views and gates by token, padding last.
            state: the state before the call; its `weights` are empty at the start of a sequence.
            after: `[B]` tokens since the start of the document, after the call.
            own: the state's weights may be written over.
        """
        check_call(self, tokens, state, ctx)
        loop, plan, carry = self.but(operand=tokens.views.k.dtype), self.plan, state.weights
        if not carry:
            carry, own = self.start(tokens.views.k.shape[0], tokens.gates.eta.dtype), True
        if plan.replays:
            size, count = self.rule.mini_batch_size, tokens.views.k.shape[2]
            placed, frame = begun_again(plan, tokens, state, ctx, size)
            say_cut(self, state.phase, frame.phase, frame.blocks, tokens)
            y, carry = loop.columns(placed, carry, frame.blocks, frame.live, after, False)
            y = frame.take(y)
            return Result(y[:, :, y.shape[2] - count :], carry, frame.phase, tail(placed, frame, after, size))
        plain: list[Block] = []
        phase = 0 if plan.period is None else state.phase
        if phase is not None and ctx.first is None:
            plain, end = consecutive(tokens.views.k.shape[2], phase, plan.block)
            if ctx.valid is None:
                say_cut(self, phase, end, plain, tokens)
                y, carry = loop.columns(tokens, carry, plain, None, after, own)
                return Result(y, carry, 0 if plan.period is None else end, {})
        make = make_frame if packing is None else packing.frame
        frame = make(ctx, state, plan.period, plan.block, plain)
        say_cut(self, phase, frame.phase, frame.blocks, tokens)
        placed = mask_gates(tokens if frame.source is None else tokens.map(frame.place), frame.live)
        y, carry = loop.columns(placed, carry, frame.blocks, frame.live, after, own)
        return Result(frame.take(y), carry, frame.phase, {})

    def columns(
        self, tokens: Tokens, carry: Memory, blocks: Sequence[Block], live: Tensor | None, after: Tensor, own: bool
    ) -> tuple[Tensor, Memory]:
        """All columns of a call: predictions `[B, H, columns, d]` and the new carry. `live` `[B, columns]`: filled
        columns."""
        if self.rule.read != "final":
            if self.plan.kernels:
                return scan(self, tokens, carry, blocks, live is not None, own)
            return in_groups(self, tokens, carry, blocks, True)  # type: ignore[return-value]
        if self.plan.outer == "implicit":
            now, carry = converged(self, tokens, carry, blocks, live, after)
        else:
            *_, carry = steps(self, tokens, carry, blocks, live, after)
            now = self.rule.current(carry, after % self.rule.mini_batch_size)
        return answers(self, tokens, {"commit": now}, blocks), carry

    def mini_batches(
        self, tokens: Tokens, carry: Memory, blocks: Sequence[Block], read: bool
    ) -> tuple[Tensor | None, Memory]:
        """Consecutive mini-batches, or parts of them, one after the other: predictions if `read`, and the carry."""
        if tokens.gates.decay is not None and self.plan.form == "solved" and self.rule.period is None:
            blocks = joined(blocks)
        outputs: list[Tensor] = []
        parts = [tokens] if len(blocks) == 1 else tokens.split([block.length for block in blocks])
        for block, part in zip(blocks, parts, strict=True):
            if block.restart is not None:
                fresh = self.start(len(block.restart), tokens.gates.eta.dtype)
                carry = choose(block.restart, fresh, carry, carry)
            if read:
                y, carry = self.mini_batch(part, carry, block)
                outputs.append(y)
            else:
                carry = self.learn(part, carry, block)[2]
        return (None if not read else torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]), carry

    def mini_batch(self, tokens: Tokens, carry: Memory, block: Block) -> tuple[Tensor, Memory]:
        """What the queries of a mini-batch, or of a part of one, read, and the carry after it."""
        read, q = self.rule.read, tokens.views.q
        if read in ("inclusive", "exclusive") and self.rule.steps == 1:
            y, _, after = self.learn(tokens, carry, block, read)
            return y, after  # type: ignore[return-value]
        if read in ("previous", "final"):
            y = self.predict(carry["commit"], q)
            learns = read == "previous" and not (self.plan.replays and block.commit is False)
            return y, self.learn(tokens, carry, block)[2] if learns else carry
        if read == "committed":
            ys = [self.predict(carry["commit"], q)[:, :, :-1]] if block.length > 1 else []
            after = self.learn(tokens, carry, block)[2]
            last = self.predict(after["commit"], q if self.learner.mixes_tokens else q[:, :, -1:])[:, :, -1:]
            return torch.cat([*ys, last], dim=2), after
        _, before, after = self.learn(tokens, carry, block)  # `block`; or several steps on a mini-batch of one token
        return self.predict(self.rule.current(before, block.filled), q), after

    def learn(
        self, tokens: Tokens, carry: Memory, block: Block, read: str | None = None
    ) -> tuple[Tensor | None, Memory, Memory]:
        """The inner steps on one block: what queries see if `read` says which weights, the carry before the commit and
        after it."""
        entering, rule, y = carry, self.rule, None
        steps = rule.steps if rule.read != "final" else 1
        in_common = self.task.together and self.plan.form in SHARE and tokens.in_common
        size = self._chunk_size(tokens, block, in_common)
        for step in range(1, steps + 1):
            phase, ys = block.phase, []
            for piece in [tokens] if size >= block.length else tokens.split(size):
                if self.plan.sees_weights:
                    piece = gated(self, piece, carry["commit"])
                carry = rule.observe(carry, piece.gates)
                piece = piece if piece.views.k.ndim == 4 else piece.apart(in_common and piece.in_common)
                y, carry = FORMS[self.plan.form](self, piece, carry, phase, read)
                phase = phase + piece.views.q.shape[2]
                ys.append(y)
            before = carry
            if "commit" in carry and (step < steps or block.commit is not False):
                carry = self._commit(carry, block, step == steps)
        if self.plan.replays or steps > 1:
            carry = _only_complete(entering, carry, block.commit)
        return (torch.cat(ys, dim=2) if read is not None and len(ys) > 1 else y), before, carry  # type: ignore[arg-type]

    def _chunk_size(self, tokens: Tokens, block: Block, in_common: bool) -> int:
        """Tokens whose gradients are taken together."""
        if tokens.gates.decay is not None and self.plan.form == "solved":
            return block.length  # it splits them itself
        size = self.plan.chunk or block.length
        return size if tokens.views.k.ndim == 4 or in_common else max(1, size // tokens.views.k.shape[3])

    # -- the parts, at one set of weights per sequence -----------------------------------------------------------------

    def predict(self, weights: Tensors, q: Tensor) -> Tensor:
        """Queries `[B, H, n, d]` answered by one set of weights per sequence."""
        return self.learner.predict(FastWeights(weights, self.slow, self.operand), q)

    def losses(self, weights: FastWeights, k: Tensor, v: Tensor) -> Tensor:
        """ℓ per token, `[B, H, T]`."""
        return self.task.loss(self.learner.predict(weights, k), v)

    def anchor(self, tokens: Tokens, carry: Memory, phase: int | Tensor) -> Tensors:
        """The weights at which the chunk's gradients are taken."""
        if self.rule.anchor != "online":
            return carry["anchor" if self.rule.anchor == "batch" else "commit"]
        weights = self.rule.current(carry, phase)
        if self.rule.gradient_at == "decayed":
            return decayed(weights, tokens, 0)
        return weights

    def _commit(self, carry: Memory, block: Block, last: bool) -> Memory:
        """`W_a ← W_t` where the mini-batch is complete."""
        after = self.rule.commit(carry, block.filled)
        if not last or block.commit is True:
            return after
        assert isinstance(block.commit, Tensor)
        return choose(block.commit, after, carry, [slot for slot in {**carry, **after} if slot != "factors"])


def decayed(weights: Tensors, tokens: Tokens, at: int) -> Tensors:
    """The weights after the decay of a token."""
    if tokens.gates.alpha is not None:
        weights = {name: spread(tokens.gates.alpha[:, :, at], x) * x for name, x in weights.items()}
    if tokens.gates.decay is not None:
        weights = {name: tokens.gates.decay[:, :, at].exp().unsqueeze(-1) * x for name, x in weights.items()}
    return weights


def _only_complete(before: Memory, after: Memory, complete: bool | Tensor) -> Memory:
    """What a mini-batch leaves behind that is replayed when it goes on, or has no token: nothing, until complete."""
    if isinstance(complete, bool):
        return after if complete else before
    left_out = {"update", *(("weights",) if "commit" in after else ())}  # the newest weights are the commit then
    return choose(complete, after, before, [slot for slot in after if slot not in left_out])
