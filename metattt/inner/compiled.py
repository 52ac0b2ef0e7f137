"""Mini-batches for `torch.compile`: one is compiled, and runs in a loop for all equal ones.

Written out, a sequence of T tokens is a graph of T/b mini-batches with an inner backward pass each, which takes
minutes to compile and anew for every length. As the body of a `scan` a mini-batch is traced and compiled once, with its
derivative.

Inductor (torch 2.14) reuses the memory of a loop's input although the loop's result is stored there; gradients of the
loop's inputs were then wrong by large factors. So the loop is used only after `allow`, which forbids this reuse and
lets a graph contain the number of a step.
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

    return torch.__version__ >= "2.14" and not inductor.allow_buffer_reuse and dynamo.capture_scalar_outputs


def allow() -> None:
    """Lets this process use the loop: changes two settings of `torch.compile`."""
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    inductor.allow_buffer_reuse, dynamo.capture_scalar_outputs = False, True


def alike(blocks: Sequence[Block]) -> int:
    """How many blocks after the first equal the second: whole mini-batches of the same length and phase."""
    model = blocks[1] if len(blocks) > 1 else None
    if model is None or model.commit is not True or model.restart is not None or not isinstance(model.phase, int):
        return 0
    count = 1
    while count + 1 < len(blocks) and blocks[count + 1] == model:
        count += 1
    return count


def in_a_loop(
    loop: Parts, tokens: Tokens, memory: Memory, blocks: Sequence[Block], read: bool
) -> tuple[Tensor | None, Memory]:
    """As `metattt.inner.execution.plainly`; the second mini-batch is compiled for all equal ones.

    The first mini-batch runs by itself: only after it the memory has all its slots.
    """
    from metattt.inner.execution import plainly

    count = alike(blocks)
    if count < 2 or not allowed():
        return plainly(loop, tokens, memory, blocks, read)
    size, rest = blocks[1].length, blocks[1 + count :]
    lengths = [blocks[0].length, count * size, *([sum([block.length for block in rest])] if rest else [])]
    first, middle, *last = tokens.split(lengths)
    y, memory = plainly(loop, first, memory, blocks[:1], read)
    slots = [(slot, name) for slot, weights in memory.items() for name in weights]
    present = [x is not None for x in middle.tensors]

    def body(carried: list[Tensor], given: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        views = iter(given)
        piece = Tokens.from_tensors([next(views) if here else None for here in present])
        y, after = plainly(loop, piece, named(slots, carried), blocks[1:2], read)
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
        y, memory = plainly(loop, last[0], memory, rest, read)
        outputs += [] if y is None else [y]
    return (torch.cat(outputs, dim=2) if outputs else None), memory
