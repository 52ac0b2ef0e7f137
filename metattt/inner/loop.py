"""The inner loop: one learner trained along the sequence, mini-batch by mini-batch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.inner.by_kernel import scan
from metattt.inner.committed import Committed
from metattt.inner.export import inlined
from metattt.inner.final import answers, steps
from metattt.inner.forms import CHUNKS, SHARE
from metattt.inner.implicit import converged
from metattt.inner.packing import Packing, make_frame, mask_gates
from metattt.inner.recompute import captured, recomputed
from metattt.inner.replay import tail, with_tail
from metattt.inner.tokens import Block, Carry, Tokens, rows, where
from metattt.learners.base import Learner
from metattt.learners.fast_weights import FastWeights
from metattt.modules import spread, transformed
from metattt.optimizers.base import Gates, InnerOptimizer, newest
from metattt.state import Context, State, Tensors
from metattt.tasks.base import Task, Views
from metattt.torch_private import saved_tensor_hooks

if TYPE_CHECKING:
    from metattt.inner.plan import Plan

STARTS_AT_W0 = ("commit", "anchor", "origin", "dual", "weights")  # of W0; all other roles start from zero
JOINED = 1024  # tokens whose products with each other are found together, where a form has a use for it
STORED = 128  # tokens: a call no longer than this keeps everything for its backward pass instead of running it again


class Result(NamedTuple):
    """Predictions `[B, H, T, d]`, and what the next call needs."""

    y: Tensor
    weights: Carry
    phase: int | None
    learner: Tensors


@dataclass
class Work:
    """The three parts at work on consecutive blocks.

    Args:
        plan: what is known of the combination.
        slow: the learner's outer-loop weights, `[H, *shape]`.
        operand: type to which matmul operands are rounded.
    """

    task: Task
    learner: Learner
    rule: InnerOptimizer
    plan: Plan
    slow: Tensors
    operand: torch.dtype

    def read(self, weights: Tensors, q: Tensor) -> Tensor:
        """Queries `[B, H, n, d]` answered by one set of weights per sequence."""
        return self.learner.predict(FastWeights(weights, self.slow, self.operand), q)

    def losses(self, weights: FastWeights, k: Tensor, v: Tensor) -> Tensor:
        """ℓ per token, `[B, H, T]`."""
        return self.task.loss(self.learner.predict(weights, k), v)

    def anchor(self, tokens: Tokens, carry: Carry, phase: int | Tensor) -> Tensors:
        """The weights at which the chunk's gradients are taken."""
        if self.rule.anchor != "online":
            return carry["anchor" if self.rule.anchor == "batch" else "commit"]
        weights = self.rule.current(carry, phase)
        if self.rule.gradient_at == "decayed":
            return decayed(weights, tokens, 0)
        return weights

    def gated(self, tokens: Tokens, commit: Tensors) -> Tokens:
        """Tokens with the gates that the rule gives them in sight of the last commit.

        Raises:
            MetaTTTError: the rule gives a gate that it does not give without, or the other way round.
        """
        given = tokens.gates
        found = self.rule.gates_at(given, Committed(self, commit, tokens))
        live, changed = given.eta != 0, {}
        for name, before, after in zip(Gates._fields, given, found, strict=True):
            if (before is None) != (after is None):
                raise MetaTTTError(
                    f"{type(self.rule).__name__}.gates_at must return the gates that it was given, and {name} was "
                    f"{'not' if before is None else 'one'} of them: give the same gates in `gates`"
                )
            if after is not None and after is not before:
                changed[name] = torch.where(spread(live, after), after.to(before), before)  # type: ignore[arg-type]
        return tokens.with_gates(**changed)

    def learn(
        self, tokens: Tokens, carry: Carry, block: Block, rows: str | None = None
    ) -> tuple[Tensor | None, Carry, Carry]:
        """The inner steps on one block: what queries read if `rows` says which, the carry before the commit and after
        it."""
        entering = carry
        steps = self.rule.steps if self.rule.read != "final" else 1
        size = self.plan.chunk or block.length
        in_common = self.task.together and self.plan.chunks in SHARE and tokens.in_common
        size = size if tokens.views.k.ndim == 4 or in_common else max(1, size // tokens.views.k.shape[3])
        size = size if tokens.gates.decay is None or self.plan.chunks != "solved" else block.length  # it splits them itself
        y: Tensor | None = None
        for step in range(1, steps + 1):
            phase, ys = block.phase, []
            for piece in [tokens] if size >= block.length else tokens.split(size):
                if self.plan.sees_weights:
                    piece = self.gated(piece, carry["commit"])
                carry = self.rule.observe(carry, piece.gates)
                piece = piece if piece.k.ndim == 4 else piece.apart(in_common and piece.in_common)
                y, carry = CHUNKS[self.plan.chunks](self, piece, carry, phase, rows)
                phase = phase + piece.q.shape[2]
                ys.append(y)
            before = carry
            if "commit" in carry and (step < steps or block.commit is not False):
                carry = self._commit(carry, block, step == steps)
        if self.plan.replays or steps > 1:
            carry = _only_complete(entering, carry, block.commit)
        return (torch.cat(ys, dim=2) if rows is not None and len(ys) > 1 else y), before, carry  # type: ignore[arg-type]

    def _commit(self, carry: Carry, block: Block, last: bool) -> Carry:
        """`W_a ← W_t` where the mini-batch is complete."""
        after = self.rule.commit(carry, block.filled)
        if not last or block.commit is True:
            return after
        assert isinstance(block.commit, Tensor)
        return {
            role: carry[role] if role == "weights" else where(block.commit, after.get(role), carry.get(role))
            for role in {**carry, **after}
            if role != "factors"  # those of a mini-batch that is complete
        }


def decayed(weights: Tensors, tokens: Tokens, at: int) -> Tensors:
    """The weights after the decay of a token."""
    if tokens.gates.alpha is not None:
        weights = {name: spread(tokens.gates.alpha[:, :, at], x) * x for name, x in weights.items()}
    if tokens.gates.decay is not None:
        weights = {name: tokens.gates.decay[:, :, at].exp().unsqueeze(-1) * x for name, x in weights.items()}
    return weights


# -- one mini-batch, or a part of it: what each read sees --------------------------------------------------------------


def _per_token(work: Work, tokens: Tokens, carry: Carry, block: Block) -> tuple[Tensor | None, Carry]:
    """Every query its own weights: W_t (`inclusive`) or W_{t−1} (`exclusive`)."""
    if work.rule.steps > 1:
        return _at_the_end(work, tokens, carry, block)
    y, _, after = work.learn(tokens, carry, block, work.rule.read)
    return y, after


def _previous(work: Work, tokens: Tokens, carry: Carry, block: Block) -> tuple[Tensor | None, Carry]:
    """The last commit before the mini-batch."""
    y = work.read(carry["commit"], tokens.views.q)
    if work.plan.replays and block.commit is False:
        return y, carry
    return y, work.learn(tokens, carry, block)[2]


def _committed(work: Work, tokens: Tokens, carry: Carry, block: Block) -> tuple[Tensor | None, Carry]:
    """The last commit, also one that the block's last token completes."""
    ys = [work.read(carry["commit"], tokens.views.q)[:, :, :-1]] if block.length > 1 else []
    after = work.learn(tokens, carry, block)[2]
    last = tokens.views.q if work.learner.mixes_tokens else tokens.views.q[:, :, -1:]
    return torch.cat([*ys, work.read(after["commit"], last)[:, :, -1:]], dim=2), after


def _at_the_end(work: Work, tokens: Tokens, carry: Carry, block: Block) -> tuple[Tensor | None, Carry]:
    """The weights after the block (not causal, but for blocks of one token)."""
    _, before, after = work.learn(tokens, carry, block)
    return work.read(work.rule.current(before, block.filled), tokens.views.q), after


def _answered(work: Work, tokens: Tokens, carry: Carry, block: Block) -> tuple[Tensor | None, Carry]:
    """`final`: nothing is learned any more."""
    return work.read(carry["commit"], tokens.views.q), carry


READS: dict[str, Callable[[Work, Tokens, Carry, Block], tuple[Tensor | None, Carry]]] = {
    "inclusive": _per_token,
    "exclusive": _per_token,
    "previous": _previous,
    "committed": _committed,
    "block": _at_the_end,
    "final": _answered,
}


def _only_complete(before: Carry, after: Carry, complete: bool | Tensor) -> Carry:
    """What a mini-batch leaves behind that is replayed when it goes on, or has no token: nothing, until complete."""
    if isinstance(complete, bool):
        return after if complete else before
    left_out = {"update", *(("weights",) if "commit" in after else ())}  # the newest weights are the commit then
    entered = {"weights": before[newest(before)], **before}
    return {role: where(complete, x, entered.get(role)) for role, x in after.items() if role not in left_out}


# -- through time ------------------------------------------------------------------------------------------------------


class InnerLoop:
    """Runs a learner through time. Made for one call: holds the three parts and what is known of them, and nothing of
    its own.

    Args:
        plan: how this combination is computed.
        group_size: mini-batches that are recomputed together in the backward pass; None takes √(T/b), 0 stores
            everything (a kernel takes a size of its own then).
    """

    def __init__(self, task: Task, learner: Learner, optimizer: InnerOptimizer, plan: Plan, group_size: int | None):
        self.task, self.learner, self.optimizer, self.plan, self.group_size = task, learner, optimizer, plan, group_size

    def start(self, batch: int, dtype: torch.dtype) -> Carry:
        """W0 in every role that a fresh sequence carries, each a copy of its own: what is handed out is the
        caller's."""
        roles = [role for role in self.plan.roles if role in STARTS_AT_W0 and role != "weights"]
        if "commit" not in roles and "anchor" not in roles:
            roles.append("weights")
        carry: Carry = {role: {} for role in roles}
        for name, value in self.learner.init.items():
            for role in roles:
                carry[role][name] = (
                    value.to(dtype).expand(batch, *value.shape).clone(memory_format=torch.contiguous_format)
                )
        return self.optimizer.begin(carry)

    def read(
        self, tokens: Tokens, state: State, after: Tensor, ctx: Context, packing: Packing | None, own: bool = False
    ) -> Result:
        """One call: puts the tokens on the frame, scans, and hands the hidden state on.

        Args:
            tokens: views and gates by token, padding last.
            state: the state before the call; its `weights` are empty at the start of a sequence.
            after: `[B]` tokens since the start of the document, after the call.
            own: the state's weights may be written over.
        """
        plan, operand = self.plan, tokens.views.k.dtype
        self.optimizer.check(tokens.gates)
        if tokens.erases or tokens.views.k.ndim == 5:
            self.check_generalised(tokens)
        if plan.looks_ahead and (ctx.valid is not None or ctx.first is not None or state.phase is None):
            raise MetaTTTError(
                f"{type(self.learner).__name__} lets tokens look at later ones, and would let them look at padding: "
                "make it causal, or give sequences of one length"
            )
        if ctx.first is not None and self.optimizer.read == "final":
            raise MetaTTTError(
                "reset= packs documents, and optimizer.read=final answers all queries of a call with one set of weights"
            )
        carry = state.weights
        if not carry:
            carry, own = self.start(tokens.views.k.shape[0], tokens.gates.eta.dtype), True
        if plan.replays:
            return self._replay(tokens, carry, state, after, ctx)
        plain: list[Block] = []
        phase, end = 0 if plan.period is None else state.phase, 0
        if phase is None and self.learner.mixes_tokens and self.optimizer.read == "final":
            raise MetaTTTError(
                f"{type(self.learner).__name__} looks at several tokens, and optimizer.read=final would show it empty places "
                "of sequences that are inside different places of a mini-batch: give state=None, or sequences of one length"
            )
        if phase is not None and ctx.first is None:
            plain, end = consecutive(tokens.views.k.shape[2], phase, plan.block)
            if ctx.valid is None:
                self._say_cut(phase, end, plain, tokens)
                y, carry = self.run(tokens, carry, plain, None, after, operand, own)
                return Result(y, carry, 0 if plan.period is None else end, {})
        make = make_frame if packing is None else packing.frame
        frame = make(ctx, state, plan.period, plan.block, plain)
        self._say_cut(phase, frame.phase, frame.blocks, tokens)
        placed = mask_gates(tokens if frame.source is None else tokens.map(frame.place), frame.live)
        y, carry = self.run(placed, carry, frame.blocks, frame.live, after, operand, own)
        return Result(frame.take(y), carry, frame.phase, {})

    def check_generalised(self, tokens: Tokens) -> None:
        """Refuses what only a linear learner's online rule can take: its gradient is no longer that of the loss."""
        rule, what = self.optimizer, "decays for every channel" if tokens.gates.decay is not None else "an erase view"
        if tokens.erases and not self.plan.linear:
            why = self.plan.reasons.get("solved", f"optimizer.anchor={rule.anchor}")
            raise MetaTTTError(
                f"{what} needs a linear learner, the squared or dot loss and a gradient at the newest weights, not {why}: "
                "set learner=linear_map and optimizer.anchor=online"
            )
        if tokens.erases and self.learner.linear_map is not None and self.learner.linear_map[1] is not None:
            raise MetaTTTError(f"{what} has no meaning for a bias: set learner.bias=false")
        if tokens.gates.decay is not None and tokens.gates.decay.shape[-1] != tokens.views.k.shape[-1]:
            raise MetaTTTError(
                f"decays for every channel are {tokens.gates.decay.shape[-1]} wide and keys {tokens.views.k.shape[-1]}: they must be equal"
            )
        alone = tokens.gates.alpha is None and tokens.gates.beta is None and not rule.pull and not self.task.together
        if tokens.gates.decay is not None and not alone:
            raise MetaTTTError(
                "decays for every channel stand alone: no decay per head, momentum, pull to W0 or window beside them"
            )
        if (tokens.views.p is not None or tokens.views.b is not None) and self.plan.linear != "squared":
            raise MetaTTTError("an erase view needs a loss that erases, not the dot product: set task.loss=squared")
        if tokens.pairs is not None and self.learner.mixes_tokens:
            raise MetaTTTError(
                f"{type(self.learner).__name__} mixes the tokens of a mini-batch, and would mix the pairs of a token: set another learner"
            )
        if tokens.pairs is not None and rule.state_dependent:
            raise MetaTTTError(
                f"{type(rule).__name__} looks at the weights for every token, and this task gives several pairs a token: set another task"
            )
        if tokens.pairs is not None and rule.accumulates:
            raise MetaTTTError(
                "several pairs a token have no token steps and no clipping: set optimizer.token_steps=none and max_norm=null"
            )
        if tokens.pairs is not None and rule.nesterov:
            raise MetaTTTError("several pairs a token have no look-ahead along the momentum: set optimizer.nesterov=false")
        if tokens.pairs is not None and not self.task.together and (not self.plan.linear or tokens.gates.beta is not None):
            raise MetaTTTError(
                "pairs that are learned one after the other need a linear learner, optimizer.anchor=online and no momentum: "
                "set learner=linear_map and optimizer=online"
            )

    def run(
        self,
        tokens: Tokens,
        carry: Carry,
        blocks: Sequence[Block],
        live: Tensor | None,
        after: Tensor,
        operand: torch.dtype,
        own: bool,
    ) -> tuple[Tensor, Carry]:
        """All columns of a call: predictions `[B, H, columns, d]` and the new carry. `live` `[B, columns]`: filled
        columns."""
        if self.optimizer.read != "final":
            if self.plan.kernels:
                return scan(self, tokens, carry, blocks, live is not None, operand, own)
            y, carry = self.grouped(tokens, carry, blocks, True, operand)
            return y, carry  # type: ignore[return-value]
        if self.plan.outer == "implicit":
            now, carry = converged(self, tokens, carry, blocks, live, after, operand)
            return answers(self, tokens, {"commit": now}, blocks, operand), carry
        *_, carry = steps(self, tokens, carry, blocks, live, after, operand)
        now = self.optimizer.current(carry, after % self.optimizer.mini_batch_size)
        return answers(self, tokens, {"commit": now}, blocks, operand), carry

    def _replay(self, tokens: Tokens, carry: Carry, state: State, after: Tensor, ctx: Context) -> Result:
        """A call of a learner that mixes tokens: the raw tokens of the open mini-batch come first and are read
        again."""
        size, count, operand = self.optimizer.mini_batch_size, tokens.views.k.shape[2], tokens.views.k.dtype
        given, (tokens, ctx) = tokens, with_tail(tokens, ctx, state, size)
        start, length = torch.zeros_like(state.pos), tokens.views.k.shape[2]
        lead = start if state.phase is not None else state.pos % size - (size - 1)
        begin = state._replace(phase=None if state.phase is None else 0)
        frame = make_frame(
            ctx, begin, self.plan.period, self.plan.block, consecutive(length, 0, size)[0], None, start, lead
        )
        placed = mask_gates(tokens.map(frame.place), frame.live)
        self._say_cut(state.phase, frame.phase, frame.blocks, given)
        y, carry = self.run(placed, carry, frame.blocks, frame.live, after, operand, False)
        y = frame.take(y)
        return Result(y[:, :, y.shape[2] - count :], carry, frame.phase, tail(placed, frame, after, size))

    def _say_cut(self, begin: int | None, end: int | None, blocks: Sequence[Block], tokens: Tokens) -> None:
        """Warns, once, of a `block` read whose mini-batches the call cuts: what its queries see depends on T."""
        whole = begin == 0 and (end == 0 or all(block.commit is True for block in blocks))
        if self.optimizer.read != "block" or whole or self.plan.said_cut or torch.compiler.is_compiling():
            return
        self.plan.said_cut = True
        warnings.warn(
            "optimizer.read=block answers a mini-batch of "
            f"optimizer.mini_batch_size={self.optimizer.mini_batch_size} tokens by what all of them teach, and this "
            f"call of T={tokens.views.q.shape[2]} tokens cuts one: set mini_batch_size to a divisor of the length of every "
            "call and document, or optimizer.read=previous",
            stacklevel=2,
        )

    # -- by the forms, in groups ---------------------------------------------------------------------------------------

    def grouped(
        self, tokens: Tokens, carry: Carry, blocks: Sequence[Block], read: bool, operand: torch.dtype
    ) -> tuple[Tensor | None, Carry]:
        size = self.group_size
        # not is_exporting(): under torch.compile, torch 2.11 takes it for true
        if torch.compiler._is_exporting_flag and self.plan.chunks != "solved":
            return recomputed(self, tokens, carry, blocks, read, operand, inlined)
        if not torch.is_grad_enabled() or torch.compiler.is_compiling() or transformed():
            return self.forward(tokens, carry, blocks, read, operand)
        if not self._differentiable(
            tokens, carry
        ):  # the inner gradients alone must not make the result look as if it were
            with torch.no_grad():
                return self.forward(tokens, carry, blocks, read, operand)
        if size == 0:
            return self.forward(tokens, carry, blocks, read, operand)
        if size is None:
            # (not under a checkpoint of somebody's: every gradient inside the forward pass would run it again)
            if tokens.views.k.shape[2] <= STORED and saved_tensor_hooks(False) is None:
                return self.forward(tokens, carry, blocks, read, operand)
            size = max(1, round(math.sqrt(len(blocks))))
        key = (read, operand, tuple(carry), *(x is None for x in tokens.tensors))
        if key not in self.plan.beside:
            self.plan.beside[key] = captured(self, tokens, carry, read, operand)
        beside = self.plan.beside[key]
        if beside:
            self.plan.say_stored(beside)
            return self.forward(tokens, carry, blocks, read, operand)
        groups = [blocks[i : i + size] for i in range(0, len(blocks), size)]
        outputs: list[Tensor] = []
        for group, piece in zip(
            groups, tokens.split([sum([b.length for b in group]) for group in groups]), strict=True
        ):
            y, carry = recomputed(self, piece, carry, group, read, operand)
            outputs += [] if y is None else [y]
        return (torch.cat(outputs, dim=2) if outputs else None), carry

    def _differentiable(self, tokens: Tokens, carry: Carry) -> bool:
        """Whether the outer loop wants a derivative by anything here."""
        for x in tokens.tensors:
            if x is not None and x.requires_grad:
                return True
        weights = [x for named in carry.values() for x in named.values()]
        return any(
            x.requires_grad
            for part in (self.task, self.learner, self.optimizer)
            for x in (*weights, *part.parameters())
        )

    def forward(
        self,
        tokens: Tokens,
        carry: Carry,
        blocks: Sequence[Block],
        read: bool,
        operand: torch.dtype,
        rule: InnerOptimizer | None = None,
        slow: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tensor | None, Carry]:
        """Consecutive blocks in a plain loop, with autocast off: `operand` says where rounding is allowed.

        `rule` and `slow` stand for the optimizer and for the learner's slow weights, where these are not the module's
        own.
        """
        rule, given = self.optimizer if rule is None else rule, self.learner.slow if slow is None else slow
        if rule.has_token_steps and not torch.compiler.is_compiling():
            rule = rule.with_token_steps(rule.token_steps())
        dtype, outputs, policy = tokens.gates.eta.dtype, [], READS[rule.read]
        with torch.autocast(tokens.views.k.device.type, enabled=False):
            if operand != dtype:
                alike = tokens.in_common  # stays so: a window of rows, not of copies
                views = [
                    None if x is None else rows(x).to(dtype).unfold(2, x.shape[3], 1).mT if alike and x.ndim == 5 else x.to(dtype)
                    for x in tokens.views
                ]
                tokens = Tokens(Views(*views), tokens.gates)  # type: ignore[arg-type]
            wide = {name: value.to(dtype) for name, value in given.items()}
            work = Work(self.task, self.learner, rule, self.plan, wide, operand)
            if tokens.gates.decay is not None and self.plan.chunks == "solved" and rule.period is None:
                blocks = joined(blocks)
            parts = [tokens] if len(blocks) == 1 else tokens.split([block.length for block in blocks])
            for block, part in zip(blocks, parts, strict=True):
                if block.restart is not None:
                    carry = self._restarted(carry, block.restart, dtype)
                if read:
                    y, carry = policy(work, part, carry, block)
                    outputs.append(y)
                else:
                    carry = work.learn(part, carry, block)[2]
            return (None if not read else torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]), carry  # type: ignore[arg-type]

    def _restarted(self, carry: Carry, restart: Tensor, dtype: torch.dtype) -> Carry:
        """The state that sequences start with, where `restart` `[B]` says so."""
        fresh = self.start(len(restart), dtype)
        newest = next(iter(fresh.values()))
        return {
            role: where(restart, fresh.get(role, newest) if role in STARTS_AT_W0 else None, weights)
            for role, weights in carry.items()
        }

    def with_parts(self, task: Task, learner: Learner, optimizer: InnerOptimizer) -> InnerLoop:
        """The same loop over copies of the parts that hold other parameters."""
        return InnerLoop(task, learner, optimizer, self.plan, self.group_size)


def joined(blocks: Sequence[Block]) -> list[Block]:
    """Blocks of a rule that looks at no phase together, up to `JOINED` tokens, as far as no document starts between."""
    found: list[Block] = []
    for block in blocks:
        if found and block.restart is None and found[-1].length + block.length <= JOINED:
            found[-1] = found[-1]._replace(length=found[-1].length + block.length)
        else:
            found.append(block)
    return found


def consecutive(length: int, phase: int, block: int) -> tuple[list[Block], int]:
    """Blocks of `length` tokens that stand at the same place of their mini-batch in all sequences, and their place
    after them."""
    blocks, start = [], 0
    while start < length:
        size = min(block - phase, length - start)
        filled = phase + size
        # an explicit branch: under torch.compile the comparison itself is symbolic
        blocks.append(Block(size, phase, True if filled == block else False, filled))  # noqa: SIM210
        start, phase = start + size, filled % block
    return blocks, phase
