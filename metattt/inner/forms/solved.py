"""Online rules of a linear learner, exactly: squared loss as a triangular system over all tokens, the dot product
without one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from metattt.inner.forms import channels
from metattt.inner.forms.dual import PerTokenGradients, finish, scaled
from metattt.inner.tokens import Tokens
from metattt.learners.fast_weights import FastWeights, WeightUse
from metattt.memory import Memory
from metattt.ops.chunk import matmul, solve_unit_lower

if TYPE_CHECKING:
    from metattt.inner.loop import InnerLoop


def chunk(
    loop: InnerLoop, tokens: Tokens, memory: Memory, phase: int | Tensor, read: str | None
) -> tuple[Tensor | None, Memory]:
    """See `FORMS`."""
    if tokens.gates.decay is not None:
        return channels.chunk(loop, tokens, memory, read)
    gradients = solve(loop, tokens, memory, phase)
    return finish(loop, tokens, memory, phase, read, loop.rule.current(memory, phase), gradients)


def solve(loop: InnerLoop, tokens: Tokens, memory: Memory, phase: int | Tensor) -> PerTokenGradients:
    """Gradients at the newest weights, with errors `E_s = p_s W_{s−1} − v_s` and `G_s = k_sᵀ E_s`; p is k where no
    erase view is given.

    `(I + T) E = R`, `T_sr = m_s mix_{s−1,r} (p_s·k_r)`, `R_s = m_s p_s (Σ_B rows_B(s−1) B) − v_s`, with m = α for
    gradients at `α_s W_{s−1}` and 1 otherwise: the UT transform of DeltaNet (arXiv 2406.06484). Where k is erased in
    another direction b, `G_s = b_sᵀ F_s − k_sᵀ v_s` with `F_s = p_s W_{s−1}`, so `T` has `p·b` and R gains
    `m_s mix_{s−1,r} (p_s·k_r) v_r` instead of −v. With a factor c of the weight and one of the bias
    (`Learner.step_scale`), `p_s·k_r` stands for `c_W p_s·k_r + c_b`.
    """
    assert loop.learner.linear_map is not None
    weight, bias = loop.learner.linear_map
    k, v, _, p, b, _ = tokens.views
    if loop.plan.linear == "dot":  # the gradient −kᵀv of −⟨v, kW⟩ does not depend on the weights
        return _gradients(loop, (k, -v))
    how = loop.rule.coefficients(tokens.gates, phase, memory, "exclusive")
    assert how.mix is not None
    before, rows, alpha = how.mix, how.rows, tokens.gates.alpha if loop.rule.gradient_at == "decayed" else None
    pairs = k.shape[2] // tokens.views.q.shape[2]
    if loop.task.together and pairs > 1:  # all pairs of a token meet the weights before its first one
        before = before[..., ::pairs, :].repeat_interleave(pairs, -2)
        rows = {
            base: None if row is None else row[..., ::pairs].repeat_interleave(pairs, -1) for base, row in rows.items()
        }
        alpha = None if alpha is None else alpha[..., ::pairs].repeat_interleave(pairs, -1)
    asked = k if p is None else p
    right = torch.zeros_like(v)
    for base, row in rows.items():
        z = FastWeights(memory[base], {}, loop.matmul_dtype).linear(asked, weight, bias)
        right = right + (z if row is None else row.unsqueeze(-1) * z)
    if alpha is not None:
        before, right = before * alpha.unsqueeze(-1), right * alpha.unsqueeze(-1)
    scales = loop.learner.step_scales
    factor, own = scales.get(weight), 0 if bias is None else scales.get(bias, 1)
    gram = scaled(matmul(asked, k.mT, loop.matmul_dtype), factor) + own
    if b is None:
        return _gradients(loop, (k, solve_unit_lower(before * gram, right - v)))
    erased = scaled(matmul(asked, b.mT, loop.matmul_dtype), factor)
    made = solve_unit_lower(before * erased, right + matmul(before * gram, v, loop.matmul_dtype))
    return _gradients(loop, (b, made), (k, -v))


def _gradients(loop: InnerLoop, *pairs: tuple[Tensor, Tensor]) -> PerTokenGradients:
    """`G_s = Σ aᵀ δ` over pairs of `[B, H, n, ·]`."""
    assert loop.learner.linear_map is not None
    weight, bias = loop.learner.linear_map
    if loop.plan.outer == "first_order":
        pairs = tuple((a.detach(), delta.detach()) for a, delta in pairs)
    uses = [WeightUse(weight, bias, a, False, False) for a, _ in pairs]
    return PerTokenGradients(uses, [delta for _, delta in pairs], loop.matmul_dtype, loop.learner.step_scales)
