"""The inner loop: one learner trained along the sequence, mini-batch by mini-batch.

A mini-batch of b tokens begins at the committed weights W_a. For its tokens t (symbols: `docs/mathematics.md`),

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

After token b of a mini-batch it is committed: `W_a ← W_t`. A rule that acts once per mini-batch (`BlockRule` in
`metattt/optimizers/block.py`) sums `U_j = −Σ_s η_s G_s` over it instead and makes W_a of the sum, as Titans does:
`S_j = β_j S_{j−1} + U_j`, `W_j = α_j W_{j−1} + S_j`. A rule may also take several steps on each mini-batch.
The forms (`metattt.inner.forms`) compute this for a chunk of tokens. How many tokens are run together, and which of
them are kept for a backward pass, never changes a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from metattt.inner.by_kernel import online, scan
from metattt.inner.checks import check_call, say_cut
from metattt.inner.columns import make_layout
from metattt.inner.committed import gated
from metattt.inner.execution import in_full, in_groups
from metattt.inner.final import learned_then_read
from metattt.inner.forms import FORMS, SHARE
from metattt.inner.packing import Call
from metattt.inner.parts import Parts
from metattt.inner.replay import begun_again, tail
from metattt.inner.tokens import Block, Tokens, joined
from metattt.memory import Memory, choose
from metattt.state import WHOLE_CALL, State, Tensors


class InnerLoop(Parts):
    """The inner loop of a layer. `run` is a call; without a kernel it comes to `mini_batches`, which takes one
    `mini_batch` after the other; `learn` is the inner steps of one."""

    def run(self, tokens: Tokens, state: State, call: Call) -> tuple[Tensor, State]:
        """One call: lays the tokens out in mini-batches, runs them, and returns predictions `[B, H, T, d]` and the
        state after them.

        Args:
            tokens: views and gates by token, padding last.
            state: before the call; its `weights` are empty at the start of a sequence.
            call: positions, padding and documents of the call.
        """
        rule, plan, count = self.rule, self.plan, tokens.views.q.shape[2]
        if not self.is_checked(tokens, state, call.ctx):
            check_call(self, tokens, state, call.ctx)
        memory, donated, whole_call = state.weights, call.donate_state, rule.mini_batch_size == WHOLE_CALL
        if whole_call:  # all tokens are one mini-batch
            rule = rule.bound(mini_batch_size=count)
            plan = replace(plan, period=count if plan.period else None, block=count)
        if not memory:
            memory, donated = self.start(tokens.views.k.shape[0], tokens.gates.eta.dtype), True
        loop, size = self._replace(rule=rule, plan=plan, matmul_dtype=tokens.views.k.dtype), rule.mini_batch_size
        if plan.kernels and plan.kernels[0].anchor == "online":
            found = online(loop, tokens, memory, call.packing)
            if found is not None:
                return found[0], State(call.after, 0, found[1], state.task, state.optimizer, {})
        if plan.replays:
            tokens, layout = begun_again(plan, tokens, state, call.ctx, size)
        else:
            make = make_layout if call.packing is None else call.packing.layout
            layout = make(call.ctx, state, plan.period, plan.block, len(plan.kernels) > 0)
        if whole_call:  # it is committed, also where padding or the end of a document cuts it short
            blocks = [block._replace(commit=block.filled > 0) for block in layout.blocks]
            layout = layout._replace(blocks=blocks, phase=0)
        elif self.rule.read == "block":
            say_cut(self, state.phase, layout, count)
        if layout.column is not None:
            tokens = tokens.map(layout.scatter)
        if layout.is_filled is not None:
            tokens = tokens.masked(layout.is_filled)
        if rule.read == "final":
            after = torch.zeros_like(call.after) if whole_call else call.after
            y, memory = learned_then_read(loop, tokens, memory, layout.blocks, layout.is_filled, after)
        elif plan.kernels and plan.kernels[0].anchor != "online":
            y, memory = scan(loop, tokens, memory, layout.blocks, layout.is_filled is not None, donated)
        else:
            y, memory = in_groups(loop, tokens, memory, layout.blocks, True)  # type: ignore[assignment]
        y = y if layout.column is None else layout.gather(y)
        open_: Tensors = {}
        if plan.replays:
            y, open_ = y[:, :, y.shape[2] - count :], tail(tokens, layout, call.after, size)
        # (not `state._replace`: torch 2.11 cannot compile a call that returns what that makes)
        return y, State(call.after, layout.phase, memory, state.task, state.optimizer, open_)

    @in_full
    def mini_batches(
        self, tokens: Tokens, memory: Memory, blocks: Sequence[Block], read: bool
    ) -> tuple[Tensor | None, Memory]:
        """Consecutive mini-batches, or parts of them, one after the other: predictions if `read`, and the memory."""
        if self.plan.form == "chunks":
            blocks = joined(blocks, tokens)
        outputs: list[Tensor] = []
        one = len(blocks) == 1 and blocks[0].times == 1
        parts = [tokens] if one else tokens.split([block.length for block in blocks for _ in range(block.times)])
        coming = iter(parts)
        for block in blocks:
            if block.restart is not None:
                fresh = self.start(len(block.restart), tokens.gates.eta.dtype)
                memory = choose(block.restart, fresh, memory, memory)
            for _ in range(block.times):
                if read:
                    y, memory = self.mini_batch(next(coming), memory, block)
                    outputs.append(y)
                else:
                    memory = self.learn(next(coming), memory, block)[2]
        return (None if not read else torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]), memory

    def mini_batch(self, tokens: Tokens, memory: Memory, block: Block) -> tuple[Tensor, Memory]:
        """Predictions for the queries of a mini-batch, or of a part of one, and the memory after it."""
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
        """The inner steps on one block: predictions (if `read` names weights), the memory before the commit, and the
        memory after it."""
        entering, rule, plan, y = memory, self.rule, self.plan, None
        steps = rule.steps if rule.read != "final" else 1
        in_common = self.task.together and plan.form in SHARE and tokens.in_common
        form = "chunks" if tokens.gates.decay is not None and plan.solved else plan.form
        size = plan.chunk or block.length  # tokens whose gradients are taken together
        if form == "chunks":
            size = block.length  # it splits them itself
        elif tokens.views.k.ndim == 5 and not in_common:
            size = max(1, size // tokens.views.k.shape[3])
        for step in range(1, steps + 1):
            phase, ys = block.phase, []
            for piece in [tokens] if size >= block.length else tokens.split(size):
                if plan.sees_weights:
                    piece = gated(self, piece, memory["commit"])
                memory = rule.pool_gates(memory, piece.gates)
                piece = piece if piece.views.k.ndim == 4 else piece.apart(in_common and piece.in_common)
                y, memory = FORMS[form](self, piece, memory, phase, read)
                phase = phase + piece.views.q.shape[2]
                ys.append(y)
            before = memory
            if "commit" in memory and (step < steps or block.commit is not False):  # `W_a ← W_t`
                memory = rule.commit(before, block.filled)
        anew = plan.replays or steps > 1  # what is incomplete has no token, or is learned anew by the next call
        unchanged = entering if anew else before
        if block.commit is False:
            memory = unchanged
        elif isinstance(block.commit, Tensor) and (anew or "commit" in before):
            memory = choose(block.commit, memory, unchanged, {**unchanged, **memory})
        if read is not None and len(ys) > 1:
            y = torch.cat(ys, dim=2)  # type: ignore[arg-type]
        return y, before, memory
