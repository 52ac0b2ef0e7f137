"""Runs consecutive mini-batches: chooses between a plain loop, recomputation, and what autocast, compilers, exporters
and function transforms need.

Recomputation passes derivatives to the inputs of a group: tokens, weights, and the parameters of the parts. If a part
uses another tensor that requires a gradient (`captured`), every mini-batch is stored instead, which is exact and takes
as much memory as `layer.group_size=0`. The layer logs this once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from metattt.errors import MetaTTTError
from metattt.functional import with_values
from metattt.inner.compiled import in_a_loop
from metattt.inner.export import inlined
from metattt.inner.parts import Parts
from metattt.inner.recompute import random_state, recompute, replay
from metattt.inner.tokens import Block, Tokens, each, most_joined
from metattt.memory import Memory, named
from metattt.modules import RECORDING, TRACED, transformed
from metattt.nested import map_tensors, tensors_of
from metattt.optimizers.base import InnerOptimizer
from metattt.state import Tensors
from metattt.torch_private import saved_tensor_hooks

STORED = 128  # tokens: a call no longer than this keeps everything for its backward pass instead of running it again


def in_groups(
    loop: Parts, tokens: Tokens, memory: Memory, blocks: Sequence[Block], read: bool
) -> tuple[Tensor | None, Memory]:
    """`InnerLoop.mini_batches`, in groups of `layer.group_size` that are run again in the backward pass."""
    size = loop.group_size
    # (A rule with a commit of its own would compute that for every token.)
    compiling = torch.compiler.is_compiling()  # torch 2.11 cannot compile what asks a ContextVar
    traced = not compiling and RECORDING.get() >= TRACED and type(loop.rule).commit is InnerOptimizer.commit
    # not is_exporting(): under torch.compile, torch 2.11 takes it for true
    if (traced or torch.compiler._is_exporting_flag) and not loop.plan.solved:
        return recomputed(loop, tokens, memory, blocks, read, inlined)
    if torch.compiler._is_exporting_flag and isinstance(tokens.views.k.shape[2], torch.SymInt):
        raise MetaTTTError("torch.export writes a loop over chunks out for one length: leave it out of dynamic_shapes")
    if compiling:
        return in_a_loop(loop, tokens, memory, blocks, read)
    if not torch.is_grad_enabled() or transformed():
        return loop.mini_batches(tokens, memory, blocks, read)
    if not _differentiable(loop, tokens, memory) and not _beside(loop, tokens, memory, read):
        with torch.no_grad():  # inner gradients must not make the result look as if it were differentiable
            return loop.mini_batches(tokens, memory, blocks, read)
    if size is None:
        # (not inside a checkpoint of the caller: every gradient in the forward pass would run it again)
        few = tokens.views.k.shape[2] <= STORED and saved_tensor_hooks(False) is None
        least = most_joined(tokens) // loop.plan.block if loop.plan.form == "chunks" else 1
        size = 0 if few else max(least, round(math.sqrt(sum([block.times for block in blocks]))), 1)
    if size == 0:
        return loop.mini_batches(tokens, memory, blocks, read)
    beside = _beside(loop, tokens, memory, read)
    if beside:
        loop.plan.say_stored(beside)
        return loop.mini_batches(tokens, memory, blocks, read)
    blocks = each(blocks)
    groups = [blocks[i : i + size] for i in range(0, len(blocks), size)]
    outputs: list[Tensor] = []
    pieces = tokens.split([sum([block.length for block in group]) for group in groups])
    for group, piece in zip(groups, pieces, strict=True):
        y, memory = recomputed(loop, piece, memory, group, read)
        outputs += [] if y is None else [y]
    return (torch.cat(outputs, dim=2) if outputs else None), memory


def _differentiable(loop: Parts, tokens: Tokens, memory: Memory) -> bool:
    """Whether any tensor here requires a gradient of the outer loop."""
    for x in (*tokens.views, *tokens.gates):
        if x is not None and x.requires_grad:
            return True
    weights = [x for named in memory.values() for x in named.values()]
    parts = loop.task, loop.learner, loop.rule
    return any(x.requires_grad for part in parts for x in (*weights, *part.parameters(), *part.buffers()))


def in_full(mini_batches: Any) -> Any:
    """Decorates `InnerLoop.mini_batches`: autocast is off (`matmul_dtype` is the type to which operands of products are
    rounded), views have the type of the gates, and what is the same for all mini-batches is computed once."""

    @wraps(mini_batches)
    def run(loop: Any, tokens: Tokens, memory: Memory, blocks: Sequence[Block], read: bool) -> Any:
        rule, dtype, device = loop.rule, tokens.gates.eta.dtype, tokens.views.k.device.type
        if rule.has_token_steps and not torch.compiler.is_compiling():
            tau = rule.token_steps()
            rule = rule.bound(token_steps=lambda: tau)
        with torch.autocast("cpu" if device == "meta" else device, enabled=False):  # (autocast knows no meta device)
            slow = {name: value.to(dtype) for name, value in (loop.slow or loop.learner.slow).items()}
            return mini_batches(loop._replace(rule=rule, slow=slow), tokens.wide(), memory, blocks, read)

    return run


def recomputed(
    loop: Parts,
    tokens: Tokens,
    memory: Memory,
    blocks: Sequence[Block],
    read: bool,
    through: Callable[..., Sequence[Tensor]] = recompute,
) -> tuple[Tensor | None, Memory]:
    """`mini_batches`, recomputed in the backward pass. Parameters travel as inputs, and are put into copies of the
    parts.

    (`torch.func.functional_call` would put them into the parts themselves, where another thread finds them.) `through`
    runs a function of tensors: `recompute`, or what writes it out for an export.
    """
    body, given, after = _as_function(loop, tokens, memory, blocks, read, buffers=through is not recompute)
    outputs = iter(through(body, *given))
    y = next(outputs) if read else None
    return y, named(after, outputs)


def _beside(loop: Parts, tokens: Tokens, memory: Memory, read: bool) -> list[str]:
    """The names of `captured`, found once for every kind of call."""
    parts = loop.task, loop.learner, loop.rule
    modes = [part.training for part in parts] + [x.requires_grad for part in parts for x in part.buffers()]
    key = (read, loop.matmul_dtype, tuple(memory), *modes, *(x is None for x in tokens.tensors))
    beside = loop.plan.beside.get(key)
    if beside is None:
        beside, others = captured(loop, tokens, memory, read)
        if beside or not others:  # what needs no gradient in this call may need one in the next
            loop.plan.beside[key] = beside
    return beside


def captured(loop: Parts, tokens: Tokens, memory: Memory, read: bool) -> tuple[list[str], bool]:
    """Names of tensors that require a gradient and that recomputation would miss: the inner loop uses them through a
    closure, a partial, or a tensor made in `views`, not as a token, weight, parameter or buffer. Also whether there are
    such tensors at all, with or without a gradient.

    The names are found in the graph of one token, as leaves that are not its inputs. The token completes a mini-batch,
    because a read may depend on commits only.
    """
    one = tokens.map(lambda x: x[:, :, :1])
    body, given, _ = _as_function(loop, one, memory, [Block(1, 0, True, 1)], read)
    # All inputs are differentiated, so that no leaf has to be made inside.
    inputs = [x.detach().requires_grad_() if x.is_floating_point() else x for x in given]
    device = inputs[0].device
    parts = {"task": loop.task, "learner": loop.learner, "optimizer": loop.rule}
    others = _Others([*inputs, *(x for part in parts.values() for x in part.buffers())])
    unchanged = saved_tensors_hooks(lambda x: x, lambda x: x)
    with torch.enable_grad(), replay(random_state(device), device), unchanged, others:
        outputs = body(*inputs)
    known, seen, leaves = {id(x) for x in inputs}, set(), []
    ahead = [y.grad_fn for y in outputs]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            leaf = getattr(node, "variable", None)
            leaves += [leaf] if leaf is not None and id(leaf) not in known else []
            ahead += [following for following, _ in node.next_functions]
    names = {id(x): f"{part}.{name}" for part, module in parts.items() for name, x in module.named_parameters()}
    return sorted({names.get(id(leaf), f"a tensor of shape {list(leaf.shape)}") for leaf in leaves}), others.found


class _Others(TorchFunctionMode):
    """Notices whether an operation takes a number that is not `known` and was made by no operation before it."""

    def __init__(self, known: Sequence[Tensor]):
        super().__init__()
        self.known, self.found = {id(x): x for x in known}, False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        taken = tensors_of((args, kwargs))
        self.found = self.found or any(id(x) not in self.known and x.is_floating_point() for x in taken)
        result = function(*args, **(kwargs or {}))
        self.known |= {id(x): x for x in tensors_of(result)}
        return result


def _as_function(
    loop: Parts,
    tokens: Tokens,
    memory: Memory,
    blocks: Sequence[Block],
    read: bool,
    buffers: bool = False,
) -> tuple[Callable[..., list[Tensor]], list[Tensor], list[tuple[str, str]]]:
    """`mini_batches` as a function of tensors, these tensors, and (once it has run) what its outputs after the
    predictions are."""
    parts = nn.ModuleList((loop.task, loop.learner, loop.rule))
    parameters: Tensors = dict(parts.named_parameters())
    if buffers:
        parameters |= dict(parts.named_buffers())
    held = tokens, memory, blocks, parameters
    places: Any = map_tensors(lambda _: ..., held)  # `body` keeps no tensor
    after: list[tuple[str, str]] = []

    def body(*tensors: Tensor) -> list[Tensor]:
        rest = iter(tensors)
        given, entering, columns, values = map_tensors(lambda _: next(rest), places, type(...))
        task, learner, rule = with_values(parts, values)
        inside = loop._replace(task=task, learner=learner, rule=rule)  # type: ignore[arg-type]
        y, leaving = inside.mini_batches(given, entering, columns, read)
        after[:] = [(slot, name) for slot, weights in leaving.items() for name in weights]
        return ([y] if y is not None else []) + [leaving[slot][name] for slot, name in after]

    return body, tensors_of(held), after
