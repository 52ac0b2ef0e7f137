"""Other libraries' operations on sequences, where they are installed: what ours are timed against."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor


def forget_autotuning() -> None:
    """Makes the kernels of flash-linear-attention choose their launches anew, for the shape of the next call.

    Their keys leave out the length and the number of heads: all shapes would be timed with the launch of the first.
    """
    for name, module in list(sys.modules.items()):
        for kernel in list(vars(module).values()) if name.partition(".")[0] == "fla" else ():
            for _ in range(5):  # a kernel is wrapped in autotuner and heuristics
                if hasattr(kernel, "configs") and isinstance(getattr(kernel, "cache", None), dict):
                    kernel.cache.clear()
                kernel = getattr(kernel, "fn", None)


Shape = tuple[int, ...]
Made = tuple[Callable[..., Tensor], Callable[[Shape, torch.dtype, str], list[Tensor]]]


def _views(shape: Shape, dtype: torch.dtype, device: str) -> list[Tensor]:
    return [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for _ in range(3)]


def _unit_views(shape: Shape, dtype: torch.dtype, device: str) -> list[Tensor]:
    q, k, v = _views(shape, dtype, device)
    return [F.normalize(q.detach(), dim=-1).requires_grad_(), F.normalize(k.detach(), dim=-1).requires_grad_(), v]


def _ttt_inputs(shape: Shape, dtype: torch.dtype, device: str) -> list[Tensor]:
    batch, length, heads, width = shape
    scale = torch.ones(heads, width, device=device, dtype=dtype)
    shift = torch.zeros(heads, width, device=device, dtype=dtype)
    eta = torch.rand(batch, length, heads, 1, device=device, dtype=dtype) / width
    return [*_views(shape, dtype, device), *(x.requires_grad_() for x in (scale, shift, eta))]


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def _attention_by(backend: str, mini_batch_size: int) -> Made:
    """PyTorch's attention by a backend of its own."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return _attention(q, k, v)

    return call, _views


def _fla_ttt(file: str, function: str, mini_batch_size: int) -> Made:
    operation = getattr(importlib.import_module(f"fla.ops.ttt.{file}"), function)

    def call(q: Tensor, k: Tensor, v: Tensor, scale: Tensor, shift: Tensor, eta: Tensor) -> Tensor:
        o: Tensor = operation(q, k, v, scale, shift, eta, scale=1.0, chunk_size=mini_batch_size)[0]
        return o

    return call, _ttt_inputs


def _fla(file: str, function: str, gates: str, mini_batch_size: int) -> Made:
    """An operation of flash-linear-attention on unit views; `gates`: of `g` and `beta`, those that it takes."""
    operation = getattr(importlib.import_module(f"fla.ops.{file}"), function)
    made: dict[str, Callable[[Shape, torch.dtype, str], Tensor]] = {
        "g": lambda shape, _, device: F.logsigmoid(torch.randn(shape[:3], device=device) + 4),
        "beta": lambda shape, dtype, device: torch.rand(shape[:3], dtype=dtype, device=device),
    }

    def call(q: Tensor, k: Tensor, v: Tensor, *given: Tensor) -> Tensor:
        o: Tensor = operation(q, k, v, **dict(zip(gates.split(), given, strict=True)))[0]
        return o

    return call, lambda *at: [*_unit_views(*at), *(made[gate](*at).requires_grad_() for gate in gates.split())]


PEERS: dict[str, Callable[[int], Made]] = {
    "torch attention": lambda mini_batch_size: (_attention, _views),
    "torch attention, flash": partial(_attention_by, "FLASH_ATTENTION"),
    "torch attention, cudnn": partial(_attention_by, "CUDNN_ATTENTION"),
    "fla ttt_linear, fused": partial(_fla_ttt, "fused_chunk", "fused_chunk_ttt_linear"),
    "fla gated_delta_rule": partial(_fla, "gated_delta_rule", "chunk_gated_delta_rule", "g beta"),
    "fla mamba-2 (simple_gla)": partial(_fla, "simple_gla", "chunk_simple_gla", "g"),
    "fla ttt_linear, chunk": partial(_fla_ttt, "chunk", "chunk_ttt_linear"),
    "fla delta_rule": partial(_fla, "delta_rule", "chunk_delta_rule", "beta"),
}
"""By name, from b to an operation on `[B, T, H, d]`, and from a shape, a type and a device to its random inputs."""

ON_A_GPU = [name for name in PEERS if name != "torch attention"]  # of attention each backend by itself
