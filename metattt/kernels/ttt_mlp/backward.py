# mypy: disable-error-code="no-untyped-def"
"""Backward kernel of TTT-MLP: one program walks the mini-batches of one (sequence, head) from the last to the first.

It needs the weights before every mini-batch. The forward pass kept those at the start of every segment; the launcher
takes a group of segments at a time, from the last, has the forward kernel go through them again (all segments of the
group at once) and then walks back through the group. What passes from group to group, the cotangents of the weights
among it, is in `grad_*`, fp32, in device memory.

Hidden units are taken in tiles. Names: `dx` is the cotangent of `x`; `bar` marks the reading
(queries), no mark the gradient (keys); `omega` is the step of the commit, η_s·τ_b. With the commit
`W' = W − Σ_s ω_s x_sᵀg_s`, reading and gradient:

    z̄ₗ_t = x̄_t Wₗ + bₗ − Σ_{s≤t} τ_t η_s (x̄_t·x_s + 1) gₗ_s        x₁ = k, x̄₁ = q, x₂ = gelu(z₁), x̄₂ = gelu(z̄₁)
    g₂ = ∂ℓ/∂z₂,  g₁ = (g₂W₂ᵀ)∘gelu'(z₁)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from metattt.kernels.ttt_mlp.common import (
    dot,
    dot_add,
    dot_over_units,
    gelu,
    gelu_and_slope,
    gelu_slopes,
    group_of,
    load_columns,
    load_tile,
    normalize,
    project,
    sequence_of,
    store_columns,
    store_tile,
)
from metattt.kernels.ttt_mlp.forward import (
    SEGMENT,
    TAIL,
    WALK,
    Weights,
    empty_weights,
    forward_kernel,
    groups,
    inner_gradient,
    launch_options,
    options_of,
    padded,
    sequences,
    strides,
    tau_stride,
)
from metattt.kernels.ttt_mlp.tuning import PROGRAMS, Config

# The four steps of a mini-batch at a tile of hidden units. Between them stand sums over all hidden units: z2; z̄2 and
# x̄2·x2; dg2.


@triton.jit
def recompute_tile(b1, w1, w2, kt, qt, z1, og2, score1):
    """After g2: g2·w2ᵀ, and z̄1, `[units, tokens]`."""
    d2 = dot(w2, og2)
    g1 = d2 * gelu_and_slope(z1)[1]
    return d2, dot(w1, qt) + b1[:, None] - dot(g1.to(kt.dtype), score1)


@triton.jit
def pull_tile(
    dw1, dw2, w1, w2, commit_w1, commit_b1, commit_w2, z1, d2, zbar1, kt, qt, q, og2, og2t, odzbar2, odzbar2t, score1t,
    dinner2, dinner2t,
    omega, og2c,
    COMMIT: tl.constexpr,
):  # fmt: skip
    """From dz̄2 to the cotangents of this tile's z1 (without the part through z2), weights and bias, and its part of
    those of q, k, ω, the scores of the first layer and g2. `commit_*`: cotangents of the committed weights, before this
    mini-batch adds to them."""
    OP: tl.constexpr = kt.dtype
    slope, curve = gelu_slopes(z1)
    ox = gelu(z1).to(OP)
    xbar, slope_bar = gelu_and_slope(zbar1)
    oxbar = xbar.to(OP)
    g1 = d2 * slope
    og1 = g1.to(OP)
    dxbar = dot_add(ox, dinner2, dot(w2, odzbar2))
    dx = dot(oxbar, dinner2t)
    dzbar1 = dxbar * slope_bar
    odzbar1 = dzbar1.to(OP)
    dg1 = -dot(odzbar1, score1t)
    dq = dot(tl.trans(w1), odzbar1)
    dscore1 = dot_over_units(og1, odzbar1)
    if COMMIT:
        dx -= dot(commit_w2, og2c)
        moved = dot(commit_w1, kt) + commit_b1[:, None]
        dg1 -= omega[None, :] * moved
        domega = -tl.sum(g1 * moved, 0)
        dk = dot(tl.trans(commit_w1), (g1 * -omega[None, :]).to(OP))
    else:
        domega = tl.zeros_like(omega)
        dk = tl.zeros_like(dq)
    od2 = (dg1 * slope).to(OP)
    dg2 = dot(tl.trans(w2), od2)
    dw1 = dot_add(odzbar1, q, dw1)
    dw2 = dot_add(oxbar, odzbar2t, dw2)
    dw2 = dot_add(od2, og2t, dw2)
    return dw1, tl.sum(dzbar1, 1), dw2, dg1 * d2 * curve + dx * slope, dq, dk, domega, dscore1, dg2


@triton.jit
def finish_tile(dw1, db1, dw2, w1, w2, z1, dz1, k, odz2, odz2t):
    """From dz2 to the rest of this tile's dz1, and from that to its weights, its bias, and its part of dk."""
    x, slope = gelu_and_slope(z1)
    dz1 += dot(w2, odz2) * slope
    odz1 = dz1.to(odz2.dtype)
    dk = dot(tl.trans(w1), odz1)
    return dot_add(odz1, k, dw1), db1 + tl.sum(dz1, 1), dot_add(x.to(odz2.dtype), odz2t, dw2), dk


