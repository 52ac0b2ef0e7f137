"""Mamba-2's scan by the kernels of flash-linear-attention, if it is installed and agrees with `duality`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from metattt.modules import transformed
from metattt.ops.foreign import Foreign, disagreement, operation

DEVICES = ("cuda",)
SHORTEST = 16  # tokens: below, a launch costs more than it saves

kernel = partial(operation, "simple_gla.chunk_simple_gla")
Scan = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def scan_by_fla(
    x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, memory: Tensor, matmul_dtype: torch.dtype, reference: Scan
) -> tuple[Tensor, Tensor] | None:
    """What `duality` returns, with operands of matmuls rounded to `matmul_dtype`, or None where these kernels do not
    apply: on other devices, for operands in fp32 (theirs are rounded to TF32), inside torch.compile and torch.func, and
    where they do not agree with the reference.

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
    if not _AGREES[key]:
        return None
    return Foreign.apply(partial(_run, matmul_dtype), reference, x, log_decay, b, c, memory)


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


def _agrees(device: torch.device, matmul_dtype: torch.dtype, width: int, states: int, reference: Scan) -> bool:
    """Whether outputs, the last memory and every gradient are those of the reference, on a few random tokens."""
    draw, run = torch.Generator().manual_seed(0), partial(_run, matmul_dtype)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(matmul_dtype).float().to(device)

    with torch.inference_mode(False), torch.autocast(device.type, enabled=False):  # whatever the first call is in
        given = [random(1, 80, 4, width), -random(1, 80, 4).abs(), random(1, 80, 2, states), random(1, 80, 2, states)]
        given += [random(1, 4, width, states)]
        return disagreement(f"simple_gla in {matmul_dtype}", run, reference, given) is None
