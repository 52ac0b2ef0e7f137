"""The scan of Mamba-2 in matrix products: state space duality (arXiv 2405.21060, Sec. 6); on GPUs by the kernels of
flash-linear-attention, if it is installed and agrees."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from metattt.mixers.chunks import by_chunks
from metattt.modules import transformed
from metattt.ops.chunk import chunk_read, chunk_state, decays_of_logs
from metattt.ops.foreign import Foreign, disagreement, operation

DEVICES = ("cuda",)
SHORTEST = 16  # tokens: below, a launch costs more than it saves

kernel = partial(operation, "simple_gla.chunk_simple_gla")
Scan = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def duality(
    x: Tensor,
    log_decay: Tensor,
    b: Tensor,
    c: Tensor,
    memory: Tensor,
    first: Tensor | None,
    chunk_size: int,
    group_size: int | None,
    matmul_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """`h_t = a_t h_{t−1} + x_t b_tᵀ`, `y_t = h_t c_t`, with one decay `a_t` per head.

    Args:
        x: `[B, T, H, P]`, what is written (Δ x of the layer).
        log_decay: log a `[B, T, H]`, at most 0.
        b, c: `[B, T, G, N]`; group g serves heads g H/G to (g + 1) H/G − 1.
        memory: h `[B, H, P, N]` before the first token.
        first: `[B, T]` True where a document starts, and h from 0; None: nowhere.
        chunk_size, group_size: as in `by_chunks`.
        matmul_dtype: type to which operands of matmuls may be rounded; where it has 16 bits, the kernels of
            flash-linear-attention are used if they are there. None: none.

    Returns:
        y `[B, T, H, P]` and h after the last token.
    """
    if first is None and matmul_dtype is not None:
        plain = partial(duality, first=None, chunk_size=chunk_size, group_size=group_size)
        found = scan_by_fla(x, log_decay, b, c, memory, matmul_dtype, plain)
        if found is not None:
            return found
    if first is not None:
        log_decay = log_decay.masked_fill(first.unsqueeze(-1), -torch.inf)  # a = 0
    return by_chunks(_chunk, memory, (x, log_decay, b, c), (), chunk_size, group_size)


def _chunk(memory: Tensor, x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk: `Y = (C Bᵀ ∘ L) X` for what was written in it, `exp(ℓ_1 + … + ℓ_t) C h` for what was before."""
    groups, heads = b.shape[2], x.shape[2]
    x = x.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)  # [B, G, R, c, P]
    log_decay = log_decay.unflatten(2, (groups, -1)).permute(0, 2, 3, 1)  # [B, G, R, c]
    b, c = (one.transpose(1, 2).unsqueeze(2) for one in (b, c))  # [B, G, 1, c, N]
    h = memory.unflatten(1, (groups, heads // groups))  # [B, G, R, P, N]
    within, kept = decays_of_logs(log_decay)
    y, h = chunk_read(c, b, x, within, kept, h.mT), chunk_state(x, b, within, kept, h)
    return y.permute(0, 3, 1, 2, 4).flatten(2, 3), h.flatten(1, 2)


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
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(matmul_dtype).float().to(device)

    given = [random(1, 80, 4, width), -random(1, 80, 4).abs(), random(1, 80, 2, states), random(1, 80, 2, states)]
    given += [random(1, 4, width, states)]
    return disagreement(f"simple_gla in {matmul_dtype}", partial(_run, matmul_dtype), reference, given) is None
