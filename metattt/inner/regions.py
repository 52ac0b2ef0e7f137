"""Mini-batches for `torch.compile`: one is compiled, and stands for all that are like it.

Written out, a sequence of T tokens is a graph of T/b mini-batches with an inner backward pass each: minutes of
compilation, and another one for every length. As a region (`torch.compiler.nested_compile_region`) a mini-batch is traced
and compiled once, and called for the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from metattt.inner.parts import Parts
from metattt.inner.plan import Plan
from metattt.inner.tokens import Block, Tokens
from metattt.learners.base import Learner
from metattt.memory import Memory
from metattt.optimizers.base import InnerOptimizer
from metattt.tasks.base import Task

Names = tuple[tuple[str, str], ...]

SUPPORTED = torch.__version__ >= "2.14"  # 2.11 fails on torch.func.vjp inside a region; 2.12 and 2.13 were not tried


def by_regions(
    loop: Parts, tokens: Tokens, memory: Memory, blocks: Sequence[Block], read: bool
) -> tuple[Tensor | None, Memory]:
    """`metattt.inner.execution.plainly`, with a region for every mini-batch that is like the one before it: of the same
    length and place, and entered and left with the same names in the memory."""
    from metattt.inner.execution import plainly

    if not SUPPORTED or tokens.views.k.ndim == 5 or (tokens.gates.decay is not None and loop.plan.form == "solved"):
        return plainly(loop, tokens, memory, blocks, read)  # several pairs a token; blocks that are joined
    outputs: list[Tensor] = []
    settled: Block | None = None
    for block, part in zip(blocks, tokens.split([block.length for block in blocks]), strict=True):
        names, whole = _names(memory), isinstance(block.phase, int) and block.commit is True and block.restart is None
        if whole and block == settled:
            present = tuple(x is not None for x in part.tensors)
            # copies: a region is compiled for strides and offsets, too
            given = [x.clone() for x in part.tensors if x is not None]
            entering = [memory[slot][name].clone() for slot, name in names]
            parts = loop.task, loop.learner, loop.rule, loop.plan, loop.matmul_dtype
            found = _region(*parts, block, read, present, names, *given, *entering)
            y, leaving = (found[0], found[1:]) if read else (None, found)
            memory = _named(names, leaving)
        else:
            y, memory = plainly(loop, part, memory, [block], read)
            settled = block if whole and _names(memory) == names else None
        if y is not None:
            outputs.append(y)
    return (torch.cat(outputs, dim=2) if outputs else None), memory


@torch.compiler.nested_compile_region
def _region(
    task: Task,
    learner: Learner,
    rule: InnerOptimizer,
    plan: Plan,
    matmul_dtype: torch.dtype,
    block: Block,
    read: bool,
    present: tuple[bool, ...],
    names: Names,
    *tensors: Tensor,
) -> tuple[Tensor, ...]:
    from metattt.inner.execution import plainly
    from metattt.inner.loop import InnerLoop

    rest = iter(tensors)
    tokens = Tokens.from_tensors([next(rest) if here else None for here in present])
    memory = _named(names, list(rest))
    y, memory = plainly(InnerLoop(task, learner, rule, plan, 0, matmul_dtype), tokens, memory, [block], read)
    return (*(() if y is None else (y,)), *(memory[slot][name] for slot, name in names))


def _names(memory: Memory) -> Names:
    return tuple((slot, name) for slot, weights in memory.items() for name in weights)


def _named(names: Names, tensors: Sequence[Tensor]) -> Memory:
    memory: Memory = {}
    for (slot, name), x in zip(names, tensors, strict=True):
        memory.setdefault(slot, {})[name] = x
    return memory
