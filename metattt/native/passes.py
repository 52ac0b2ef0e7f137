"""What a model does between its matrix products, on a CPU: the norms and the gate of a block, in one pass over
memory each and one for the derivative. torch takes several.

Whoever calls one of the two asks `ready` first, and computes it with torch where the answer is no.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from metattt.native.library import load
from metattt.native.threads import divide
from metattt.torch_private import dispatch_modes, for_torch, function_modes, interpreter_stack

SOURCE = Path(__file__).with_name("passes.cpp")
LEAST = 16  #: rows and gates must be multiples of so many numbers
SMALLEST_SHARE = 2**16  #: numbers that are worth a thread
_ROWS, _GATES = 64, 2**12  # of a unit of work


@cache
def library() -> ctypes.CDLL | None:
    """The compiled `passes.cpp`; None where it cannot be compiled."""
    return load(SOURCE, {})


def ready(x: Tensor, *others: Tensor | None) -> bool:
    """Whether the functions below take `x` and the others: fp32 in the memory of this process, with a compiler on this
    machine, nobody who watches each operation, and something to win (for one token, without derivatives, there is not).
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch.is_autocast_enabled("cpu"):
        return False
    if dispatch_modes() or function_modes() or forward_ad._current_level >= 0 or interpreter_stack() is not None:
        return False
    for one in (x, *others):
        if one is not None and (type(one) not in (Tensor, nn.Parameter) or one.device.type != "cpu" or one.is_neg()):
            return False
        if one is not None and one.dtype != torch.float32:
            return False
    wins = torch.is_grad_enabled() or (x.ndim > 2 and min(x.shape[1:-1]) > 1)
    return wins and library() is not None


def _run(name: str, sizes: Sequence[int], tensors: Sequence[Tensor | None], units: int, size: int) -> None:
    """Calls a function of the library for all units of its work on so many numbers; ctypes gives up the lock of the
    interpreter. `sizes` and `tensors` are what the fields of its struct are made of, in order: 8-byte numbers,
    views."""
    numbers, function = list(sizes), getattr(library(), name)
    for x in tensors:
        numbers += (0, 0, 0, 0) if x is None else (x.data_ptr(), *(*x.stride(), 0, 0, 0)[:3])
    packed = struct.pack(f"={len(numbers)}q", *numbers)
    threads = min(torch.get_num_threads(), units, size // SMALLEST_SHARE)
    if threads > 1:
        divide(lambda first, last: function(packed, ctypes.c_int64(first), ctypes.c_int64(last)), units, threads)
    else:
        function(packed, ctypes.c_int64(0), ctypes.c_int64(units))


def _by_torch(function: Callable[..., Tensor], inputs: Sequence[Tensor | None], dy: Tensor) -> list[Tensor | None]:
    """The derivatives of `function` as torch computes them, and can differentiate them."""
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        found = iter(torch.autograd.grad(function(*inputs), wanted, dy, create_graph=again))
    return [next(found) if x is not None and x.requires_grad else None for x in inputs]


class Scaled(torch.autograd.Function):
    """`scale ∘ x / √(mean(x²) + eps)` over the last axis of `x` `[..., d]`, a multiple of `LEAST`; `scale` `[d]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        rows = _rows(x, x)
        y = torch.empty_like(x) if rows is x else x.new_empty(x.shape)  # no view, which nobody could change in place
        inverse = rows.new_empty(rows.shape[:3])
        ctx.save_for_backward(x, scale, inverse)
        ctx.set_materialize_grads(False)
        (bits,) = struct.unpack("=q", struct.pack("=d", eps))
        ctx.sizes, ctx.eps = (rows.shape[3], rows.shape[1], rows.shape[2], _ROWS, bits), eps
        ctx.units = rows.shape[0] * rows.shape[1] * -(-rows.shape[2] // _ROWS)
        tensors = [rows, y.view(rows.shape), None, None, inverse, scale.contiguous(), None]
        _run("scale_rows", ctx.sizes, tensors, ctx.units, rows.numel())
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return None, None, None
        x, scale, inverse = ctx.saved_tensors
        if for_torch(dy):
            return *_by_torch(lambda x, scale: F.rms_norm(x, scale.shape, scale, ctx.eps), [x, scale], dy), None
        rows, dy, scale = _rows(x, x), _rows(dy.resolve_neg(), x), scale.contiguous()
        dx, sums = torch.empty_like(rows), scale.new_empty(ctx.units, len(scale))
        _run("scale_rows_back", ctx.sizes, [rows, None, dy, dx, inverse, scale, sums], ctx.units, rows.numel())
        return dx.view(x.shape), sums.sum(0), None


def _rows(x: Tensor, like: Tensor) -> Tensor:
    """`x` `[..., d]` as `[B, H, T, d]` whose rows are dense; where `like` is not laid out so, as `[1, 1, n, d]`."""
    x = x if like.ndim == 4 and like.stride(3) == 1 else x.reshape(1, 1, -1, x.shape[-1])
    return x if x.stride(3) == 1 else x.contiguous()


class Gated(torch.autograd.Function):
    """`silu(a) ∘ b` of tensors of one shape, in C++ if `fits`: their size is a multiple of `LEAST`. `silu(a)` is not
    kept for the derivative: a third less memory."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, fits: bool) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.set_materialize_grads(False)
        ctx.fits = fits
        if not fits:
            return F.silu(a).mul_(b)
        a, b = a.contiguous(), b.contiguous()
        y, size = torch.empty_like(a), a.numel()
        _run("gate", (size, _GATES), [a, b, None, y, None, None], -(-size // _GATES), size)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return None, None, None
        a, b = ctx.saved_tensors
        if for_torch(dy):
            return *_by_torch(lambda a, b: F.silu(a) * b, [a, b], dy), None
        if not ctx.fits:
            product = dy * b
            return torch.ops.aten.silu_backward.grad_input(product, a, grad_input=product), F.silu(a).mul_(dy), None
        a, b, dy = a.contiguous(), b.contiguous(), dy.resolve_neg().contiguous()
        da, db, size = torch.empty_like(a), torch.empty_like(a), a.numel()
        _run("gate_back", (size, _GATES), [a, b, dy, None, da, db], -(-size // _GATES), size)
        return da, db, None
