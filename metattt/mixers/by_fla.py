"""Mamba-2's scan by the kernels of flash-linear-attention, if it is installed and agrees with `duality`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from metattt.modules import transformed

log = logging.getLogger("metattt")

DEVICES = ("cuda",)
SHORTEST = 16  # tokens: below, a launch costs more than it saves
AGREE = 0.03  # largest difference from `duality`, relative to its largest value: rounding of 16 bits, and no more

Scan = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def scan_by_fla(
    x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, memory: Tensor, matmul_dtype: torch.dtype, reference: Scan
) -> tuple[Tensor, Tensor] | None:
    """What `duality` returns, with operands of matmuls rounded to `matmul_dtype`, or None where these kernels do not
    apply: on other devices, for operands in fp32 (theirs are rounded to TF32), inside torch.compile and torch.func, and
        where they
    do not agree with the reference.

    Args:
        x, log_decay, b, c, memory: as in `duality`; no decay is 0.
        reference: `duality` with its sizes: what this must agree with, found out once per device, type and width.
    """
    if x.device.type not in DEVICES or matmul_dtype not in (torch.bfloat16, torch.float16) or x.shape[1] < SHORTEST:
        return None
    if torch.compiler.is_compiling() or transformed() or kernel() is None:
        return None
    key = (x.device, matmul_dtype, x.shape[-1], b.shape[-1])
    if key not in _AGREES:
        _AGREES[key] = _agrees(*key, reference)
    return _Scan.apply(matmul_dtype, reference, x, log_decay, b, c, memory) if _AGREES[key] else None


@cache
def kernel() -> Callable[..., tuple[Tensor, Tensor]] | None:
    """`chunk_simple_gla`, or None where it cannot be imported."""
    try:
        from fla.ops.simple_gla import chunk_simple_gla
    except Exception as error:  # a broken optional dependency must not stop the run
        log.debug("Mamba-2 without flash-linear-attention: %s", error)
        return None
    return chunk_simple_gla


_AGREES: dict[tuple[torch.device, torch.dtype, int, int], bool] = {}


def _run(
    matmul_dtype: torch.dtype, x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """In fla's layout: keys and queries for every head, states `[B, H, N, P]`."""
    copies = x.shape[2] // b.shape[2]
    k, q = (one.to(matmul_dtype).repeat_interleave(copies, 2) for one in (b, c))
    call = kernel()
    assert call is not None
    y, h = call(
        q, k, x.to(matmul_dtype), g=log_decay, scale=1.0, initial_state=memory.mT.contiguous(), output_final_state=True
    )
    return y.to(x.dtype), h.mT.to(memory.dtype)


class _Scan(torch.autograd.Function):
    """fla's derivatives cannot be differentiated, without an error. If second derivatives are needed, the reference
    computes the first ones, too."""

    @staticmethod
    def forward(ctx: Any, matmul_dtype: torch.dtype, reference: Scan, *given: Tensor) -> tuple[Tensor, Tensor]:
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in given]
        with torch.enable_grad():
            y, h = _run(matmul_dtype, *inputs)
        ctx.inputs, ctx.outputs, ctx.reference = inputs, (y, h), reference
        ctx.save_for_backward(*given)
        return y.detach(), h.detach()

    @staticmethod
    def backward(ctx: Any, *found: Tensor) -> tuple[Tensor | None, ...]:
        given, again = ctx.saved_tensors, torch.is_grad_enabled()
        inputs, outputs = (given, ctx.reference(*given)) if again else (ctx.inputs, ctx.outputs)
        wanted = [x for x in inputs if x.requires_grad]
        slopes = iter(
            torch.autograd.grad(outputs, wanted, found, retain_graph=True, create_graph=again, allow_unused=True)
        )
        return None, None, *(next(slopes) if x.requires_grad else None for x in inputs)


def _agrees(device: torch.device, matmul_dtype: torch.dtype, width: int, states: int, reference: Scan) -> bool:
    """Whether outputs, the last memory and every gradient are those of the reference, on a few random tokens."""
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(matmul_dtype).float().to(device)

    given = [random(1, 80, 4, width), -random(1, 80, 4).abs(), random(1, 80, 2, states), random(1, 80, 2, states)]
    given += [random(1, 4, width, states)]
    weights = [random(1, 80, 4, width), random(1, 4, width, states)]

    def all_of(scan: Callable[..., tuple[Tensor, Tensor]]) -> list[Tensor]:
        inputs = [x.detach().requires_grad_() for x in given]
        with torch.enable_grad():
            y, h = scan(*inputs)
            total = (y.float() * weights[0]).sum() + (h.float() * weights[1]).sum()
            return [y.detach(), h.detach(), *torch.autograd.grad(total, inputs)]

    try:
        pairs = zip(all_of(partial(_Scan.apply, matmul_dtype, reference)), all_of(reference), strict=True)
        worst = max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)
        log.debug(
            "flash-linear-attention's simple_gla on %s in %s: within %.1e of duality", device, matmul_dtype, worst
        )
        return worst <= AGREE
    except Exception as error:  # whatever another library raises for this device and these widths
        log.debug("flash-linear-attention's simple_gla does not run on %s in %s: %s", device, matmul_dtype, error)
        return False
