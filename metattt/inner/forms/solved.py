"""Online rules of a linear learner with squared loss: all tokens at once, as a triangular system."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from metattt.inner.forms.dual import PerTokenGradients, finish, scaled
from metattt.inner.tokens import Carry, Tokens
from metattt.learners.fast_weights import FastWeights, Site, matmul
from metattt.optimizers.base import Gates

if TYPE_CHECKING:
    from metattt.inner.loop import Work


def chunk(
    work: Work, tokens: Tokens, carry: Carry, phase: int | Tensor, read: str | None
) -> tuple[Tensor | None, Carry]:
    """See `CHUNKS`."""
    return finish(work, tokens, carry, phase, read, work.rule.current(carry, phase), solve(work, tokens, carry, phase))


def solve(work: Work, tokens: Tokens, carry: Carry, phase: int | Tensor) -> PerTokenGradients:
    """Gradients at the newest weights, with errors `E_s = k_s W_{s−1} − v_s` and `G_s = k_sᵀ E_s`:

    `(I + T) E = R`, `T_sr = m_s mix_{s−1,r} (k_s·k_r)`, `R_s = m_s k_s (Σ_B rows_B(s−1) B) − v_s`, with m = α for
    gradients at `α_s W_{s−1}` and 1 otherwise: the UT transform of DeltaNet (arXiv 2406.06484). With a factor c of the
    weight and one of the bias (`Learner.step_scale`), `k_s·k_r` stands for `c_W k_s·k_r + c_b`.
    """
    assert work.learner.linear_map is not None
    weight, bias = work.learner.linear_map
    how = work.rule.coefficients(Gates(*tokens[3:]), phase, carry, "exclusive")
    k = tokens.k
    right = torch.zeros_like(tokens.v)
    for base, row in how.rows.items():
        z = FastWeights(carry[base], {}, work.operand).linear(k, weight, bias)
        right = right + (z if row is None else row.unsqueeze(-1) * z)
    scales = work.learner.step_scales
    gram = scaled(matmul(k, k.mT, work.operand), scales.get(weight)) + (0 if bias is None else scales.get(bias, 1))
    assert how.mix is not None
    system = how.mix * gram
    if work.rule.gradient_at == "decayed" and tokens.alpha is not None:
        system, right = system * tokens.alpha.unsqueeze(-1), right * tokens.alpha.unsqueeze(-1)
    system = system + torch.eye(k.shape[2], dtype=k.dtype, device=k.device)
    errors = torch.linalg.solve_triangular(system, right - tokens.v, upper=False, unitriangular=True)
    if work.plan.outer == "first_order":
        k, errors = k.detach(), errors.detach()
    return PerTokenGradients([Site(weight, bias, k, False, False)], [errors], work.operand, scales)
