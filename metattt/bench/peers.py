"""Other libraries' operations on sequences, where they are installed: what ours are timed against."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from metattt.errors import check_choice


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
    rules and Mamba-2, each as a layer calls it.

    Args:
        mini_batch_size: b of TTT-Linear, tokens.
    """
    found = []
    for name in IN_LAYERS:
        try:
            found.append(peer(name, mini_batch_size))
        except Exception:  # not installed, or not for this Triton: its import has failed with more than ImportError
            continue
    return found


def peer(name: str, mini_batch_size: int) -> Peer:
    """One of `PEERS`.

    Raises:
        MetaTTTError: there is none of that name.
        Exception: its library is not installed, or does not import: whatever it raises then.
    """
    check_choice("benchmark.peers", name, PEERS)
    call, inputs = PEERS[name](mini_batch_size)
    return Peer(name, call, inputs)


def missing() -> str | None:
    """Why flash-linear-attention is not among the peers; None if it is."""
    try:
        import fla.ops.ttt  # noqa: F401
    except Exception as error:  # as in `peers`
        return (
            f"flash-linear-attention: {type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}"
        )
    return None


def forget_autotuning(package: str = "fla") -> int:
    """Makes the kernels of a library choose their launches anew, for the shape of the next call; returns how many had
    chosen.

    Their keys leave out the length and the number of heads: the launch that was best for the first shape would be timed
    at all others.
    """
    cleared = 0
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(f"{package}."):
            for kernel in list(vars(module).values()):
                cleared += sum(_forget(layer) for layer in _layers(kernel))
    return cleared


def _layers(kernel: Any) -> Iterator[Any]:
    """A kernel and what it is wrapped in: autotuner, heuristics."""
    for _ in range(5):
        if not type(kernel).__module__.startswith(("triton", "fla")):
            return
        yield kernel
        kernel = getattr(kernel, "fn", None)


def _forget(kernel: Any) -> bool:
    cache = getattr(kernel, "cache", None)
    if not hasattr(kernel, "configs") or not isinstance(cache, dict) or not cache:
        return False
    cache.clear()
    return True


# -- inputs ------------------------------------------------------------------------------------------------------------

Shape = tuple[int, ...]
Made = tuple[Callable[..., Tensor], Callable[[Shape, torch.dtype, str], list[Tensor]]]


def _views(shape: Shape, dtype: torch.dtype, device: str) -> list[Tensor]:
    return [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for _ in range(3)]


def _unit_views(shape: Shape, dtype: torch.dtype, device: str) -> list[Tensor]:
    q, k, v = _views(shape, dtype, device)
    return [F.normalize(q.detach(), dim=-1).requires_grad_(), F.normalize(k.detach(), dim=-1).requires_grad_(), v]


def _decay(shape: Shape, device: str) -> Tensor:
    return F.logsigmoid(torch.randn(shape[:3], device=device) + 4).requires_grad_()


def _rate(shape: Shape, dtype: torch.dtype, device: str) -> Tensor:
    return torch.rand(shape[:3], device=device, dtype=dtype).requires_grad_()


def _ttt_inputs(shape: Shape, dtype: torch.dtype, device: str) -> list[Tensor]:
    batch, length, heads, width = shape
    scale = torch.ones(heads, width, device=device, dtype=dtype)
    shift = torch.zeros(heads, width, device=device, dtype=dtype)
    eta = torch.rand(batch, length, heads, 1, device=device, dtype=dtype) / width
    return [*_views(shape, dtype, device), *(x.requires_grad_() for x in (scale, shift, eta))]


# -- the peers ---------------------------------------------------------------------------------------------------------


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def _attention_by(backend: str | None, mini_batch_size: int) -> Made:
    """PyTorch's attention by a backend of its own, or by the one that it chooses."""
    if backend is None:
        return _attention, _views
    from torch.nn.attention import SDPBackend, sdpa_kernel

    chosen = getattr(SDPBackend, backend)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(chosen):
            return _attention(q, k, v)

    return call, _views


@contextmanager
def _without_norm(module: Any) -> Iterator[None]:
    """fla normalizes the outputs and adds the residual in operations of their own, after its kernels."""
    kept = module.norm_residual
    module.norm_residual = lambda x, *_: x
    try:
        yield
    finally:
        module.norm_residual = kept


def _fla_ttt(file: str, function: str, whole: bool, mini_batch_size: int) -> Made:
    module = importlib.import_module(f"fla.ops.ttt.{file}")
    operation = getattr(module, function)

    def call(q: Tensor, k: Tensor, v: Tensor, scale: Tensor, shift: Tensor, eta: Tensor) -> Tensor:
        o: Tensor = operation(q, k, v, scale, shift, eta, scale=1.0, chunk_size=mini_batch_size)[0]
        return o

    def bare(*inputs: Tensor) -> Tensor:
        with _without_norm(module):
            return call(*inputs)

    return call if whole else bare, _ttt_inputs


def _fla_simple_gla(mini_batch_size: int) -> Made:
    from fla.ops.simple_gla import chunk_simple_gla

    return (
        lambda q, k, v, g: chunk_simple_gla(q, k, v, g=g)[0],
        lambda shape, dtype, device: [*_unit_views(shape, dtype, device), _decay(shape, device)],
    )


def _fla_delta_rule(mini_batch_size: int) -> Made:
    from fla.ops.delta_rule import chunk_delta_rule

    return (
        lambda q, k, v, beta: chunk_delta_rule(q, k, v, beta)[0],
        lambda *at: [*_unit_views(*at), _rate(*at)],
    )


def _fla_gated_delta_rule(mini_batch_size: int) -> Made:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return (
        lambda q, k, v, g, beta: chunk_gated_delta_rule(q, k, v, g, beta)[0],
        lambda *at: [*_unit_views(*at), _decay(at[0], at[2]), _rate(*at)],
    )


PEERS: dict[str, Callable[[int], Made]] = {
    "torch attention": partial(_attention_by, None),
    "torch attention, flash": partial(_attention_by, "FLASH_ATTENTION"),
    "torch attention, cudnn": partial(_attention_by, "CUDNN_ATTENTION"),
    "fla ttt_linear, fused": partial(_fla_ttt, "fused_chunk", "fused_chunk_ttt_linear", True),
    "fla ttt_linear without norm, fused": partial(_fla_ttt, "fused_chunk", "fused_chunk_ttt_linear", False),
    "fla gated_delta_rule": _fla_gated_delta_rule,
    "fla mamba-2 (simple_gla)": _fla_simple_gla,
    "fla ttt_linear, chunk": partial(_fla_ttt, "chunk", "chunk_ttt_linear", True),
    "fla ttt_linear without norm, chunk": partial(_fla_ttt, "chunk", "chunk_ttt_linear", False),
    "fla delta_rule": _fla_delta_rule,
}
"""By name, from b to the call and its inputs; up to a comma names are of the same operation, done in several ways."""

IN_LAYERS = [
    "torch attention",
    "fla ttt_linear, fused",
    "fla ttt_linear, chunk",
    "fla mamba-2 (simple_gla)",
    "fla delta_rule",
    "fla gated_delta_rule",
]
ON_A_GPU = [name for name in PEERS if name != "torch attention"]
"""What the benchmark of the GPU times: of attention each backend that it could choose."""