@triton.jit(do_not_specialize=["T", "first", "together", "span"])
def backward_kernel(
    q, k, v, eta, tau, scale, bias, do,
    dq, dk, dv, deta,
    w1_at, b1_at, w2_at, b2_at,  # weights before every mini-batch; in the tail those after the last
    grad_w1, grad_b1, grad_w2, grad_b2, grad_scale, grad_bias, grad_tau,
    grad_update_w1, grad_update_b1, grad_update_w2, grad_update_b2,
    stash, cu_seqlens, T, first, together, span,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, e_b, e_t, e_h, o_b, o_t, o_h,
    dq_b, dq_t, dq_h, dk_b, dk_t, dk_h, dv_b, dv_t, dv_h, de_b, de_t, de_h,
    H, tau_stride,
    D: tl.constexpr, DP: tl.constexpr, F: tl.constexpr, FB: tl.constexpr, B: tl.constexpr, BP: tl.constexpr,
    KEEP: tl.constexpr, MODE: tl.constexpr, COMMIT: tl.constexpr, BIAS: tl.constexpr, TAU: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    OP: tl.constexpr = q.dtype.element_ty
    ONE: tl.constexpr = 1.0 if BIAS else 0.0
    row = tl.program_id(0)
    n = row // H
    h = (row % H).to(tl.int64)
    batch, start, length, flat = sequence_of(n, cu_seqlens, T, PACKED)
    whole = length // B
    if MODE == TAIL:
        lo, hi = whole, whole + (length % B > 0).to(tl.int32)
    else:
        lo, hi, home = group_of(n, flat, whole, first, together, B, KEEP, PACKED)
    if hi <= lo:
        return
    row = row.to(tl.int64)

    rows_at = tl.arange(0, DP)
    rows = rows_at < D
    lanes = tl.arange(0, BP)
    causal = lanes[:, None] <= lanes[None, :]  # [key, query]
    q += batch * q_b + start * q_t + h * q_h
    k += batch * k_b + start * k_t + h * k_h
    v += batch * v_b + start * v_t + h * v_h
    do += batch * o_b + start * o_t + h * o_h
    eta += batch * e_b + start * e_t + h * e_h
    dq += batch * dq_b + start * dq_t + h * dq_h
    dk += batch * dk_b + start * dk_t + h * dk_h
    dv += batch * dv_b + start * dv_t + h * dv_h
    deta += batch * de_b + start * de_t + h * de_h
    gamma = tl.load(scale + h * D + rows_at, mask=rows, other=0.0).to(tl.float32)
    beta = tl.load(bias + h * D + rows_at, mask=rows, other=0.0).to(tl.float32)
    steps = tl.full([BP], 1.0, tl.float32)
    last = 1.0
    dsteps = tl.zeros([BP], tl.float32)
    dlast = tl.zeros([BP], tl.float32)
    if TAU:
        steps = tl.load(tau + h * tau_stride + lanes, mask=lanes < B, other=0.0)
        last = tl.load(tau + h * tau_stride + B - 1)
        grad_tau += row * B
    dgamma = tl.zeros([DP], tl.float32)
    dbeta = tl.zeros([DP], tl.float32)

    units = tl.arange(0, FB)
    grad_w1 += row * F * D
    grad_w2 += row * F * D
    b1 = tl.zeros([FB], tl.float32)
    b2 = tl.zeros([DP], tl.float32)
    db1 = tl.zeros([FB], tl.float32)
    db2 = tl.zeros([DP], tl.float32)
    if BIAS:
        grad_b1 += row * F
        grad_b2 += row * D
        db2 = tl.load(grad_b2 + rows_at, mask=rows, other=0.0)
    commit_b1 = db1
    commit_b2 = db2
    # Where the cotangents of what the mini-batch commits are read: for the tail, that is the update; it commits nothing
    # to the weights.
    from_w1, from_b1, from_w2 = grad_w1, grad_b1, grad_w2
    if MODE == TAIL and COMMIT:
        from_w1 = grad_update_w1 + row * F * D
        from_w2 = grad_update_w2 + row * F * D
        if BIAS:
            from_b1 = grad_update_b1 + row * F
            commit_b2 = tl.load(grad_update_b2 + row * D + rows_at, mask=rows, other=0.0)
    stash_at = stash + row * 4 * F * BP  # z1, d2, z̄1, dz1 of all hidden units

    for back in tl.range(0, hi - lo):
        i = hi - 1 - back
        at = row if MODE == TAIL else ((home + i // KEEP).to(tl.int64) * span + i % KEEP) * H + h
        tokens = i * B + lanes
        inside = (lanes < B) & (tokens < length)
        tokens = tokens.to(tl.int64)
        kt = load_columns(k, k_t, tokens, inside, rows_at, rows)
        vt = load_columns(v, v_t, tokens, inside, rows_at, rows)
        qt = load_columns(q, q_t, tokens, inside, rows_at, rows)
        step = tl.load(eta + tokens * e_t, mask=inside, other=0.0).to(tl.float32)
        omega = step if MODE == TAIL else step * last
        mix = tl.where(causal, step[:, None] * steps[None, :], 0.0)
        if BIAS:
            b2 = tl.load(b2_at + at * D + rows_at, mask=rows, other=0.0)

        # 1. z2 at the keys and the gradient there, as in the forward pass.
        z2 = tl.zeros([DP, BP], tl.float32)
        moved2 = tl.zeros([DP, BP], tl.float32)
        for tile in tl.range(0, F, FB):
            w1, w2 = load_tile(w1_at + at * F * D, w2_at + at * F * D, tile + units, rows_at, rows, D, F)
            if BIAS:
                b1 = tl.load(b1_at + at * F + tile + units)
            z1 = dot(w1.to(OP), kt) + b1[:, None]
            tl.store(stash_at + (tile + units)[:, None] * BP + lanes[None, :], z1)
            ox = gelu(z1).to(OP)
            z2 = dot_add(tl.trans(w2.to(OP)), ox, z2)
            if COMMIT:
                commit_w1, commit_w2 = load_tile(from_w1, from_w2, tile + units, rows_at, rows, D, F)
                moved2 = dot_add(tl.trans(commit_w2.to(OP)), ox, moved2)
        tl.debug_barrier()
        g2, hat, rstd, residual, _pull, along = inner_gradient(z2 + b2[:, None], kt, vt, gamma, beta, rows, D, DP)
        og2 = g2.to(OP)
        og2c = (g2 * omega[None, :]).to(OP)
        inner1 = dot(tl.trans(kt), qt) + ONE
        oscore1 = (mix * inner1).to(OP)

        # 2. The reading, as in the forward pass.
        zbar2 = tl.zeros([DP, BP], tl.float32)
        inner2 = tl.zeros([BP, BP], tl.float32)
        for tile in tl.range(0, F, FB):
            w1, w2 = load_tile(w1_at + at * F * D, w2_at + at * F * D, tile + units, rows_at, rows, D, F)
            if BIAS:
                b1 = tl.load(b1_at + at * F + tile + units)
            place = stash_at + (tile + units)[:, None] * BP + lanes[None, :]
            z1 = tl.load(place)
            d2, zbar1 = recompute_tile(b1, w1.to(OP), w2.to(OP), kt, qt, z1, og2, oscore1)
            tl.store(place + F * BP, d2)
            tl.store(place + 2 * F * BP, zbar1)
            oxbar = gelu(zbar1).to(OP)
            zbar2 = dot_add(tl.trans(w2.to(OP)), oxbar, zbar2)
            inner2 += dot_over_units(gelu(z1).to(OP), oxbar)
        tl.debug_barrier()
        inner2 += ONE
        oscore2 = (mix * inner2).to(OP)
        zbar2 += b2[:, None] - dot(og2, oscore2)

        # 3. Through the norm of the output, and the scores of the second layer.
        hat_bar, rstd_bar = normalize(zbar2, rows, D, DP)
        dot_ = load_columns(do, o_t, tokens, inside, rows_at, rows).to(tl.float32)
        dgamma += tl.sum(dot_ * hat_bar, 1)
        dbeta += tl.sum(dot_, 1)
        dzbar2, _ = project(gamma[:, None] * dot_, hat_bar, rows, D, DP)
        dzbar2 *= rstd_bar[None, :]
        odzbar2 = dzbar2.to(OP)
        dscore2 = -dot(tl.trans(og2), odzbar2)
        dmix = dscore2 * inner2
        odinner2 = (mix * dscore2).to(OP)
        dg2 = -dot(odzbar2, tl.trans(oscore2))
        if COMMIT:
            if BIAS:
                moved2 += commit_b2[:, None]
            dg2 -= omega[None, :] * moved2
            domega = -tl.sum(g2 * moved2, 0)
        else:
            domega = tl.zeros([BP], tl.float32)
        qr = tl.trans(qt)
        kr = tl.trans(kt)
        dqt = tl.zeros([DP, BP], tl.float32)
        dkt = tl.zeros([DP, BP], tl.float32)
        dscore1 = tl.zeros([BP, BP], tl.float32)
        for tile in tl.range(0, F, FB):
            w1, w2 = load_tile(w1_at + at * F * D, w2_at + at * F * D, tile + units, rows_at, rows, D, F)
            dw1, dw2 = load_tile(grad_w1, grad_w2, tile + units, rows_at, rows, D, F)
            if MODE == TAIL and COMMIT:
                commit_w1, commit_w2 = load_tile(from_w1, from_w2, tile + units, rows_at, rows, D, F)
            else:
                commit_w1, commit_w2 = dw1, dw2
            if BIAS:
                db1 = tl.load(grad_b1 + tile + units)
                commit_b1 = tl.load(from_b1 + tile + units)
            place = stash_at + (tile + units)[:, None] * BP + lanes[None, :]
            dw1, sum1, dw2, dz1, dq_tile, dk_tile, domega1, dscore1_tile, dg2_tile = pull_tile(
                dw1, dw2, w1.to(OP), w2.to(OP), commit_w1.to(OP), commit_b1, commit_w2.to(OP), tl.load(place),
                tl.load(place + F * BP),
                tl.load(place + 2 * F * BP), kt, qt, qr, og2, tl.trans(og2), odzbar2, tl.trans(odzbar2),
                tl.trans(oscore1), odinner2,
                tl.trans(odinner2), omega, og2c, COMMIT,
            )  # fmt: skip
            tl.store(place + 3 * F * BP, dz1)
            store_tile(grad_w1, grad_w2, tile + units, rows_at, rows, dw1, dw2, D, F)
            if BIAS:
                tl.store(grad_b1 + tile + units, db1 + sum1)
            dqt += dq_tile
            dkt += dk_tile
            domega += domega1
            dscore1 += dscore1_tile
            dg2 += dg2_tile
        tl.debug_barrier()
        dscore1 = -dscore1
        dmix = tl.where(causal, dmix + dscore1 * inner1, 0.0)
        odinner1 = (mix * dscore1).to(OP)
        dqt = dot_add(kt, odinner1, dqt) + dot_
        dkt = dot_add(qt, tl.trans(odinner1), dkt)
        store_columns(dq, dq_t, tokens, inside, rows_at, rows, dqt)
        db2 += tl.sum(dzbar2, 1)

        # 4. Through the gradient at the keys, g2 = (p − mean(p) − x̂·mean(p∘x̂))/std with p = γ(k + γx̂ + β − v), to
        # z2.
        u = dg2 * rstd[None, :]
        dpull, along_u = project(u, hat, rows, D, DP)
        dresidual = gamma[:, None] * dpull
        dgamma += tl.sum(dpull * residual + dresidual * hat, 1)
        dbeta += tl.sum(dresidual, 1)
        dhat = gamma[:, None] * dresidual - u * along[None, :] - gamma[:, None] * residual * along_u[None, :]
        if DP != D:
            dhat = tl.where(rows[:, None], dhat, 0.0)
        dz2, _ = project(dhat, hat, rows, D, DP)
        dz2 = (dz2 - hat * (tl.sum(dg2 * g2, 0) / D)[None, :]) * rstd[None, :]
        store_columns(dv, dv_t, tokens, inside, rows_at, rows, -dresidual)
        dkt += dresidual
        odz2 = dz2.to(OP)
        for tile in tl.range(0, F, FB):
            w1, w2 = load_tile(w1_at + at * F * D, w2_at + at * F * D, tile + units, rows_at, rows, D, F)
            dw1, dw2 = load_tile(grad_w1, grad_w2, tile + units, rows_at, rows, D, F)
            if BIAS:
                db1 = tl.load(grad_b1 + tile + units)
            place = stash_at + (tile + units)[:, None] * BP + lanes[None, :]
            dw1, db1, dw2, dk_tile = finish_tile(
                dw1, db1, dw2, w1.to(OP), w2.to(OP), tl.load(place), tl.load(place + 3 * F * BP), kr, odz2,
                tl.trans(odz2)
            )  # fmt: skip
            dkt += dk_tile
            store_tile(grad_w1, grad_w2, tile + units, rows_at, rows, dw1, dw2, D, F)
            if BIAS:
                tl.store(grad_b1 + tile + units, db1)
        tl.debug_barrier()
        store_columns(dk, dk_t, tokens, inside, rows_at, rows, dkt)
        db2 += tl.sum(dz2, 1)
        commit_b2 = db2
        dstep = tl.sum(dmix * steps[None, :], 1)
        dsteps += tl.sum(dmix * step[:, None], 0)
        if MODE == TAIL:
            dstep += domega
        else:
            dstep += domega * last
            dlast += domega * step
        tl.store(deta + tokens * de_t, dstep, mask=inside)

    if BIAS:
        tl.store(grad_b2 + rows_at, db2, mask=rows)
    grad_scale += row * D + rows_at
    grad_bias += row * D + rows_at
    tl.store(grad_scale, tl.load(grad_scale, mask=rows) + dgamma, mask=rows)
    tl.store(grad_bias, tl.load(grad_bias, mask=rows) + dbeta, mask=rows)
    if TAU:
        dsteps += tl.where(lanes == B - 1, tl.sum(dlast, 0), 0.0)
        tl.store(grad_tau + lanes, tl.load(grad_tau + lanes, mask=lanes < B) + dsteps, mask=lanes < B)


class Gradients(NamedTuple):
    """Cotangents of the arguments of `forward`; those of the weights for every sequence, `[N, H, ...]`, fp32; those of
    the norm and τ, of the same shape, as parts that are to be added up."""

    q: Tensor
    k: Tensor
    v: Tensor
    eta: Tensor
    tau: Tensor | None
    weights: Weights
    scale: Tensor
    bias: Tensor


def backward(
    q: Tensor, k: Tensor, v: Tensor, eta: Tensor, tau: Tensor | None, scale: Tensor, bias: Tensor,
    cu_seqlens: Tensor | None, b: int,
    segment: int, final: Weights, kept: Weights, do: Tensor, dfinal: Weights, dupdate: Weights, walk: Config,
    back: Config,
) -> Gradients:  # fmt: skip
    """From the cotangents of the outputs and of the final state (entries may be None) to those of the arguments of
    `forward`.

    `final` and `kept` are what `forward` returned, `walk` and `back` the launches of the two kernels.
    """
    _, length, heads, d = q.shape
    n = sequences(q, cu_seqlens)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    deta = torch.empty_like(eta.mT, memory_format=torch.contiguous_format).mT
    dweights = filled(dfinal, final)
    dscale, dbias = (torch.zeros(n, heads, d, dtype=torch.float32, device=q.device) for _ in range(2))
    dtau = None if tau is None else torch.zeros(n, heads, b, dtype=torch.float32, device=q.device)
    commits_tail = any(x is not None for x in dupdate)
    dupdate = filled(dupdate, final) if commits_tail else (None,) * 4
    stash = torch.empty(n * heads, 4, 4 * d, max(b, 16), dtype=torch.float32, device=q.device)

    options = padded(d, b) | options_of(final, tau, cu_seqlens)
    given = (q, k, v, eta, tau, scale, bias)
    grads = (*dweights, dscale, dbias, dtau, *dupdate, stash, cu_seqlens, length)
    counts = (*strides(q, k, v, eta, do, dq, dk, dv, deta), heads, tau_stride(tau))

    def walk_back(weights: Weights, first: int, mode: int, commit: bool) -> None:
        backward_kernel[(n * heads,)](
            *given, do, dq, dk, dv, deta, *weights, *grads, first, together, span, *counts,
            KEEP=segment, MODE=mode, COMMIT=commit, **options, **launch_options(back),
        )  # fmt: skip

    # Segments are recomputed side by side: as many as fill the device, and not more, since memory grows with their
    # number.
    firsts, together, places, span = groups(q, cu_seqlens, b, segment, PROGRAMS)
    if cu_seqlens is not None or length % b:
        walk_back(final, 0, TAIL.value, commits_tail)
    if not firsts:
        return Gradients(dq, dk, dv, deta, dtau, dweights, dscale, dbias)
    types = (q.dtype, torch.float32, q.dtype, torch.float32)
    states = tuple(
        None if w is None else torch.empty(places * span, heads, *w.shape[2:], dtype=dtype, device=q.device)
        for w, dtype in zip(final, types, strict=True)
    )
    running = empty_weights(final, (places * heads,))
    for first in reversed(firsts):
        forward_kernel[(places * heads,)](
            *given, None, *kept, *running, *states, cu_seqlens, length, n, first, together, span,
            *strides(q, k, v, eta, q), heads, heads, tau_stride(tau), MODE=SEGMENT.value, KEEP=segment, **options,
            **launch_options(walk),
        )  # fmt: skip
        walk_back(states, first, WALK.value, True)
    return Gradients(dq, dk, dv, deta, dtau, dweights, dscale, dbias)


def filled(given: Weights, like: Weights) -> Weights:
    """Copies of `given` in fp32, contiguous, with zeros for those that are missing."""
    copies: dict[str, Any] = {"dtype": torch.float32, "memory_format": torch.contiguous_format, "copy": True}
    return tuple(
        x.to(**copies) if x is not None else None if w is None else torch.zeros_like(w)
        for x, w in zip(given, like, strict=True)
    )
