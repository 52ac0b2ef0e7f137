"""TTT-MLP in closed form on the CPU: `f(x) = x + LN(gelu(xW₁ + b₁)W₂ + b₂)` with squared error (arXiv 2407.04620,
Sec. 2.7)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from metattt.kernels.cpu.closed_form import (
    ClosedForm,
    Group,
    InnerGradient,
    baddbmm,
    bmm,
    inner_gradient,
    label_cotangents,
    normalize,
    overlaps,
    products,
    pull_norm,
    transposed,
)
from metattt.kernels.ttt_mlp.learner import TTTMLPKernel


class TTTMLP(TTTMLPKernel, ClosedForm):
    name = "ttt_mlp.closed_form"
    largest_group = 16  # the weights of a mini-batch are as large as 8·d tokens of its hidden layer

    def forward_group(self, group: Group, weights: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        walk = _walk(group, weights)
        hat = normalize(_read(group, walk).z2).hat
        return hat.mul_(group.scale).add_(group.shift).add_(group.q), walk.after

    def backward_group(
        self, group: Group, weights: Sequence[Tensor], dy: Tensor, dweights: Sequence[Tensor]
    ) -> tuple[Group, list[Tensor]]:
        k, q, mix, rows = group.k, group.q, group.mix, group.rows
        walk = _walk(group, weights)
        read = _read(group, walk)
        count, size = k.shape[0], k.shape[2]
        biased = walk.b1 is not None
        # The reads, all mini-batches at once: z̄ₗ_t = γ_t (x̄_t Wₗ + bₗ) − Σ_s mix_ts (x̄_t·x_s + 1) gₗ_s, where x̄ is
        # q for the first layer and gelu(z̄₁) for the second.
        normed = normalize(read.z2)
        dscale, dshift = (dy * normed.hat).sum((0, 2)).unsqueeze(1), dy.sum((0, 2)).unsqueeze(1)
        dz2 = pull_norm(dy * group.scale, normed)
        dmixed = -bmm(dz2, walk.g2.mT)
        dg2 = -bmm((mix * read.inner2).mT, dz2)
        dmix, dinner = dmixed * read.inner2, dmixed * mix
        drows = None if rows is None or read.before2 is None else torch.linalg.vecdot(dz2, read.before2)
        if rows is not None:
            dz2 = dz2 * rows.unsqueeze(-1)
        dx2 = bmm(dinner.mT, read.x2)
        dz1 = _pull_gelu(baddbmm(bmm(dz2, walk.w2.mT), dinner, walk.x2), read.z1)
        dmixed = -bmm(dz1, walk.g1.mT)
        dg1 = -bmm((mix * read.inner1).mT, dz1)
        dmix, dinner = dmix + dmixed * read.inner1, dmixed * mix
        if rows is not None and drows is not None and read.before1 is not None:
            drows = drows + torch.linalg.vecdot(dz1, read.before1)
            dz1 = dz1 * rows.unsqueeze(-1)
        dq = baddbmm(baddbmm(dy, dz1, walk.w1.mT), dinner, k)
        dk = bmm(dinner.mT, q)
        # The walk, backwards: wₗ' = γ_b wₗ − (mix_b ∘ xₗ)ᵀ gₗ, where g₂ depends on z₂ = gelu(z₁)W₂ + b₂, and
        # g₁ = (g₂W₂ᵀ) ∘ gelu'(z₁).
        dw1, dw2 = dweights[0], dweights[2 if biased else 1]
        db1, db2 = (dweights[1], dweights[3]) if biased else (None, None)
        last = mix[:, :, -1, :, None]
        scaled1, scaled2 = k * last, walk.x2 * last
        slope, curve = _derivatives(walk.z1)
        slope_g1, curve = slope, curve.mul_(walk.e)  # of g₁ with respect to e = g₂W₂ᵀ and z₁
        both, dboth = torch.cat([k, q], dim=2), torch.cat([torch.empty_like(dz1), dz1], dim=2)
        # dW₂ = x₂ᵀ dz₂ + deᵀ g₂ + x̄₂ᵀ dz̄₂ in one product
        left2 = torch.cat([walk.x2, torch.empty_like(walk.x2), read.x2], dim=2)
        right2 = torch.cat([torch.empty_like(dz2), walk.g2, dz2], dim=2)
        derror, dscaled = torch.empty_like(k), torch.empty_like(k)
        dlast = torch.zeros_like(mix[:, :, -1])
        squared, overlap = group.scale.square(), overlaps(walk.steps)
        for i in reversed(range(count)):
            u1 = torch.baddbmm(dg1[i], scaled1[i], dw1, alpha=-1)
            u2 = torch.baddbmm(dg2[i], scaled2[i], dw2, alpha=-1)
            dscaled2 = torch.bmm(walk.g2[i], dw2.mT)
            torch.bmm(walk.g1[i], dw1.mT, out=dscaled[i])
            if db1 is not None and db2 is not None:
                u1.addcmul_(last[i], db1, value=-1)
                u2.addcmul_(last[i], db2, value=-1)
                dlast[i] -= torch.linalg.vecdot(walk.g1[i], db1) + torch.linalg.vecdot(walk.g2[i], db2)
            dlast[i] -= torch.linalg.vecdot(dscaled2, walk.x2[i])
            de = left2[i, :, size : 2 * size]
            torch.mul(u1, slope_g1[i], out=de)
            u2.baddbmm_(de, walk.w2[i])
            derror[i], dz = transposed(u2, walk.steps[i], overlap[i], squared)
            right2[i, :, :size] = dz
            hidden = torch.baddbmm(dx2[i], dz, walk.w2[i].mT).addcmul_(last[i], dscaled2, value=-1)
            torch.addcmul(u1 * curve[i], hidden, slope[i], out=dboth[i, :, :size])
            if rows is not None and drows is not None:
                decay = rows[i, :, -1, None, None]
                drows[i, :, -1] += sum((dw * w[i]).sum((1, 2)) for dw, w in _pairs((dw1, db1, dw2, db2), walk))
                dw1, dw2 = decay * dw1, decay * dw2
                db1, db2 = (None, None) if db1 is None or db2 is None else (decay * db1, decay * db2)
            dw1 = torch.baddbmm(dw1, both[i].mT, dboth[i])
            dw2 = torch.baddbmm(dw2, left2[i].mT, right2[i])
            if db1 is not None and db2 is not None:
                db1 = db1 + dboth[i].sum(1, keepdim=True)
                db2 = db2 + (right2[i, :, :size] + right2[i, :, 2 * size :]).sum(1, keepdim=True)
        # What the walk sends to tokens and coefficients.
        dk = baddbmm(dk, dboth[:, :, :size], walk.w1.mT).addcmul_(last, dscaled, value=-1)
        dmix[:, :, -1] += dlast - torch.linalg.vecdot(dscaled, k)
        dv, inner_dscale, inner_dshift = label_cotangents(group, derror, walk.steps)
        found = Group(dk.sub_(dv), dv, dq, dmix, drows, dscale + inner_dscale, dshift + inner_dshift)
        return found, [dw1, dw2] if db1 is None or db2 is None else [dw1, db1, dw2, db2]


class Walk(NamedTuple):
    """The serial part of a group: weights before each mini-batch and what was computed in it, stacked over the
    mini-batches."""

    w1: Tensor  # [n, N, d, f]
    b1: Tensor | None  # [n, N, 1, f]
    w2: Tensor  # [n, N, f, d]
    b2: Tensor | None  # [n, N, 1, d]
    z1: Tensor  # [n, N, b, f], before the activation
    x2: Tensor  # and after
    e: Tensor  # g₂W₂ᵀ
    g1: Tensor
    g2: Tensor
    steps: list[InnerGradient]
    after: list[Tensor]


class Read(NamedTuple):
    """The queries of a group on their way through both layers."""

    inner1: Tensor  # q_t·k_s + 1
    before1: Tensor | None  # q W₁ + b₁, where rows scale it
    z1: Tensor
    x2: Tensor
    inner2: Tensor
    before2: Tensor | None
    z2: Tensor


def _walk(group: Group, weights: Sequence[Tensor]) -> Walk:
    count, learners, size = group.k.shape[:3]
    biased = len(weights) == 4
    squared, offset = group.scale.square(), (group.k - group.v + group.shift) * group.scale
    last = group.mix[:, :, -1]
    scaled = (group.k * last.unsqueeze(-1)).mT
    kept = [group.k.new_empty(count + 1, *weight.shape) for weight in weights]
    for stack, weight in zip(kept, weights, strict=True):
        stack[0] = weight
    w1, b1, w2, b2 = kept if biased else (kept[0], None, kept[1], None)
    z1, x2, e, g1 = (group.k.new_empty(count, learners, size, w1.shape[-1]) for _ in range(4))
    steps = []
    for i in range(count):
        if b1 is None or b2 is None:
            torch.bmm(group.k[i], w1[i], out=z1[i])
        else:
            torch.baddbmm(b1[i], group.k[i], w1[i], out=z1[i])
        x2[i] = F.gelu(z1[i], approximate="tanh")
        step = inner_gradient(
            torch.bmm(x2[i], w2[i]) if b2 is None else torch.baddbmm(b2[i], x2[i], w2[i]), offset[i], squared
        )
        steps.append(step)
        torch.bmm(step.value, w2[i].mT, out=e[i])
        g1[i] = _pull_gelu(e[i], z1[i])
        decay = None if group.rows is None else group.rows[i, :, -1, None, None]
        row = last[i].unsqueeze(1)
        lefts = (scaled[i], row, (x2[i] * row.mT).mT, row) if biased else (scaled[i], (x2[i] * row.mT).mT)
        rights = (g1[i], g1[i], step.value, step.value) if biased else (g1[i], step.value)
        for stack, left, right in zip(kept, lefts, rights, strict=True):
            torch.baddbmm(stack[i] if decay is None else decay * stack[i], left, right, alpha=-1, out=stack[i + 1])
    after = [stack[count].clone() for stack in kept]  # not to keep the whole stacks alive
    starts: list[Any] = [None if stack is None else stack[:count] for stack in (w1, b1, w2, b2)]
    w1, b1, w2, b2 = starts
    return Walk(w1, b1, w2, b2, z1, x2, e, g1, torch.stack([step.value for step in steps]), steps, after)


def _read(group: Group, walk: Walk) -> Read:
    inner1, before1, z1 = _layer(group, group.q, group.k, walk.w1, walk.b1, walk.g1)
    x2 = F.gelu(z1, approximate="tanh")
    inner2, before2, z2 = _layer(group, x2, walk.x2, walk.w2, walk.b2, walk.g2)
    return Read(inner1, before1, z1, x2, inner2, before2, z2)


def _layer(
    group: Group, query: Tensor, key: Tensor, w: Tensor, b: Tensor | None, g: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """`query_t·key_s + 1`, `query W + b` where rows scale it, and z̄ of one layer."""
    inner = products(query, key, b is not None)
    z = bmm(query, w) if b is None else baddbmm(b, query, w)
    before = None
    if group.rows is not None:
        before, z = z, z * group.rows.unsqueeze(-1)
    return inner, before, baddbmm(z, group.mix * inner, g, alpha=-1)


def _pairs(cotangents: Sequence[Tensor | None], walk: Walk) -> list[tuple[Tensor, Tensor]]:
    weights = (walk.w1, walk.b1, walk.w2, walk.b2)
    return [(dw, w) for dw, w in zip(cotangents, weights, strict=True) if dw is not None and w is not None]


def _pull_gelu(dx: Tensor, z: Tensor) -> Tensor:
    """`dx ∘ gelu'(z)`."""
    return torch.ops.aten.gelu_backward(dx, z, approximate="tanh")


def _derivatives(z: Tensor) -> tuple[Tensor, Tensor]:
    """gelu' and gelu'' of `½z(1 + tanh u)`, `u = √(2/π)(z + 0.044715 z³)`."""
    scale, cubic = math.sqrt(2 / math.pi), 0.044715
    square = z * z
    tanh = torch.tanh(z * (scale + scale * cubic * square))
    du = (3 * scale * cubic * square).add_(scale)
    sech = 1 - tanh * tanh
    slope = (0.5 * z * sech * du).add_(tanh, alpha=0.5).add_(0.5)
    curve = sech * (du + z * (3 * scale * cubic * z - tanh * du * du))
    return slope, curve
