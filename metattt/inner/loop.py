"""The inner loop: one learner trained along the sequence, mini-batch by mini-batch."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from metattt.errors import MetaTTTError
from metattt.inner.export import inlined
from metattt.inner.forms import Carry, Forms, Tokens, spread
from metattt.inner.gradients import in_transform
from metattt.inner.packing import Block, Frame
from metattt.inner.recompute import recompute
from metattt.kernels.base import Kernel, MiniBatches, covering
from metattt.learners.base import Learner
from metattt.optimizers.base import InnerOptimizer
from metattt.replica import call_with
from metattt.state import Tensors
from metattt.tasks.base import Task

log = logging.getLogger("metattt")

Through = Callable[..., Sequence[Tensor]]

STARTS_AT_W0 = ("commit", "anchor", "origin", "weights")  # roles that hold weights; all others start from zero


def mask_gates(tokens: Tokens, live: Tensor | None) -> Tokens:
    """Tokens whose unfilled columns change nothing: η = 0, α = β = 1, κ = 0. `live` `[B, columns]`."""
    if live is None:
        return tokens
    live = live.unsqueeze(1)
    general = any(gate is not None for gate in tokens.gates[1:])
    kappa = tokens.kappa if tokens.kappa is not None else torch.ones_like(tokens.eta) if general else None
    return tokens._replace(
        eta=torch.where(live, tokens.eta, 0),
        alpha=None if tokens.alpha is None else torch.where(live, tokens.alpha, 1),
        beta=None if tokens.beta is None else torch.where(live, tokens.beta, 1),
        kappa=None if kappa is None else torch.where(live, kappa, 0),
    )


class InnerLoop(nn.Module):
    """Runs a learner through time. Holds no parameters but those of its three parts.

    Args:
        form: `primal`, `dual`, `summed`, or `fused`: whole mini-batches by a kernel that covers the combination, the others as `dual`.
        group_size: mini-batches that are recomputed together in the backward pass; None takes √(T/b), 0 stores everything (a kernel
            takes a size of its own then).
        strict: a call that no kernel accepts is refused instead of computed as `dual`.
    """

    def __init__(
        self, task: Task, learner: Learner, optimizer: InnerOptimizer, form: str, group_size: int | None, strict: bool = False
    ):
        super().__init__()
        self.task, self.learner, self.optimizer = task, learner, optimizer
        self.form, self.group_size, self.strict = "dual" if form == "fused" else form, group_size, strict
        self.kernels = covering(task, learner, optimizer)[0] if form == "fused" else []
        self._said: set[str] = set()
        self._shapes: dict[tuple[object, ...], list[torch.Size]] = {}

    @property
    def replays(self) -> bool:
        """Whether an open mini-batch is carried as raw tokens and run again when it goes on."""
        rule = self.optimizer
        return rule.read != "final" and (self.learner.mixes_tokens or (rule.steps > 1 and rule.mini_batch_size > 1))

    def start(self, batch: int, dtype: torch.dtype) -> Carry:
        """W0 in every role that a fresh sequence carries."""
        weights = {name: value.to(dtype).expand(batch, *value.shape) for name, value in self.learner.init.items()}
        bases = self.optimizer.bases
        roles = {role for role in bases if role in ("commit", "anchor", "origin")}
        if not roles & {"commit", "anchor"}:
            roles.add("weights")
        return {role: dict(weights) for role in bases if role in roles}

    # -- through time ----------------------------------------------------------------------------------------------------------

    def run(self, tokens: Tokens, carry: Carry, frame: Frame, filled: Tensor, operand: torch.dtype) -> tuple[Tensor, Carry]:
        """All columns of a call.

        Args:
            tokens: views and gates by column.
            carry: weights by role and name.
            filled: `[B]` tokens of the open mini-batch after the call.
            operand: type of matmul operands.

        Returns:
            Predictions `[B, H, columns, d]` and the new carry.
        """
        if self.optimizer.read != "final":
            y, carry = self._scan(tokens, carry, frame.blocks, True, operand)
            assert y is not None
            return y, carry
        *_, carry = self.steps(tokens, carry, frame, filled, operand)
        return self._read(tokens, {"commit": self.optimizer.current(carry, filled)}, operand), carry

    def steps(self, tokens: Tokens, carry: Carry, frame: Frame, filled: Tensor, operand: torch.dtype) -> Iterator[Carry]:
        """The carry before the first inner step of a `final` read and after each of them."""
        rule = self.optimizer
        order = rule.permutation(tokens.k.shape[2], tokens.k.device)
        if order is not None:
            if frame.live is not None:
                raise MetaTTTError("optimizer.sampling=sgd takes parts of equal size, and padding makes them unequal: use full")
            size = tokens.k.shape[2] // rule.steps
            yield carry
            for part in tokens.map(lambda x: _permuted(x, order)).split([size] * rule.steps):
                _, carry = self._scan(part, carry, [Block(size, 0, True, size)], False, operand)
                yield carry
            return
        yield carry
        for step in range(rule.steps):
            _, carry = self._scan(tokens, carry, frame.blocks, False, operand)
            yield carry
            if step + 1 < rule.steps:  # the next pass takes its gradients where this one ended
                now = rule.current(carry, filled)
                kept = {role: carry[role] for role in ("origin", "momentum") if role in carry}
                carry = kept | {role: now for role in carry if role in ("commit", "anchor")} or {"weights": now}

    def _read(self, tokens: Tokens, carry: Carry, operand: torch.dtype) -> Tensor:
        """All queries answered by one set of weights, in pieces that are recomputed in the backward pass."""
        count, size = tokens.q.shape[2], self.optimizer.compute_chunk or 2048
        blocks = [Block(min(size, count - start), 0, False, 0) for start in range(0, count, size)]
        y, _ = self._scan(tokens, carry, blocks, True, operand)
        assert y is not None
        return y

    def _scan(self, tokens: Tokens, carry: Carry, blocks: Sequence[Block], read: bool, operand: torch.dtype) -> tuple[Tensor | None, Carry]:
        """The blocks one after the other: runs of whole mini-batches by a kernel where one accepts them, the rest in groups."""
        if not (read and self.kernels):
            return self._grouped(tokens, carry, blocks, read, operand)
        outputs: list[Tensor] = []
        runs: list[list[Block]] = []
        for block in blocks:
            if runs and block.whole(self.optimizer.mini_batch_size) == runs[-1][0].whole(self.optimizer.mini_batch_size):
                runs[-1].append(block)
            else:
                runs.append([block])
        for run, piece in zip(runs, tokens.split([sum([block.length for block in run]) for run in runs]), strict=True):
            whole = run[0].whole(self.optimizer.mini_batch_size)
            if whole and set(carry) != {"commit"}:  # the first block ends a mini-batch that an earlier call began
                first, piece = piece.split([run[0].length, sum([block.length for block in run[1:]])])
                y, carry = self._grouped(first, carry, run[:1], True, operand)
                run = run[1:]
                outputs += [] if y is None else [y]
            if not run:
                continue
            given = self._mini_batches(piece, carry, operand) if whole else None
            kernel = None if given is None else self._kernel(given)
            if given is None or kernel is None:
                y, carry = self._grouped(piece, carry, run, True, operand)
            else:
                with torch.autocast(piece.k.device.type, enabled=False):
                    y, weights = kernel.scan(given, self._reference)
                carry = {"commit": weights}
            outputs += [] if y is None else [y]
        return (torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]), carry

    def _mini_batches(self, tokens: Tokens, carry: Carry, operand: torch.dtype) -> MiniBatches:
        rule, slow = self.optimizer, {name: value for name, value in self.learner.slow.items()}  # noqa: C416 (as compile traces it)
        return MiniBatches(tokens, carry["commit"], slow, rule.token_steps(), rule.mini_batch_size, operand, self.group_size)

    def _kernel(self, given: MiniBatches) -> Kernel | None:
        """The first kernel that takes these tensors.

        Raises:
            MetaTTTError: none does, and `layer.form=fused` was asked for.
        """
        device, reasons = given.tokens.k.device.type, []
        if in_transform() and not torch.compiler.is_compiling():  # (to a compiler every call looks like one)
            reasons = ["kernels do not run inside torch.func transforms"]
        else:
            for kernel in self.kernels:
                if kernel.device != device:
                    reason: str | None = f"for {kernel.device}"
                elif torch.compiler.is_compiling() and not kernel.traceable:
                    reason = "not under torch.compile"
                else:
                    reason = kernel.accepts(given)
                if reason is None:
                    self._say(f"form=fused on {device}: {kernel.name}")
                    return kernel
                reasons.append(f"{kernel.name}: {reason}")
        message = "; ".join(reasons)
        if self.strict:
            raise MetaTTTError(f"layer.form=fused: no kernel takes this call on {device} ({message}): set layer.form=auto")
        self._say(f"form=dual on {device}: {message}")
        return None

    def _say(self, choice: str) -> None:
        """The choice of a kernel in the debug log, once."""
        if not torch.compiler.is_compiling() and choice not in self._said:
            self._said.add(choice)
            log.debug(choice)

    def _reference(self, given: MiniBatches) -> tuple[Tensor, Tensors]:
        """What a kernel computes, by the dual form."""
        rule = copy.copy(self.optimizer)
        rule.__dict__["token_steps"] = lambda: given.tau  # the tensor that the derivatives are wanted for
        loop = InnerLoop(self.task, self.learner, rule, "dual", 0)
        blocks = [Block(given.size, 0, True, given.size)] * (given.tokens.k.shape[2] // given.size)
        slow = {f"learner.slow.{name}": value for name, value in given.slow.items()}
        y, carry = call_with(loop, slow, given.tokens, {"commit": given.weights}, blocks, True, given.operand)
        return y, carry["commit"]

    def _grouped(
        self, tokens: Tokens, carry: Carry, blocks: Sequence[Block], read: bool, operand: torch.dtype
    ) -> tuple[Tensor | None, Carry]:
        size = self.group_size if self.group_size is not None else max(1, round(math.sqrt(len(blocks))))
        if torch.compiler.is_exporting() and not self._forms(tokens.k.dtype, operand).solves:
            return self._recomputed(tokens, carry, blocks, read, operand, inlined)
        if size == 0 or not torch.is_grad_enabled() or torch.compiler.is_compiling() or in_transform():
            return self(tokens, carry, blocks, read, operand)
        groups = [blocks[i : i + size] for i in range(0, len(blocks), size)]
        outputs: list[Tensor] = []
        for group, piece in zip(groups, tokens.split([sum(b.length for b in group) for group in groups]), strict=True):
            y, carry = self._recomputed(piece, carry, group, read, operand)
            outputs += [] if y is None else [y]
        return (torch.cat(outputs, dim=2) if outputs else None), carry

    def _recomputed(
        self,
        tokens: Tokens,
        carry: Carry,
        blocks: Sequence[Block],
        read: bool,
        operand: torch.dtype,
        through: Through = recompute,
    ) -> tuple[Tensor | None, Carry]:
        """`forward`, recomputed in the backward pass. Parameters travel as inputs, so that `functional_call` around us stays right."""
        parameters: Tensors = dict(self.named_parameters())
        if through is inlined:  # then they have no values either
            parameters |= dict(self.named_buffers())
        present = [x is not None for x in tokens]
        keys = [(role, name) for role, weights in carry.items() for name in weights]
        after: list[tuple[str, str]] = []

        def body(*tensors: Tensor) -> list[Tensor]:
            rest = iter(tensors)
            given = Tokens(*(next(rest) if here else None for here in present))  # type: ignore[arg-type]
            entering: Carry = {}
            for role, name in keys:
                entering.setdefault(role, {})[name] = next(rest)
            values = dict(zip(parameters, rest, strict=True))
            y, leaving = call_with(self, values, given, entering, blocks, read, operand)
            after[:] = [(role, name) for role, weights in leaving.items() for name in weights]
            return ([y] if read else []) + [leaving[role][name] for role, name in after]

        entering = [carry[role][name] for role, name in keys]
        outputs = iter(through(body, *(x for x in tokens if x is not None), *entering, *parameters.values()))
        y = next(outputs) if read else None
        leaving: Carry = {}
        for role, name in after:
            leaving.setdefault(role, {})[name] = next(outputs)
        return y, leaving

    def forward(
        self, tokens: Tokens, carry: Carry, blocks: Sequence[Block], read: bool, operand: torch.dtype
    ) -> tuple[Tensor | None, Carry]:
        """Consecutive blocks in a plain loop, with autocast off: `operand` says where rounding is allowed."""
        outputs: list[Tensor] = []
        with torch.autocast(tokens.k.device.type, enabled=False):
            tokens = tokens.to(tokens.eta.dtype)
            forms = self._forms(tokens.k.dtype, operand)
            for block, piece in zip(blocks, tokens.split([b.length for b in blocks]), strict=True):
                y, carry = self._block(piece, carry, block, read, forms)
                outputs += [] if y is None else [y]
            return (torch.cat(outputs, dim=2) if outputs else None), carry

    def _forms(self, dtype: torch.dtype, operand: torch.dtype) -> Forms:
        slow = {name: value.to(dtype) for name, value in self.learner.slow.items()}
        return Forms(self.task, self.learner, self.optimizer, self.form, slow, operand, self._shapes)

    # -- one mini-batch, or a part of it ---------------------------------------------------------------------------------------

    def _block(self, tokens: Tokens, carry: Carry, block: Block, read: bool, forms: Forms) -> tuple[Tensor | None, Carry]:
        rule = self.optimizer
        if rule.read == "final" and read:
            return forms.read(carry["commit"], tokens.q), carry
        if block.restart is not None:
            carry = self._restart(carry, block.restart, tokens.k)
        entering = carry
        ys: list[Tensor] = []
        if read and rule.read == "previous":
            ys = [forms.read(carry["commit"], tokens.q)]
        elif read and rule.read == "committed" and block.length > 1:
            ys = [forms.read(carry["commit"], tokens.q)[:, :, :-1]]
        if self.replays and block.commit is False and rule.read == "previous":
            return (ys[0] if ys else None), entering
        rows = rule.read if read and rule.read in ("inclusive", "exclusive") and rule.steps == 1 else None
        size = block.length if self.learner.mixes_tokens else 1 if rule.anchor == "online" and not forms.solves else rule.chunk
        lengths = [min(size, block.length - i) for i in range(0, block.length, size)]
        steps = rule.steps if rule.read != "final" else 1
        for step in range(1, steps + 1):
            phase = block.phase
            for piece in tokens.split(lengths) if len(lengths) > 1 else [tokens]:
                y, carry = forms.chunk(piece, carry, phase, rows)
                phase = phase + piece.k.shape[2]
                ys += [] if y is None else [y]
            if step == steps and read and rows is None and rule.read in ("block", "inclusive"):
                ys = [forms.read(rule.current(carry, block.filled), tokens.q)]
            carry = self._commit(carry, block if step == steps else block._replace(commit=True))
        if self.replays:
            carry = self._only_complete(entering, carry, block.commit)
        if read and rule.read == "committed":
            last = tokens.q if self.learner.mixes_tokens else tokens.q[:, :, -1:]
            ys.append(forms.read(carry["commit"], last)[:, :, -1:])
        return (torch.cat(ys, dim=2) if len(ys) > 1 else ys[0] if ys else None), carry

    def _commit(self, carry: Carry, block: Block) -> Carry:
        """`W_a ← W_t` where the mini-batch is complete."""
        if "commit" not in carry or block.commit is False:
            return carry
        after = self.optimizer.commit(carry, block.filled)
        if block.commit is True:
            return after
        return {
            role: carry[role] if role == "weights" else _where(block.commit, after.get(role), carry.get(role))
            for role in {**carry, **after}
            if role != "factors"  # those of a mini-batch that is complete
        }

    def _restart(self, carry: Carry, restart: Tensor, like: Tensor) -> Carry:
        """The state that sequences start with, where `restart` says so."""
        origin = next(iter(self.start(like.shape[0], like.dtype).values()))
        return {role: _where(restart, origin if role in STARTS_AT_W0 else None, weights) for role, weights in carry.items()}

    def _only_complete(self, before: Carry, after: Carry, complete: bool | Tensor) -> Carry:
        """What a replayed mini-batch leaves behind: nothing, until it is complete."""
        if isinstance(complete, bool):
            return after if complete else before
        return {role: _where(complete, weights, before.get(role)) for role, weights in after.items() if role not in ("update", "weights")}


def _permuted(x: Tensor, order: Tensor) -> Tensor:
    """Tokens of `x` `[B, H, T, ...]` in the order `[1, H, T]`."""
    index = order.view(*order.shape, *(1,) * (x.ndim - 3))
    return x.gather(2, index.expand(x.shape[0], -1, -1, *x.shape[3:]))


def _where(condition: Tensor, a: Tensors | None, b: Tensors | None) -> Tensors:
    """`a` where `condition` `[B]`, else `b`; None stands for zeros."""
    return {
        name: torch.where(spread(condition, x), 0 if a is None else a[name], 0 if b is None else b[name])
        for name, x in (a or b or {}).items()
    }
