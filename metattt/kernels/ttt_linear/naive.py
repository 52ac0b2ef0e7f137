"""The oracle of `ttt_linear`: its equations in plain torch, one mini-batch after the other, any dtype, autograd through
everything."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

EPS = 1e-6  #: added to the variance by every layer normalization of the inner model


class LinearState(NamedTuple):
    """Fast weights of N sequences: the committed W_a, and the open sum M = -Σ η_s ∇ℓ_s of the tokens since (zero
    between mini-batches).

    Attributes:
        w: `[N, H, d, d]`, used as `x @ w`.
        b: `[N, H, d]`.
        update_w: `[N, H, d, d]`.
        update_b: `[N, H, d]`.
    """

    w: Tensor
    b: Tensor
    update_w: Tensor
    update_b: Tensor


def normalize(z: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of z `[..., d]` with mean 0 and (biased) variance 1, and the reciprocal of their standard deviation
    `[..., 1]`."""
    centred = z - z.mean(-1, keepdim=True)
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + EPS)
    return centred * rstd, rstd


def output_gradient(k: Tensor, v: Tensor, z: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """G = ∂ℓ/∂z of ℓ = ½‖k + γ norm(z) + β − v‖², in closed form. All `[..., d]`."""
    x, rstd = normalize(z)
    g = scale * (k + scale * x + shift - v)
    return rstd * (g - g.mean(-1, keepdim=True) - x * (g * x).mean(-1, keepdim=True))


def _sequence(
    q: Tensor, k: Tensor, v: Tensor, eta: Tensor, w: Tensor, b: Tensor | None, scale: Tensor, shift: Tensor,
    tau: Tensor,
    size: int,
) -> tuple[Tensor, LinearState]:  # fmt: skip
    """q, k, v `[N, H, T, d]`, eta `[N, H, T]`, w `[N, H, d, d]`, b `[N, H, d]` or None, scale, shift `[H, 1, d]`, tau
    `[1 or H, b]`."""
    bias = w.new_zeros(w.shape[:-1]) if b is None else b
    update_w, update_b = torch.zeros_like(w), torch.zeros_like(bias)
    out = []
    for start in range(0, q.shape[2], size):
        stop = min(start + size, q.shape[2])
        qs, ks, vs, etas = (x[:, :, start:stop] for x in (q, k, v, eta))
        grad = output_gradient(ks, vs, ks @ w + bias[:, :, None], scale, shift)
        mix = (tau[:, : stop - start, None] * etas[:, :, None, :]).tril()
        products = qs @ ks.mT if b is None else qs @ ks.mT + 1
        z = qs @ w + bias[:, :, None] - (mix * products) @ grad
        out.append(qs + scale * normalize(z)[0] + shift)
        weighted = etas[..., None] * grad
        update_w, update_b = -ks.mT @ weighted, torch.zeros_like(bias) if b is None else -weighted.sum(-2)
        if stop - start == size:
            last = tau[:, -1, None]
            w, bias = w + last[..., None] * update_w, bias + last * update_b
            update_w, update_b = torch.zeros_like(w), torch.zeros_like(bias)
    return (torch.cat(out, 2) if out else q), LinearState(w, bias, update_w, update_b)


def ttt_linear_naive(
    q: Tensor, k: Tensor, v: Tensor, eta: Tensor, w: Tensor, b: Tensor | None, norm_scale: Tensor, norm_bias: Tensor, *,
    tau: Tensor | None = None, mini_batch_size: int = 16, initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, LinearState | None]:  # fmt: skip
    """As `ttt_linear` of `op.py`, which documents the arguments; every tensor of one dtype, in which all is
    computed."""
    bounds = None if cu_seqlens is None else cu_seqlens.tolist()
    number = q.shape[0] if bounds is None else len(bounds) - 1
    heads = w.shape[-3]
    if initial_state is None:
        w, b = w.expand(number, *w.shape), None if b is None else b.expand(number, *b.shape)
    else:
        w, b = initial_state[0], None if b is None else initial_state[1]
    tau = w.new_ones(1, mini_batch_size) if tau is None else tau
    q, k, v, eta = (x.transpose(1, 2) for x in (q, k, v, eta))
    affine = (norm_scale.view(heads, 1, -1), norm_bias.view(heads, 1, -1))
    if bounds is None:
        out, state = _sequence(q, k, v, eta, w, b, *affine, tau, mini_batch_size)
    else:
        parts = []
        for n, (start, stop) in enumerate(pairwise(bounds)):
            qs, ks, vs, etas = (x[:, :, start:stop] for x in (q, k, v, eta))
            weights = w[n, None], None if b is None else b[n, None]
            parts.append(_sequence(qs, ks, vs, etas, *weights, *affine, tau, mini_batch_size))
        out = torch.cat([y for y, _ in parts], 2)
        state = LinearState(*(torch.cat(kind) for kind in zip(*(s for _, s in parts), strict=True)))
    return out.transpose(1, 2), (state if output_final_state else None)
