"""Mini-batches for `torch.compile`: one is compiled, and runs in a loop for all equal ones.

Written out, a sequence of T tokens is a graph of T/b mini-batches with an inner backward pass each, which takes
minutes to compile and anew for every length. As the body of a `scan` a mini-batch is traced and compiled once, with its
derivative.

Inductor (torch 2.14) writes into the memory of what a loop reads, as buffers that it uses again and as operations in
place; gradients of the loop's inputs were then wrong by large factors. So the loop is used only after `allow`, which
forbids both, lets a graph contain the number of a step, and keeps settings numbers, because a loop takes no float that
the compiler leaves open. With an open number of steps outputs were wrong too: every length has a graph of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan

from metattt.inner.parts import Parts
from metattt.inner.tokens import Block, Tokens
from metattt.memory import Memory, named


@torch.compiler.assume_constant_result
def allowed() -> bool:
    """Whether the loop computes correct gradients in this process."""
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    writes = inductor.allow_buffer_reuse or inductor.inplace_buffers
    return torch.__version__ >= "2.14" and not writes and dynamo.capture_scalar_outputs


def allow() -> None:
    """Lets this process use the loop: changes four settings of `torch.compile`."""
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    inductor.allow_buffer_reuse, inductor.inplace_buffers = False, False
    dynamo.capture_scalar_outputs, dynamo.specialize_float = True, True


def in_a_loop(
    loop: Parts, tokens: Tokens, memory: Memory, blocks: Sequence[Block], read: bool
) -> tuple[Tensor | None, Memory]:
    """As `InnerLoop.mini_batches`; the second mini-batch is compiled for all equal ones.

    The first mini-batch runs by itself: only after it the memory has all its slots.
    """
    begin, *rest = blocks
    if begin.times > 1:
        begin, rest = begin._replace(times=1), [begin._replace(times=begin.times - 1), *rest]
    if not rest or rest[0].times < 2 or not allowed():
        return loop.mini_batches(tokens, memory, blocks, read)
    alike, *rest = rest
    count, size = len(range(alike.times)), alike.length  # a number, not an open one
    lengths = [begin.length, alike.columns, *([sum([block.columns for block in rest])] if rest else [])]
    first, middle, *last = tokens.split(lengths)
    y, memory = loop.mini_batches(first, memory, [begin], read)
    slots = [(slot, name) for slot, weights in memory.items() for name in weights]
    present = [x is not None for x in middle.tensors]

    def body(carried: list[Tensor], given: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        views = iter(given)
        piece = Tokens.from_tensors([next(views) if here else None for here in present])
        y, after = loop.mini_batches(piece, named(slots, carried), [alike._replace(times=1)], read)
        # copies: what a loop returns may not be a view of what it was given
        leaving = [after[slot][name].clone(memory_format=torch.contiguous_format) for slot, name in slots]
        return leaving, [] if y is None else [y.clone(memory_format=torch.contiguous_format)]

    pieces = [x.unflatten(2, (count, size)).movedim(2, 0).contiguous() for x in middle.tensors if x is not None]
    final, ys = scan(body, [memory[slot][name].contiguous() for slot, name in slots], pieces)
    memory, outputs = named(slots, final), [] if y is None else [y]
    if read:
        # chosen, not viewed: the derivative of the loop is compiled for gradients whose memory is contiguous
        chosen = ys[0].index_select(0, torch.arange(count, device=ys[0].device))
        outputs.append(chosen.movedim(0, 2).flatten(2, 3))
    if rest:
        y, memory = loop.mini_batches(last[0], memory, rest, read)
        outputs += [] if y is None else [y]
    return (torch.cat(outputs, dim=2) if outputs else None), memory
