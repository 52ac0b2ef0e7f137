"""What the C++ of `native_advance.h` is passed: tokens of an open mini-batch, which it takes one after the other.

Decoding calls this for every token and layer: the arguments travel as one string of 8-byte numbers, and hardly anything
is done here.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from metattt.errors import MetaTTTError
from metattt.inner.tokens import MiniBatches
from metattt.kernels.operator import dense, rows
from metattt.native.threads import divide
from metattt.state import Tensors

MOST_WEIGHTS = 4  #: most weights of a learner
SMALLEST_SHARE = 2**20  #: numbers of the state that are worth a thread

_pack = struct.Struct(f"={5 + 5 * 4 + 4 + 4 * MOST_WEIGHTS}q").pack  # `struct Advance`


def advance(
    function: Any, given: MiniBatches, update: Tensors | None, phase: int, donate_state: bool
) -> tuple[Tensor, Tensors, Tensors | None]:
    """`function` of a library, for all learners at the same place; see `NativeForm.advance`."""
    tokens, weights = given.tokens, given.weights
    k, v, q, eta = tokens.views.k, tokens.views.v, tokens.views.q, tokens.gates.eta
    batch, heads, count, width = k.shape
    completes, names = phase + count == given.size, list(weights)
    start = [dense(x) for x in weights.values()]
    before = None if update is None else [dense(update[name].to(x.dtype)) for name, x in weights.items()]
    # W_a is new also where the state is donated: since the mini-batch began, all states have held the same one
    committed = [torch.empty_like(x) for x in start] if completes else None
    updated: list[Tensor] | None = None
    if not completes or count > 1:  # the last token of a mini-batch needs no M after it
        updated = before if donate_state and before is not None else [torch.empty_like(x) for x in start]
    y = k.new_empty_strided(k.shape, (count * heads * width, width, heads * width, 1))
    views = [rows(k), rows(v), rows(q), eta, y]
    norm, state = (given.slow["norm_scale"], given.slow["norm_bias"]), (start, committed, before, updated)
    _call(function, (batch, heads, count, given.size), phase, views, given.tau, norm, state)
    after = weights if committed is None else dict(zip(names, committed, strict=True))
    return y, after, None if completes or updated is None else dict(zip(names, updated, strict=True))


def one_token(
    function: Any, q: Tensor, k: Tensor, v: Tensor, eta: Tensor, weights: Sequence[Tensor], update: Sequence[Tensor],
    scale: Tensor, shift: Tensor, tau: Tensor | None, phase: Tensor, size: int,
) -> Tensor:  # fmt: skip
    """`function` of a library, for one token of each sequence and its own place; see `Operation.one_token`."""
    batch, heads, width = q.shape
    y = q.new_empty(batch, heads, width)
    views, state = [rows(k), rows(v), rows(q), eta, y], (weights, weights, update, update)
    _call(function, (batch, heads, 1, size), phase, views, tau, (scale, shift), state)
    return y


def _call(
    function: Any, sizes: tuple[int, int, int, int], phase: int | Tensor, views: Sequence[Tensor], tau: Tensor | None,
    norm: Sequence[Tensor], state: Sequence[Sequence[Tensor] | None],
) -> None:  # fmt: skip
    """Calls `function` with `struct Advance`.

    Args:
        sizes: sequences, heads, tokens, tokens of a mini-batch.
        views: k, v, q, η and y; without an axis for tokens where there is one.
        norm: its scale and offset.
        state: weights before and after, M before and after.
    """
    batch, heads, count, size = sizes
    phases = None if isinstance(phase, int) else dense(phase)
    scale, shift, steps = dense(norm[0]), dense(norm[1]), None if tau is None else dense(tau)
    numbers = [heads, count, size, *((phase, 0) if phases is None else (0, phases.data_ptr()))]
    for x in views:  # without an axis for tokens, the stride that stands in its place is multiplied by 0
        numbers += x.data_ptr(), *(*x.stride(), 0, 0)[:3]
    numbers += 0 if steps is None else steps.data_ptr(), 0 if steps is None or steps.shape[0] == 1 else size
    numbers += scale.data_ptr(), shift.data_ptr()
    for tensors in state:
        pointers = [] if tensors is None else [x.data_ptr() for x in tensors]
        numbers += pointers + [0] * (MOST_WEIGHTS - len(pointers))
    passed, learners, threads = _pack(*numbers), batch * heads, torch.get_num_threads()
    if threads > 1:
        held = sum([x.numel() for x in state[0] or ()])
        threads = max(1, min(threads, learners, count * held // SMALLEST_SHARE))
    failed = [function(passed, 0, learners)] if threads == 1 else divide(partial(function, passed), learners, threads)
    for written in state[1::2]:  # autograd then refuses the backward pass of a call that has read a donated state
        increment_version(written or ())
    if any(failed):
        raise MetaTTTError(f"tokens were given from place {phase if phases is None else phases.tolist()} of {size} on")
