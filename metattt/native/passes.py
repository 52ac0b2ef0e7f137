"""What a model does between its matrix products, on a CPU: norms, short convolutions and gates, in one pass over
memory each and one for the derivative. torch takes several.

Whoever calls one of the three asks `ready` first, and computes it with torch where the answer is no.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from metattt.native.library import load
from metattt.native.threads import divide
from metattt.torch_private import dispatch_modes, function_modes, interpreter_stack, is_many

SOURCE = Path(__file__).with_name("passes.cpp")
LEAST = 16  #: rows, channels and gates must be multiples of so many numbers
TAPS = (2, 3, 4)  #: of convolutions
SMALLEST_SHARE = 2**16  #: numbers that are worth a thread
_ROWS, _CHANNELS, _GATES = 64, 32, 2**12  # of a unit of work


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


def _for_torch(dy: Tensor) -> bool:
    """Whether a backward pass is for torch: someone differentiates it once more, or takes many at once."""
    return torch.is_grad_enabled() or interpreter_stack() is not None or is_many(dy)


def _by_torch(function: Callable[..., Tensor], inputs: Sequence[Tensor | None], dy: Tensor) -> list[Tensor | None]:
    """The derivatives of `function` as torch computes them, and can differentiate them."""
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        found = iter(torch.autograd.grad(function(*inputs), wanted, dy, create_graph=again))
    return [next(found) if x is not None and x.requires_grad else None for x in inputs]


class Scaled(torch.autograd.Function):
    """`x / max(‖x‖, eps)`, or with `mean` `x / √(mean(x²) + eps)`, times `scale` `[d]` (None: 1), over the last axis
    of `x` `[..., d]`, a multiple of `LEAST`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor | None, eps: float, mean: bool) -> Tensor:
        rows = _rows(x, x)
        y = torch.empty_like(x) if rows is x else x.new_empty(x.shape)  # no view, which nobody could change in place
        inverse = rows.new_empty(rows.shape[:3])
        ctx.save_for_backward(x, scale, inverse)
        ctx.set_materialize_grads(False)
        scale = None if scale is None else scale.contiguous()
        units = rows.shape[0] * rows.shape[1] * -(-rows.shape[2] // _ROWS)
        (bits,) = struct.unpack("=q", struct.pack("=d", eps))
        ctx.sizes, ctx.units = (rows.shape[3], rows.shape[1], rows.shape[2], _ROWS, int(mean), bits), units
        ctx.plain = partial(Scaled.plain, eps=eps, mean=mean)
        _run("scale_rows", ctx.sizes, [rows, y.view(rows.shape), None, None, inverse, scale, None], units, rows.numel())
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return None, None, None, None
        x, scale, inverse = ctx.saved_tensors
        if _for_torch(dy):
            return *_by_torch(ctx.plain, [x, scale], dy), None, None
        rows, dy, scale = _rows(x, x), _rows(dy.resolve_neg(), x), None if scale is None else scale.contiguous()
        dx, sums = torch.empty_like(rows), None if scale is None else scale.new_empty(ctx.units, x.shape[-1])
        _run("scale_rows_back", ctx.sizes, [rows, None, dy, dx, inverse, scale, sums], ctx.units, rows.numel())
        return dx.view(x.shape), None if sums is None else sums.sum(0), None, None

    @staticmethod
    def plain(x: Tensor, scale: Tensor | None, eps: float, mean: bool) -> Tensor:
        """The same by torch."""
        y = F.rms_norm(x, x.shape[-1:], eps=eps) if mean else F.normalize(x, dim=-1, eps=eps)
        return y if scale is None else y * scale


def _rows(x: Tensor, like: Tensor) -> Tensor:
    """`x` `[..., d]` as `[B, H, T, d]` whose rows are dense; where `like` is not laid out so, as `[1, 1, n, d]`."""
    x = x if like.ndim == 4 and like.stride(3) == 1 else x.reshape(1, 1, -1, x.shape[-1])
    return x if x.stride(3) == 1 else x.contiguous()


class Convolved(torch.autograd.Function):
    """`y_t = bias + Σ_j weight_j x_{t+j}` of every channel by itself: `x` `[B, taps − 1 + T, D]`, `weight`
    `[D, 1, taps]` and `bias` `[D]` (None: 0) to `[B, T, D]`. D must be a multiple of `LEAST`, and taps one of
    `TAPS`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.set_materialize_grads(False)
        x, weight, bias = x.contiguous(), weight.contiguous(), None if bias is None else bias.contiguous()
        (batch, rows, dim), taps = x.shape, weight.shape[2]
        y = x.new_empty(batch, rows - taps + 1, dim)
        ctx.sizes, ctx.units = (batch, rows - taps + 1, dim, taps), -(-dim // _CHANNELS)
        _run("convolve_rows", ctx.sizes, [x, y, None, None, weight, bias, None, None], ctx.units, x.numel())
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return None, None, None
        x, weight, bias = ctx.saved_tensors
        if _for_torch(dy):
            return tuple(_by_torch(Convolved.plain, [x, weight, bias], dy))
        x, weight, dy = x.contiguous(), weight.contiguous(), dy.resolve_neg().contiguous()
        dx, dweight, dbias = x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(len(weight))
        tensors = [x, None, dy, dx, weight, None, dweight, dbias]
        _run("convolve_rows_back", ctx.sizes, tensors, ctx.units, x.numel())
        return dx, dweight, None if bias is None else dbias

    @staticmethod
    def plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The same by torch: as an image of height 1 with its channels last, which is how it lies in memory."""
        return F.conv2d(x.mT.unsqueeze(2), weight.unsqueeze(2), bias, groups=len(weight)).squeeze(2).mT


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
        if _for_torch(dy):
            return *_by_torch(lambda a, b: F.silu(a) * b, [a, b], dy), None
        if not ctx.fits:
            product = dy * b
            return torch.ops.aten.silu_backward.grad_input(product, a, grad_input=product), F.silu(a).mul_(dy), None
        a, b, dy = a.contiguous(), b.contiguous(), dy.resolve_neg().contiguous()
        da, db, size = torch.empty_like(a), torch.empty_like(a), a.numel()
        _run("gate_back", (size, _GATES), [a, b, dy, None, da, db], -(-size // _GATES), size)
        return da, db, None
