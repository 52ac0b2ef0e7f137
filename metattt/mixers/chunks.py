"""A recurrence chunk by chunk: the input of a group of chunks is stored, the rest is recomputed in the backward
pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from metattt.inner.recompute import recompute
from metattt.modules import exact, transformed

Step = Callable[..., tuple[Tensor, Tensor]]


def by_chunks(
    step: Step,
    memory: Tensor,
    tokens: Sequence[Tensor],
    shared: Sequence[Tensor],
    chunk_size: int,
    group_size: int | None,
) -> tuple[Tensor, Tensor]:
    """`y, memory = step(memory, *tokens, *shared)` for one chunk of the tokens after the other.

    The backward pass stores O(T) numbers of the tokens, the memories before the T / (c g) groups, and all intermediate
    tensors of one group.

    Args:
        step: may use tensors only through its arguments. It is called without autocast.
        memory: `[B, ...]` before the first token.
        tokens: `[B, T, ...]` each.
        shared: of all tokens (parameters).
        chunk_size: c (tokens).
        group_size: g (chunks); None is one, 0 recomputes nothing.

    Returns:
        y `[B, T, ...]` and the memory after the last token.
    """

    def run(memory: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        pieces, outputs = (x.split(chunk_size, dim=1) for x in given[: len(tokens)]), []
        with exact(memory.device.type):
            for chunk in zip(*pieces, strict=True):
                y, memory = step(memory, *chunk, *given[len(tokens) :])
                outputs.append(y)
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)), memory

    length, size = tokens[0].shape[1], chunk_size * (group_size or 1)
    plain = not torch.is_grad_enabled() or torch.compiler.is_compiling() or transformed()
    if plain or group_size == 0 or length <= size or not any(x.requires_grad for x in (memory, *tokens, *shared)):
        return run(memory, *tokens, *shared)
    outputs = []
    for group in zip(*(x.split(size, dim=1) for x in tokens), strict=True):
        y, memory = recompute(run, memory, *group, *shared)
        outputs.append(y)
    return torch.cat(outputs, dim=1), memory
