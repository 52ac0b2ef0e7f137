"""What a model does between its matrix products, on a CPU: norms, short convolutions and gates, in one pass over
memory each and one for the derivative. torch takes several.

Whoever calls one of the three asks `ready` first, and computes it with torch where the answer is no.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from metattt.native.call import run
from metattt.native.library import load
from metattt.torch_private import interpreter_stack, watched

SOURCE = Path(__file__).with_name("passes.cpp")
LEAST = 16  #: rows, channels and gates must be multiples of so many numbers
TAPS = (2, 3, 4)  #: of convolutions
SMALLEST_SHARE = 2**16  #: numbers that are worth a thread
_ROWS, _CHANNELS, _GATES = 64, 32, 2**12  # of a unit of work


def ready(x: Tensor, *others: Tensor | None) -> bool:
    """Whether the functions below take `x` and the others: fp32 in the memory of this process, with a compiler on this
    machine, nobody who watches each operation, and something to win (for one token, without derivatives, there is not).
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch.is_autocast_enabled("cpu"):
        return False
    if watched() or forward_ad._current_level >= 0 or interpreter_stack() is not None:
        return False
    given = [one for one in (x, *others) if one is not None]
    if any(type(one) not in (Tensor, nn.Parameter) or one.device.type != "cpu" for one in given):
        return False
    if any(one.dtype != torch.float32 or one.is_neg() for one in given):
        return False
    wins = torch.is_grad_enabled() or (x.ndim > 2 and min(x.shape[1:-1]) > 1)
    return wins and load(SOURCE, {}) is not None


def _run(name: str, sizes: Sequence[int], views: Sequence[Any], arrays: Sequence[Any], units: int, size: int) -> None:
    """Calls a function of the library for tensors of so many numbers."""
    if run(getattr(load(SOURCE, {}), name), sizes, views, arrays, units, size // SMALLEST_SHARE):
        raise NotImplementedError(f"{name} of {sizes}")


def _again(function: Callable[..., Tensor], inputs: Sequence[Tensor | None], dy: Tensor) -> list[Tensor | None]:
    """The derivative of `function` as torch computes it, for someone who differentiates it once more."""
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    found = iter(torch.autograd.grad(function(*inputs), wanted, dy, create_graph=True))
    return [next(found) if x is not None and x.requires_grad else None for x in inputs]


class Scaled(torch.autograd.Function):
    """`x / max(‖x‖, eps)`, or with `mean` `x / √(mean(x²) + eps)`, times `scale` `[d]` (None: 1), over the last axis
    of `x` `[..., d]`, a multiple of `LEAST`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor | None, eps: float, mean: bool) -> Tensor:
        rows = _rows(x)
        y, inverse = torch.empty_like(rows), rows.new_empty(rows.shape[:3])
        ctx.save_for_backward(x, scale, inverse)
        ctx.set_materialize_grads(False)
        ctx.kind = eps, mean
        Scaled._call("scale_rows", ctx.kind, [rows, y, None, None, inverse], [scale, None])
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return None, None, None, None
        x, scale, inverse = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *_again(lambda x, scale: Scaled.plain(x, scale, *ctx.kind), [x, scale], dy), None, None
        rows = _rows(x)
        dx, sums = torch.empty_like(rows), None if scale is None else scale.new_empty(_units(rows), x.shape[-1])
        views = [rows, None, dy.reshape(rows.shape), dx, inverse]
        Scaled._call("scale_rows_back", ctx.kind, views, [scale, sums])
        return dx.view(x.shape), None if sums is None else sums.sum(0), None, None

    @staticmethod
    def plain(x: Tensor, scale: Tensor | None, eps: float, mean: bool) -> Tensor:
        """The same by torch."""
        y = F.rms_norm(x, x.shape[-1:], eps=eps) if mean else F.normalize(x, dim=-1, eps=eps)
        return y if scale is None else y * scale

    @staticmethod
    def _call(name: str, kind: tuple[float, bool], views: Sequence[Any], arrays: Sequence[Any]) -> None:
        rows, (eps, mean) = views[0], kind
        (bits,) = struct.unpack("=q", struct.pack("=d", eps))
        sizes = rows.shape[3], rows.shape[1], rows.shape[2], _ROWS, int(mean), bits
        _run(name, sizes, views, arrays, _units(rows), rows.numel())


def _rows(x: Tensor) -> Tensor:
    """`x` `[..., d]` as `[B, H, T, d]` whose rows are dense."""
    return x if x.ndim == 4 and x.stride(3) == 1 else x.reshape(1, 1, -1, x.shape[-1])


def _units(rows: Tensor) -> int:
    return rows.shape[0] * rows.shape[1] * -(-rows.shape[2] // _ROWS)


class Convolved(torch.autograd.Function):
    """`y_t = bias + Σ_j weight_j x_{t+j}` of every channel by itself: `x` `[B, taps − 1 + T, D]`, `weight`
    `[D, 1, taps]` and `bias` `[D]` (None: 0) to `[B, T, D]`. D must be a multiple of `LEAST`, and taps one of
    `TAPS`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.set_materialize_grads(False)
        y = x.new_empty(x.shape[0], x.shape[1] - weight.shape[2] + 1, x.shape[2])
        Convolved._call("convolve_rows", [x, y, None, None], [weight, bias, None, None])
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return None, None, None
        x, weight, bias = ctx.saved_tensors
        if torch.is_grad_enabled():
            return tuple(_again(Convolved.plain, [x, weight, bias], dy))
        dx, dweight, dbias = x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(len(weight))
        Convolved._call("convolve_rows_back", [x, None, dy, dx], [weight, None, dweight, dbias])
        return dx, dweight, None if bias is None else dbias

    @staticmethod
    def plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The same by torch: as an image of height 1 with its channels last, which is how it lies in memory."""
        return F.conv2d(x.mT.unsqueeze(2), weight.unsqueeze(2), bias, groups=len(weight)).squeeze(2).mT

    @staticmethod
    def _call(name: str, views: Sequence[Any], arrays: Sequence[Any]) -> None:
        (batch, rows, dim), taps = views[0].shape, arrays[0].shape[2]
        views = [None if x is None else x.unsqueeze(1) for x in views]
        sizes = batch, rows - taps + 1, dim, taps
        _run(name, sizes, views, arrays, -(-dim // _CHANNELS), batch * rows * dim)


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
        y = a.new_empty(a.shape)
        Gated._call("gate", [a, b, None, y, None, None])
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return None, None, None
        a, b = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *_again(lambda a, b: F.silu(a) * b, [a, b], dy), None
        if not ctx.fits:
            product = dy * b
            return torch.ops.aten.silu_backward.grad_input(product, a, grad_input=product), F.silu(a).mul_(dy), None
        da, db = a.new_empty(a.shape), a.new_empty(a.shape)
        Gated._call("gate_back", [a, b, dy, None, da, db])
        return da, db, None

    @staticmethod
    def _call(name: str, arrays: Sequence[Any]) -> None:
        size = arrays[0].numel()
        _run(name, (size, _GATES), (), arrays, -(-size // _GATES), size)
