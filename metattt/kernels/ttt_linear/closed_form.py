"""TTT-Linear in closed form on the CPU: `f(x) = x + LN(xW + b)` with squared error (arXiv 2407.04620, Sec. 2.5
and 2.7)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
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
from metattt.kernels.ttt_linear.learner import TTTLinearKernel


class TTTLinear(TTTLinearKernel, ClosedForm):
    name = "ttt_linear.closed_form"

    def forward_group(self, group: Group, weights: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        walk = _walk(group, weights)
        mixed = group.mix * products(group.q, group.k, walk.b is not None)
        hat = normalize(_read(group, walk, mixed)[0]).hat
        return hat.mul_(group.scale).add_(group.shift).add_(group.q), walk.after

    def backward_group(
        self, group: Group, weights: Sequence[Tensor], dy: Tensor, dweights: Sequence[Tensor]
    ) -> tuple[Group, list[Tensor]]:
        k, q, mix = group.k, group.q, group.mix
        walk = _walk(group, weights)
        # The reads, all mini-batches at once: y = q + γ x̂(z̄) + β with
        # z̄_t = γ_t (q_t W + b) − Σ_s mix_ts (q_t·k_s + 1) g_s.
        inner = products(q, k, walk.b is not None)
        mixed = mix * inner
        z, before = _read(group, walk, mixed)
        normed = normalize(z)
        dscale, dshift = (dy * normed.hat).sum((0, 2)).unsqueeze(1), dy.sum((0, 2)).unsqueeze(1)
        dz = pull_norm(dy * group.scale, normed)
        dmixed = -bmm(dz, walk.g.mT)
        dg = -bmm(mixed.mT, dz)
        dmix, dinner = dmixed * inner, dmixed * mix
        drows = None if before is None else torch.linalg.vecdot(dz, before)
        if group.rows is not None:
            dz = dz * group.rows.unsqueeze(-1)
        dq = baddbmm(baddbmm(dy, dz, walk.w.mT), dinner, k)
        dk = bmm(dinner.mT, q)
        # The walk, backwards: w' = γ_b w − (mix_b ∘ k)ᵀ g, and g depends on w through k w + b.
        dw, db = dweights[0], dweights[1] if len(dweights) > 1 else None
        count, size = k.shape[0], k.shape[2]
        scaled, last = k * mix[:, :, -1, :, None], mix[:, :, -1, :, None]
        both, dboth = torch.cat([k, q], dim=2), torch.cat([torch.empty_like(dz), dz], dim=2)
        dafter, dafter_b = torch.empty_like(walk.w), None if walk.b is None else torch.empty_like(walk.b)
        derror = torch.empty_like(k)
        squared, overlap = group.scale.square(), overlaps(walk.steps)
        for i in reversed(range(count)):
            dafter[i] = dw
            u = torch.baddbmm(dg[i], scaled[i], dw, alpha=-1)
            if db is not None and dafter_b is not None:
                dafter_b[i] = db
                u.addcmul_(last[i], db, value=-1)
            derror[i], dboth[i, :, :size] = transposed(u, walk.steps[i], overlap[i], squared)
            if group.rows is not None:
                decay = group.rows[i, :, -1, None, None]
                dw, db = decay * dw, None if db is None else decay * db
            dw = torch.baddbmm(dw, both[i].mT, dboth[i])
            db = None if db is None else db + dboth[i].sum(1, keepdim=True)
        # What the walk sends to tokens and coefficients.
        dk = baddbmm(dk, dboth[:, :, :size], walk.w.mT)
        dscaled = bmm(walk.g, dafter.mT)
        dk.addcmul_(last, dscaled, value=-1)
        dlast = torch.linalg.vecdot(dscaled, k)
        if dafter_b is not None:
            dlast = dlast + torch.linalg.vecdot(walk.g, dafter_b)
        dmix[:, :, -1] -= dlast
        if drows is not None:
            drows[:, :, -1] += (dafter * walk.w).sum((2, 3))
            if dafter_b is not None and walk.b is not None:
                drows[:, :, -1] += (dafter_b * walk.b).sum((2, 3))
        dv, inner_dscale, inner_dshift = label_cotangents(group, derror, walk.steps)
        found = Group(dk.sub_(dv), dv, dq, dmix, drows, dscale + inner_dscale, dshift + inner_dshift)
        return found, [dw] if db is None else [dw, db]


class Walk(NamedTuple):
    """The serial part of a group: weights before each mini-batch and the gradients in it, stacked over the
    mini-batches."""

    w: Tensor  # [n, N, d, d]
    b: Tensor | None  # [n, N, 1, d]
    g: Tensor  # [n, N, b, d]
    steps: list[InnerGradient]
    after: list[Tensor]


def _walk(group: Group, weights: Sequence[Tensor]) -> Walk:
    count, learners, _, width = group.k.shape
    squared, offset = group.scale.square(), (group.k - group.v + group.shift) * group.scale
    last = group.mix[:, :, -1]
    scaled = (group.k * last.unsqueeze(-1)).mT
    w = group.k.new_empty(count + 1, learners, *weights[0].shape[1:])
    w[0] = weights[0]
    b = None
    if len(weights) > 1:
        b = group.k.new_empty(count + 1, learners, 1, width)
        b[0] = weights[1]
    steps = []
    for i in range(count):
        z = torch.bmm(group.k[i], w[i]) if b is None else torch.baddbmm(b[i], group.k[i], w[i])
        step = inner_gradient(z, offset[i], squared)
        steps.append(step)
        decay = None if group.rows is None else group.rows[i, :, -1, None, None]
        torch.baddbmm(w[i] if decay is None else decay * w[i], scaled[i], step.value, alpha=-1, out=w[i + 1])
        if b is not None:
            torch.baddbmm(
                b[i] if decay is None else decay * b[i], last[i].unsqueeze(1), step.value, alpha=-1, out=b[i + 1]
            )
    after = [stack[count].clone() for stack in (w, b) if stack is not None]  # not to keep the whole stacks alive
    return Walk(w[:count], None if b is None else b[:count], torch.stack([step.value for step in steps]), steps, after)


def _read(group: Group, walk: Walk, mixed: Tensor) -> tuple[Tensor, Tensor | None]:
    """z̄, and `q W + b` where rows scale it."""
    z = bmm(group.q, walk.w) if walk.b is None else baddbmm(walk.b, group.q, walk.w)
    before = None
    if group.rows is not None:
        before, z = z, z * group.rows.unsqueeze(-1)
    return baddbmm(z, mixed, walk.g, alpha=-1), before
