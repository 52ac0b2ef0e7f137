"""What the C++ of `native_advance.h` is passed: tokens of an open mini-batch, which it takes one after the other.

Decoding calls this for every token and layer: the arguments travel as one string of 8-byte numbers, and hardly anything
is done here.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

from metattt.inner.tokens import MiniBatches
from metattt.kernels.cpu.threads import divide
from metattt.state import Tensors

MOST_WEIGHTS = 4  #: most weights of a learner
SMALLEST_SHARE = 2**20  #: numbers of the state that are worth a thread

_pack = struct.Struct(f"={5 + 5 * 4 + 4 + 4 * MOST_WEIGHTS}q").pack  # `struct Advance`


def advance(
    function: Any, given: MiniBatches, update: Tensors | None, phase: int | Tensor, donate_state: bool
) -> tuple[Tensor, Tensors, Tensors | None]:
    """`function` of a library, for all learners; see `NativeForm.advance`."""
    tokens, tau, weights = given.tokens, given.tau, given.weights
    k, v, q, eta = tokens.views.k, tokens.views.v, tokens.views.q, tokens.gates.eta
    batch, heads, count, width = k.shape
    aligned = not isinstance(phase, Tensor)
    completes = aligned and phase + count == given.size
    names = list(weights)
    start = [_dense(x) for x in weights.values()]
    before = None if update is None else [_dense(update[name].to(x.dtype)) for name, x in weights.items()]
    committed: list[Tensor] | None = None
    if completes or not aligned:
        committed = start if donate_state else [torch.empty_like(x) for x in start]
    updated: list[Tensor] | None = None
    if not completes or count > 1:  # the last token of a mini-batch needs no M after it
        updated = before if donate_state and before is not None else [torch.empty_like(x) for x in start]
    y = torch.empty_strided(
        (batch, heads, count, width), (count * heads * width, width, heads * width, 1), dtype=k.dtype
    )
    views = [x if x.stride(-1) == 1 else x.contiguous() for x in (k, v, q)]
    scale, shift = _dense(given.slow["norm_scale"]), _dense(given.slow["norm_bias"])
    tau = None if tau is None else _dense(tau)
    phases = None if aligned else _dense(phase)  # type: ignore[arg-type]
    passed = _pack(
        heads,
        count,
        given.size,
        phase if aligned else 0,
        _pointer(phases),
        *_view(views[0]),
        *_view(views[1]),
        *_view(views[2]),
        *_view(eta),
        *_view(y),
        _pointer(tau),
        0 if tau is None or tau.shape[0] == 1 else given.size,
        scale.data_ptr(),
        shift.data_ptr(),
        *_pointers(start),
        *_pointers(committed),
        *_pointers(before),
        *_pointers(updated),
    )
    learners, threads = batch * heads, torch.get_num_threads()
    if threads > 1:
        threads = max(1, min(threads, learners, count * sum([x.numel() for x in start]) // SMALLEST_SHARE))
    if threads == 1:
        function(passed, 0, learners)
    else:
        divide(lambda first, last: function(passed, first, last), learners, threads)
    after = weights if committed is None else dict(zip(names, committed, strict=True))
    return y, after, None if completes or updated is None else dict(zip(names, updated, strict=True))


def _dense(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else x.contiguous()


def _view(x: Tensor) -> tuple[int, ...]:
    return (x.data_ptr(), *x.stride()[:3])


def _pointer(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _pointers(tensors: list[Tensor] | None) -> list[int]:
    found = [] if tensors is None else [x.data_ptr() for x in tensors]
    return found + [0] * (MOST_WEIGHTS - len(found))
