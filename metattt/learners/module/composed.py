"""Normalisations and attention composed of elementary operations, instead of the native ones.

The native ones have wrong or missing higher derivatives, and the outer loop differentiates the inner loop's gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from metattt.modules import standardize


class Normalize(TorchFunctionMode):
    """Replaces native normalisations and attention by compositions with correct derivatives of any order."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        composed = COMPOSED.get(function)
        return (composed or function)(*args, **(kwargs or {}))


def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enable: bool = True
) -> Tensor:
    y = standardize(x.flatten(-len(shape)), eps).view(x.shape)
    return _affine(y, weight, bias)


def rms_norm(x: Tensor, shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Tensor:
    axes = tuple(range(-len(shape), 0))
    y = x * torch.rsqrt(x.square().mean(axes, keepdim=True) + (torch.finfo(x.dtype).eps if eps is None else eps))
    return _affine(y, weight, None)


def group_norm(
    x: Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enabled: bool = True
) -> Tensor:
    y = standardize(x.unflatten(1, (groups, -1)).flatten(2), eps).view(x.shape)
    return _affine(y.movedim(1, -1), weight, bias).movedim(-1, 1)


def embedding(index: Tensor, weight: Tensor, padding_idx: int | None = None, *options: Any, **named: Any) -> Tensor:
    return unpadded(F.embedding(index, weight), index, padding_idx, weight.shape[0])


def unpadded(rows: Tensor, index: Tensor, padding_idx: int | None, count: int) -> Tensor:
    """Rows of a table of `count`, of which row `padding_idx` gets no gradient."""
    if padding_idx is None:
        return rows
    return torch.where((index == padding_idx % count).unsqueeze(-1), rows.detach(), rows)


def attention(*args: Any, **options: Any) -> Tensor:
    """The composition that torch itself has, with the arguments of `F.scaled_dot_product_attention`. (`sdpa_kernel`
    chooses it for all threads of the process.)"""
    y: Tensor = torch.ops.aten._scaled_dot_product_attention_math(*args, **options)[0]
    return y


def multi_head_attention(*args: Any, need_weights: bool = True, **options: Any) -> tuple[Tensor, Tensor | None]:
    """With weights, `F.multi_head_attention_forward` is composed of products and a softmax."""
    y, weights = F.multi_head_attention_forward(*args, need_weights=True, **options)  # type: ignore[misc]
    return y, weights if need_weights else None


def _affine(y: Any, weight: Any, bias: Any) -> Any:
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


NORMS: dict[Any, Callable[..., Any]] = {
    F.layer_norm: layer_norm,
    torch.layer_norm: layer_norm,
    F.rms_norm: rms_norm,
    torch.rms_norm: rms_norm,
    F.group_norm: group_norm,
    torch.group_norm: group_norm,
}
"""They use their parameters as operands of `*` and `+`."""
COMPOSED: dict[Any, Callable[..., Any]] = {
    **NORMS,
    F.scaled_dot_product_attention: attention,
    F.multi_head_attention_forward: multi_head_attention,
    F.embedding: embedding,
}
