"""Backward pass of `ttt_linear`: the recurrence of the cotangents, between two launches that are parallel over pieces
of the sequences (`backward_chain`).

Layout, notation and precision are those of `tiles.py`; dS = ∂L/∂S is carried beside S.

**No recomputed segment.** W before a mini-batch is W after it less the update, and the forward pass stored U, the
update's operand. So one product undoes the update, at the price of reading one more `[b, d]` tile, where recomputation
would walk every mini-batch twice. Rounding drifts only within a segment: S is loaded anew from the stored anchors at
each.

**Through the gradient of the inner loss.** With x = norm(Z), g = γ(k − v + β) + γ²x and G = r(g − mean g − x mean gx),
a cotangent A of G gives

    dg = r (A − mean A − x mean Ax)                            (the projection in G is symmetric)
    dx = γ² dg − r (A mean gx + g mean Ax)
    dZ = r (dx − mean dx − x (mean dx·x + mean A·G))           (the last term is ∂G/∂r)

and mean dx, mean dx·x expand into means that are known once Z and A are, so all sums over features of A come from one
pass. A = η y, where y = ∂L/∂(ηG) = −τ_{b−1} dS k − dZ̄ mixingᵀ, of the update and of the outputs.
"""

from functools import partial
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from metattt.kernels.naive import EPS
from metattt.kernels.ttt_linear import backward_chain, tuning
from metattt.kernels.ttt_linear.tuning import padded


class Backward(NamedTuple):
    """What the kernels write; the parts of weights are one per sequence, summed by the caller where sequences share
    weights.

    Attributes:
        q, k, v, eta: like the inputs.
        w, b, scale, shift: fp32 `[N, H, d, d]`, `[N, H, d]`; b empty without bias.
        tau: fp32 `[N, H, b]`; empty without tau.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    eta: Tensor
    w: Tensor
    b: Tensor
    scale: Tensor
    shift: Tensor
    tau: Tensor


def allocate(
    q: Tensor, k: Tensor, v: Tensor, eta: Tensor, sequences: int, bias: bool, tau: bool, size: int
) -> Backward:
    """Uninitialized gradients: shapes, types and strides in one place, for the launch and for fake tensors."""
    heads, width = q.shape[2:]
    d_q, d_k, d_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return Backward(
        q=d_q,
        k=d_k,
        v=d_v,
        eta=torch.empty_like(eta.mT, memory_format=torch.contiguous_format).mT,
        w=q.new_empty(sequences, heads, width, width, dtype=torch.float32),
        b=q.new_empty(sequences if bias else 0, heads, width, dtype=torch.float32),
        scale=q.new_empty(sequences, heads, width, dtype=torch.float32),
        shift=q.new_empty(sequences, heads, width, dtype=torch.float32),
        tau=q.new_empty(sequences if tau else 0, heads, size, dtype=torch.float32),
    )


def launch_backward(
    out: Backward, d_o: Tensor, d_state: tuple[Tensor, ...] | None, q: Tensor, k: Tensor, v: Tensor, eta: Tensor,
    scale: Tensor, shift: Tensor, tau: Tensor | None, cu_seqlens: Tensor | None, weighted: Tensor, anchors: Tensor,
    size: int, segment: int,
) -> None:  # fmt: skip
    """Runs the kernels into `out` of `allocate`. `d_state`: contiguous fp32 cotangents of w, b, update_w and update_b;
    `segment`: mini-batches between anchors."""
    batch, tokens, heads, width = q.shape
    sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    end = (None,) * 4 if d_state is None else d_state
    d_b = out.b if out.b.numel() else None
    d_tau = None if tau is None else out.tau
    tau_stride = tau.stride(0) if tau is not None and len(tau) > 1 else 0
    sizes = {
        "H": heads, "D": width, "DP": padded(width), "SIZE": size, "COLUMNS": padded(size), "SEGMENT": segment,
        "BIAS": d_b is not None, "EPS": EPS, "PRECISION": tuning.FP32_PRODUCTS,
    }  # fmt: skip
    programs, launch = sequences * heads, partial(tuning.launch, width=width, size=size, itemsize=k.itemsize)
    pieces = triton.cdiv(tokens // size, segment) + 1  # the last for an open mini-batch, of any sequence
    between = backward_chain.allocate(k, sequences, size, pieces, len(anchors), tau is not None)
    x, stats, d_read, y, d_inner, d_anchors, d_scale, d_shift, d_taus = between
    plane = stats.stride(0)
    d_tau_parts = (None, None) if tau is None else d_taus
    backward_chain.outputs_kernel[(programs, pieces)](
        d_o, q, k, v, scale, shift, tau, cu_seqlens, weighted, anchors, x, stats, d_read, out.v, d_scale[0],
        d_shift[0], d_tau_parts[0],
        tokens, plane,
        *d_o.stride()[:3], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], tau_stride, *weighted.stride()[:3],
        *out.v.stride()[:3],
        **sizes, **launch("outputs")._asdict(),
    )  # fmt: skip
    backward_chain.chain_kernel[(programs,)](
        *end, q, k, v, eta, scale, shift, tau, cu_seqlens, x, stats, d_read, out.v,
        y, d_inner, d_anchors, out.eta, out.w, d_b, tokens, plane,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *eta.stride(), tau_stride, *out.v.stride()[:3],
        *out.eta.stride(),
        **sizes, **launch("chain")._asdict(),
    )  # fmt: skip
    backward_chain.inputs_kernel[(programs, pieces)](
        d_o, q, k, v, eta, scale, shift, tau, cu_seqlens, weighted, anchors, x, stats, d_read, y, d_inner, d_anchors,
        out.q, out.k, out.v, d_scale[1], d_shift[1], d_tau_parts[1], tokens,
        *d_o.stride()[:3], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *eta.stride(), tau_stride,
        *weighted.stride()[:3],
        *out.q.stride()[:3], *out.k.stride()[:3], *out.v.stride()[:3],
        **sizes, **launch("inputs")._asdict(),
    )  # fmt: skip
    # Parts of all programs, in an order that is always the same.
    torch.sum(d_scale, (0, 1), out=out.scale)
    torch.sum(d_shift, (0, 1), out=out.shift)
    if d_tau is not None:
        torch.sum(d_taus, (0, 1), out=d_tau)
