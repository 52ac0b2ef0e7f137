"""The linear rule over a chunk of n tokens: the coefficients with which a query reads every token's gradient, and those
of the new memory.

With gates per token, `S_t = β_t S_{t−1} − η_t G_t` and `W_t = α_t W_{t−1} + κ_t S_t`. With the down-shift L, let
`A = (I − diag(α) L)⁻¹`, `P = (I − diag(β) L)⁻¹`, `C = A diag(κ) P`, `c0 = cumprod(α)`, `p = cumprod(β)`, `cS = A (κ ∘
p)`. Then

`W_t = c0_t W_0 + cS_t S_0 − Σ_{s≤t} C_ts η_s G_s`, `S_t = p_t S_0 − Σ_{s≤t} P_ts η_s G_s`.

With token steps τ, or with clipping to the norm c, η is the only gate, and what is carried is M, not W:

`M_t = M_0 − Σ_{s≤t} η_s G_s`, `W_t = W_a + τ_t min(1, c/‖M_t‖) M_t`.

Nothing is divided by a product of gates: they may be 0 and 1 exactly.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from metattt.ops.chunk import decays


class Coefficients(NamedTuple):
    """The rule over `n` tokens as linear combinations of the tensors carried in and the tokens' gradients.

    `W_t = Σ_B rows[B]_t · B − Σ_{s≤t} mix_ts G_s` is what the read row t sees; after the tokens
    `B' = Σ_A advance[B][0][A] · A − Σ_s advance[B][1]_s G_s`. A factor None means 1; slots that `advance` does not name
    are unchanged. η is inside `mix` and the gradient weights.
    """

    rows: dict[str, Tensor | None]  # [B, H, n]
    mix: Tensor | None  # [B, H, n, n]; None if no row is read
    advance: dict[str, tuple[dict[str, Tensor | None], Tensor]]  # factors [B, H], gradient weights [B, H, n]

    def before(self, base: str) -> Coefficients:
        """Row t − 1 in place of every row t; before the first one, the weights in the slot `base`."""
        assert self.mix is not None
        rows = {
            name: row if row is None else F.pad(row[..., :-1], (1, 0), value=float(name == base))
            for name, row in self.rows.items()
        }
        return self._replace(rows=rows, mix=F.pad(self.mix[..., :-1, :], (0, 0, 1, 0)))


def plain_coefficients(eta: Tensor, base: str, read: str | None) -> Coefficients:
    """The rule whose only gate is η: `C = tril(1)`. Arguments as in `general_coefficients`."""
    mix = None
    if read is not None:
        mix = eta.unsqueeze(-2).expand(*eta.shape, eta.shape[-1]).tril(0 if read == "inclusive" else -1)
    return Coefficients({base: None}, mix, {"weights": ({base: None}, eta)})


def general_coefficients(
    eta: Tensor,
    alpha: Tensor | None,
    beta: Tensor | None,
    kappa: Tensor | None,
    base: str,
    read: str | None,
    momentum: bool,
    nesterov: bool,
    decay_to_init: bool,
) -> Coefficients:
    """The rule with all its gates.

    Args:
        eta: `[B, H, n]`, fp32 or wider, as are α, β and κ.
        alpha: None: α = 1.
        beta: None: β = 0.
        kappa: None: κ = 1.
        base: the slot of W_0, the newest weights.
        read: which rows to compute, `inclusive` W_t or `exclusive` W_{t−1}; None: only the new memory.
        momentum: there is an S_0; else it is zero.
        nesterov: write `β_t S_t − η_t G_t` instead of S_t.
        decay_to_init: add `(1 − α_t)` times the weights in the slot `origin`.
    """
    alpha = torch.ones_like(eta) if alpha is None else alpha
    decay, start = decays(alpha)  # A, c0
    written = decay if kappa is None else decay * kappa.unsqueeze(-2)  # A diag(κ)
    rows = {base: start}
    if decay_to_init:
        rows["origin"] = (decay @ (1 - alpha).unsqueeze(-1)).squeeze(-1)
    advance: dict[str, tuple[dict[str, Tensor | None], Tensor]] = {}
    mix = written
    if beta is not None:
        sums, kept = decays(beta)  # P, p
        if nesterov:  # what is written is diag(β) S − diag(η) G
            ahead = written * beta.unsqueeze(-2)
            mix, written = ahead @ sums + written, ahead
        else:
            mix = written @ sums  # C
        if momentum:
            rows["momentum"] = (written @ kept.unsqueeze(-1)).squeeze(-1)  # cS
        advance["momentum"] = ({"momentum": kept[..., -1]} if momentum else {}, sums[..., -1, :] * eta)
    mix = mix * eta.unsqueeze(-2)
    advance["weights"] = ({name: row[..., -1] for name, row in rows.items()}, mix[..., -1, :])
    found = Coefficients({**rows}, None if read is None else mix, advance)
    return found.before(base) if read == "exclusive" else found


def token_step_coefficients(
    eta: Tensor, steps: Tensor | None, phase: int | Tensor, started: bool, read: str | None
) -> Coefficients:
    """The rule with token steps or clipping, before clipping.

    Args:
        eta: `[B, H, n]`.
        steps: τ `[1 or H, b]` of the places in a mini-batch; None: all 1.
        phase: place of the first token in its mini-batch; `[B]` if it differs, and then n = 1.
        started: there is an M_0; else it is zero.
        read: as in `general_coefficients`.
    """
    rows: dict[str, Tensor | None] = {"commit": None}
    mix = None
    if read is not None:
        tau = token_steps_at(steps, phase + 1 if read == "inclusive" else phase, eta.shape[-1], eta)
        mix = (tau.unsqueeze(-1) * eta.unsqueeze(-2)).tril(0 if read == "inclusive" else -1)
        if started:
            rows["update"] = tau
    return Coefficients(rows, mix, {"update": ({"update": None} if started else {}, eta)})


def token_steps_at(steps: Tensor | None, first: int | Tensor, count: int, like: Tensor) -> Tensor:
    """τ after `first`, `first + 1`, … tokens of the mini-batch, `[B or 1, H or 1, count]`; τ = 0 before its first
    token."""
    if steps is None:  # all 1, only as many as needed: a mini-batch may be longer than any call
        begin = first if isinstance(first, int) else first.unsqueeze(-1)
        places = begin + torch.arange(count, device=like.device)
        return (places > 0).to(like.dtype).view(-1, 1, count)
    steps = steps.to(like.dtype)
    if isinstance(first, int) and first > 0:
        return steps[:, first - 1 : first - 1 + count].unsqueeze(0)
    shifted = F.pad(steps, (1, 0))
    if isinstance(first, int):
        return shifted[:, first : first + count].unsqueeze(0)
    return shifted[:, first].mT.unsqueeze(-1)  # one place per sequence: count is 1


def stepped(
    weights: dict[str, Tensor],
    update: dict[str, Tensor],
    steps: Tensor | None,
    filled: int | Tensor,
    max_norm: float | None,
) -> dict[str, Tensor]:
    """W_t by name from W_a and M_t, when `filled` tokens of the mini-batch have been seen; c is `max_norm`."""
    tau = token_steps_at(steps, filled, 1, next(iter(update.values()))).squeeze(-1)
    if max_norm is not None:
        tau = tau * clip_factor(sum(x.flatten(2).square().sum(-1) for x in update.values()), max_norm)
    return {name: x + tau.view(*tau.shape, *(1,) * (x.ndim - 2)) * update[name] for name, x in weights.items()}


def clip_factor(squared_norm: Tensor | int, max_norm: float) -> Tensor:
    """`min(1, c/‖M‖)` from `‖M‖²`, with a derivative everywhere."""
    share = torch.as_tensor(squared_norm) / max_norm / max_norm  # not by c², which fp32 may be too narrow for
    return share.clamp(min=1).rsqrt()
