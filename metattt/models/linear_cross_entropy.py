"""Cross-entropy of a large vocabulary without the logits of all tokens: they are made, and used up, some rows at a
time."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from metattt.modules import product_type

MAX_LOGITS = 2**24  # logits at a time: 64 MiB in fp32


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "sum",
    max_logits: int = MAX_LOGITS,
) -> Tensor:
    """`−Σ_n log softmax(x_n Wᵀ)[label_n]` (nats) in fp32 or wider, and its first derivatives.

    The logits are rounded as those of a linear layer are (to the type of autocast, where that is on), and their softmax
    is taken in fp32 or wider.

    Args:
        x: features `[N, D]`.
        weight: `[V, D]`, of the head.
        labels: `[N]` token ids.
        ignore_index: a label that does not count.
        reduction: `sum` over the rows, or `none`: the losses `[N]` (derivatives of these keep all logits).
        max_logits: logits that are held at a time, at most (but those of one row); fewer in all are made at once.
    """
    if x.shape[0] * weight.shape[0] <= max_logits:
        return F.cross_entropy(_wide(F.linear(x, weight)), labels, ignore_index=ignore_index, reduction=reduction)
    size = _rows(weight.shape[0], max_logits)
    if reduction == "none":
        parts = zip(x.split(size), labels.split(size), strict=True)
        losses = [
            F.cross_entropy(_wide(F.linear(rows, weight)), own, ignore_index=ignore_index, reduction="none")
            for rows, own in parts
        ]
        return torch.cat(losses)
    if not torch.is_grad_enabled():  # autograd says of a parameter that it needs a gradient there, too
        x, weight = x.detach(), weight.detach()
    total: Tensor = _Chunked.apply(x, weight, labels, ignore_index, size, product_type(x))
    return total


class _Chunked(torch.autograd.Function):
    """The sum over rows. Derivatives are made with the loss, while the logits of their rows are there."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, size: int, matmul_dtype: torch.dtype
    ) -> Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        w = weight.to(matmul_dtype)
        accum_dtype = torch.promote_types(matmul_dtype, torch.float32)
        total = torch.zeros((), device=x.device, dtype=accum_dtype)
        grad_x = torch.empty_like(x) if needs_x else None
        grad_weight = torch.zeros_like(weight, dtype=accum_dtype) if needs_weight else None
        for start in range(0, x.shape[0], size):
            here = slice(start, start + size)
            rows, real = x[here].to(matmul_dtype), labels[here] != ignore_index
            own = labels[here].where(real, 0).unsqueeze(1)
            logits = (rows @ w.mT).to(accum_dtype)
            normaliser = logits.logsumexp(1, keepdim=True)
            total += ((normaliser - logits.gather(1, own)).squeeze(1) * real).sum()
            if grad_x is None and grad_weight is None:
                continue
            error = logits.sub_(normaliser).exp_()  # softmax − one-hot, 0 where no loss is taken
            error.scatter_add_(1, own, -torch.ones_like(own, dtype=accum_dtype)).mul_(real.unsqueeze(1))
            error = error.to(matmul_dtype)
            if grad_x is not None:
                grad_x[here] = error @ w
            if grad_weight is not None and matmul_dtype == accum_dtype:
                grad_weight.addmm_(error.mT, rows)
            elif grad_weight is not None:
                grad_weight += error.mT @ rows
        ctx.save_for_backward(grad_x, None if grad_weight is None else grad_weight.to(weight.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = (None if saved is None else (saved * grad).to(saved.dtype) for saved in ctx.saved_tensors)
        return *grads, None, None, None, None


def _rows(vocab_size: int, max_logits: int) -> int:
    """Rows at a time: a power of two."""
    return 1 << (max(1, max_logits // vocab_size).bit_length() - 1)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
