"""Other libraries' operations on sequences, where they are installed: what ours are timed against."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Peer(NamedTuple):
    """An operation on `[B, T, H, d]`.

    Attributes:
        name: library and operation.
        call: the inputs to outputs `[B, T, H, d]`.
        inputs: from a shape, a type and a device to random leaves.
    """

    name: str
    call: Callable[..., Tensor]
    inputs: Callable[[tuple[int, ...], torch.dtype, str], list[Tensor]]


def peers(mini_batch_size: int) -> list[Peer]:
    """PyTorch's attention, and of flash-linear-attention (where it is installed and imports) TTT-Linear, the delta
    rules and Mamba-2.

    Args:
        mini_batch_size: b of TTT-Linear, tokens.
    """
    found = [Peer("torch attention", _attention, lambda *at: _views(*at))]
    try:
        from fla.ops.delta_rule import chunk_delta_rule
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.simple_gla import chunk_simple_gla
        from fla.ops.ttt import chunk_ttt_linear, fused_chunk_ttt_linear
    except Exception:  # not installed, or not for this Triton: its import has failed with more than ImportError
        return found

    def ttt(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Tensor]:
        def call(q: Tensor, k: Tensor, v: Tensor, scale: Tensor, shift: Tensor, eta: Tensor) -> Tensor:
            return function(q, k, v, scale, shift, eta, scale=1.0, chunk_size=mini_batch_size)[0]

        return call

    def ttt_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> list[Tensor]:
        batch, length, heads, width = shape
        norm = [
            torch.ones(heads, width, device=device, dtype=dtype),
            torch.zeros(heads, width, device=device, dtype=dtype),
        ]
        eta = torch.rand(batch, length, heads, 1, device=device, dtype=dtype) / width
        return [*_views(shape, dtype, device), *(x.requires_grad_() for x in (*norm, eta))]

    def gates(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
        decay = F.logsigmoid(torch.randn(shape[:3], device=device) + 4).requires_grad_()
        return decay, torch.rand(shape[:3], device=device, dtype=dtype).requires_grad_()

    def unit(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> list[Tensor]:
        q, k, v = _views(shape, dtype, device)
        return [F.normalize(q.detach(), dim=-1).requires_grad_(), F.normalize(k.detach(), dim=-1).requires_grad_(), v]

    return [
        *found,
        Peer("fla ttt_linear, fused", ttt(fused_chunk_ttt_linear), ttt_inputs),
        Peer("fla ttt_linear, chunk", ttt(chunk_ttt_linear), ttt_inputs),
        Peer(
            "fla mamba-2 (simple_gla)",
            lambda q, k, v, g: chunk_simple_gla(q, k, v, g=g)[0],
            lambda *at: [*unit(*at), gates(*at)[0]],
        ),
        Peer(
            "fla delta_rule",
            lambda q, k, v, beta: chunk_delta_rule(q, k, v, beta)[0],
            lambda *at: [*unit(*at), gates(*at)[1]],
        ),
        Peer(
            "fla gated_delta_rule",
            lambda q, k, v, g, beta: chunk_gated_delta_rule(q, k, v, g, beta)[0],
            lambda *at: [*unit(*at), *gates(*at)],
        ),
    ]


def missing() -> str | None:
    """Why flash-linear-attention is not among the peers; None if it is."""
    try:
        import fla.ops.ttt  # noqa: F401
    except Exception as error:  # as in `peers`
        return (
            f"flash-linear-attention: {type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}"
        )
    return None


def _views(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> list[Tensor]:
    return [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for _ in range(3)]


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
