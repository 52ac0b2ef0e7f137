"""The oracle: online rules of a linear map, token by token, in plain PyTorch and any floating type."""

from __future__ import annotations

import torch
from torch import Tensor


def online_linear(
    k: Tensor,
    v: Tensor,
    q: Tensor,
    eta: Tensor,
    w: Tensor,
    *,
    p: Tensor | None = None,
    b: Tensor | None = None,
    a: Tensor | None = None,
    erases: bool = True,
    decayed: bool = False,
    exclusive: bool = False,
) -> tuple[Tensor, Tensor]:
    """`W_t = Diag(a_t) W_{t−1} − η_t (b_tᵀ F_t − k_tᵀ v_t)` with `F_t = p_t W_{t−1}`, and `y_t = q_t W_t`.

    Args:
        k, q: `[B, H, n·T, d_in]` and `[B, H, T, d_in]`: n pairs for every query, which reads after the last one.
        v: `[B, H, n·T, d_out]`.
        eta: `[B, H, n·T]`.
        w: W_0, `[B, H, d_in, d_out]`.
        p, b: what is asked and where it is erased, as k; None: k.
        a: decays, from 0 to 1, `[B, H, n·T]` or `[B, H, n·T, d_in]`; None: 1.
        erases: False: F = 0, the dot product's loss.
        decayed: `F_t = p_t Diag(a_t) W_{t−1}`.
        exclusive: queries read before the first pair of their token.

    Returns:
        y, `[B, H, T, d_out]`, and the weights after the last pair.
    """
    each, outputs = k.shape[2] // q.shape[2], []
    for t in range(k.shape[2]):
        key, value, rate = k[:, :, t, None], v[:, :, t, None], eta[:, :, t, None, None]
        if exclusive and t % each == 0:
            outputs.append(q[:, :, t // each, None] @ w)
        kept = w
        if a is not None:
            kept = a[:, :, t].reshape(*w.shape[:2], -1, 1) * w
        found = torch.zeros_like(value)
        if erases:
            found = (key if p is None else p[:, :, t, None]) @ (kept if decayed else w)
        where = key if b is None else b[:, :, t, None]
        w = kept - rate * (where.mT @ found - key.mT @ value)
        if not exclusive and t % each == each - 1:
            outputs.append(q[:, :, t // each, None] @ w)
    return torch.cat(outputs, 2), w
