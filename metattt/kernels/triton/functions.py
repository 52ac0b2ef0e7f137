"""The public functions of both Triton operations: what they are given is checked, and taken to the operator."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.inner.tokens import MiniBatches, Tokens
from metattt.kernels.triton.device import OPERANDS, SIZES
from metattt.kernels.triton.on_gpu import OnGPU
from metattt.optimizers.base import Gates
from metattt.tasks.base import Views

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  #: the kernels run on the CPU
Weights = Mapping[str, Tensor | None]
"""By the names that messages use."""


def over_sequences(
    kernel: OnGPU, q: Tensor, k: Tensor, v: Tensor, eta: Tensor, weights: Weights, norm: tuple[Tensor, Tensor],
    tau: Tensor | None, size: int, documents: Tensor | None, carried: bool, final: bool, widths: Collection[int],
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """Predictions `[B, T, H, d]`; what else the operator returns: first committed weights and M, if `final`.

    Args:
        carried: every sequence has weights of its own, `[N, H, ...]` in place of `[H, ...]`.
        widths: of heads, that the operation takes.

    Raises:
        MetaTTTError: a shape, type or stride that the kernels do not take.
    """
    name = _name(kernel)
    _check_views(name, q, k, v, eta, 4, widths)
    if size not in SIZES:
        raise MetaTTTError(
            f"{name}: mini-batches of {size} tokens are not among {SIZES}: "
            "set optimizer.mini_batch_size to one of them, or layer.form=dual."
        )
    if q.dtype not in OPERANDS or k.dtype != q.dtype or v.dtype != q.dtype:
        raise MetaTTTError(
            f"{name}: q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; expected one type of {OPERANDS} for all."
        )
    if eta.dtype != torch.float32:
        raise MetaTTTError(f"{name}: eta is {eta.dtype}; expected torch.float32: pass eta.float().")
    if documents is not None:
        if q.shape[0] != 1 or documents.ndim != 1 or documents.dtype not in (torch.int32, torch.int64):
            raise MetaTTTError(
                f"{name}: cu_seqlens {tuple(documents.shape)} {documents.dtype} with B = {q.shape[0]}; "
                "expected [N + 1] of torch.int32 or int64 with the documents packed into B = 1."
            )
        documents = documents.to(q.device).contiguous()
    count = q.shape[0] if documents is None else documents.shape[0] - 1
    tau = _checked(kernel, q, weights, (count,) if carried else (), norm, tau, size)
    views = Views(*(x.transpose(1, 2) for x in (k, v, q)))
    named = dict(zip(kernel.weights, weights.values(), strict=True))
    given = MiniBatches(
        Tokens(views, Gates(eta.transpose(1, 2))), {key: w for key, w in named.items() if w is not None},
        {"norm_scale": norm[0], "norm_bias": norm[1]}, tau, size, q.dtype, None,
    )  # fmt: skip
    o, *states = kernel.operate(kernel.passed(given, final, documents))
    return o.transpose(1, 2).to(q.dtype), states


def decode(
    kernel: OnGPU, q: Tensor, k: Tensor, v: Tensor, eta: Tensor, weights: Weights, update: Weights,
    norm: tuple[Tensor, Tensor], tau: Tensor | None, phase: Tensor, size: int, widths: Collection[int],
) -> Tensor:  # fmt: skip
    """Outputs `[B, H, d]` of one token of every sequence; weights and M `[B, H, ...]` are changed in place.

    Raises:
        MetaTTTError: a shape or stride that the kernel does not take.
    """
    name = f"{_name(kernel)}_decode"
    _check_views(name, q, k, v, eta, 3, widths)
    if phase.shape != q.shape[:1] or phase.is_floating_point():
        raise MetaTTTError(
            f"{name}: phase has shape {tuple(phase.shape)}, {phase.dtype}; expected {tuple(q.shape[:1])}, int."
        )
    tau = _checked(kernel, q, {**weights, **update}, q.shape[:1], norm, tau, size)
    for part, x in {**weights, **update}.items():
        if x is not None and not x.is_contiguous():
            raise MetaTTTError(f"{name}: {part} has strides {x.stride()}; what is updated in place must be contiguous.")
    parts = [[x for x in part.values() if x is not None] for part in (weights, update)]
    return kernel.decode_operator(q, k, v, eta, *parts, *norm, tau, phase, size, kernel.device)


def _name(kernel: OnGPU) -> str:
    return kernel.name.partition(".")[0]


def _check_views(name: str, q: Tensor, k: Tensor, v: Tensor, eta: Tensor, ndim: int, widths: Collection[int]) -> None:
    if q.ndim != ndim:
        expected = "[B, T, H, d]" if ndim == 4 else "[B, H, d]"
        raise MetaTTTError(f"{name}: q has shape {tuple(q.shape)}; expected {expected}.")
    if q.shape[-1] not in widths:
        raise MetaTTTError(
            f"{name}: head width {q.shape[-1]} is not one of {tuple(widths)}: choose dim / num_heads among them, or "
            "layer.form=dual."
        )
    if not (q.is_cuda or INTERPRETED):
        raise MetaTTTError(f"{name}: q is on {q.device}: the kernels run on cuda; elsewhere choose layer.form=dual.")
    for part, x in (("q", q), ("k", k), ("v", v)):
        _expect(name, part, x, q.shape)
        if x.stride(-1) != 1:
            raise MetaTTTError(
                f"{name}: {part} has strides {x.stride()}; the last must be 1: pass {part}.contiguous()."
            )
    _expect(name, "eta", eta, q.shape[:-1])


def _checked(
    kernel: OnGPU,
    q: Tensor,
    weights: Weights,
    lead: Sequence[int],
    norm: tuple[Tensor, Tensor],
    tau: Tensor | None,
    size: int,
) -> Tensor | None:
    """τ in fp32, once it and the weights are as the kernels take them. After W in `weights` may be M."""
    name, (heads, width) = _name(kernel), q.shape[-2:]
    parts = list(weights.items())
    biases = dict(parts[1::2])
    if len({x is None for x in biases.values()}) > 1:
        raise MetaTTTError(
            f"{name}: one of {' and '.join(biases)} is None: give all of them, or none for a learner without bias."
        )
    hidden = 4 * width if "w2" in kernel.weights else width
    shapes = ((width, hidden), (hidden,), (hidden, width), (width,))[: len(kernel.weights)]
    for (part, x), shape in zip(parts, shapes * (len(parts) // len(shapes)), strict=True):
        if x is not None:
            _expect(name, part, x, (*lead, heads, *shape))
    for part, x in zip(("norm_scale", "norm_bias"), norm, strict=True):
        _expect(name, part, x, (heads, width))
    if tau is not None:
        _expect(name, "tau", tau, (heads if tau.shape[0] != 1 else 1, size))
    return None if tau is None else tau.float()


def _expect(name: str, part: str, x: Tensor, shape: Sequence[int]) -> None:
    if x.shape != torch.Size(shape):
        raise MetaTTTError(f"{name}: {part} has shape {tuple(x.shape)}; expected {tuple(shape)}.")
