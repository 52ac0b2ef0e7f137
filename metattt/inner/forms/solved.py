"""Online rules of a linear learner in closed form: a triangular system for the squared loss, a sum for the dot
product."""

from __future__ import annotations

import torch
from torch import Tensor

from metattt.inner.forms.dual import PerTokenGradients, finish
from metattt.inner.parts import Parts
from metattt.inner.tokens import Tokens, scaled
from metattt.learners.fast_weights import FastWeights, WeightUse
from metattt.memory import Memory, newest
from metattt.ops.chunk import matmul, solve_unit_lower
from metattt.ops.linear_rule import Coefficients


def chunk(
    loop: Parts, tokens: Tokens, memory: Memory, phase: int | Tensor, read: str | None
) -> tuple[Tensor | None, Memory]:
    """See `FORMS`."""
    how = loop.rule.coefficients(tokens.gates, phase, memory, read or "inclusive")
    before = how if read == "exclusive" else how.before(newest(memory))
    gradients = solve(loop, tokens, memory, before)
    return finish(loop, tokens, memory, phase, read, loop.rule.current(memory, phase), gradients, how)


def solve(loop: Parts, tokens: Tokens, memory: Memory, how: Coefficients) -> PerTokenGradients:
    """Gradients at the newest weights, with errors `E_s = p_s W_{s−1} − v_s` and `G_s = k_sᵀ E_s`; p is k where no
    erase view is given. `how`: what a query before token s reads.

    `(I + T) E = R`, `T_sr = m_s mix_{s−1,r} (p_s·k_r)`, `R_s = m_s p_s (Σ_B rows_B(s−1) B) − v_s`, with m = α for
    gradients at `α_s W_{s−1}` and 1 otherwise: the UT transform of DeltaNet (arXiv 2406.06484). Where k is erased in
    another direction b, `G_s = b_sᵀ F_s − k_sᵀ v_s` with `F_s = p_s W_{s−1}`, so `T` has `p·b` and R gains
    `m_s mix_{s−1,r} (p_s·k_r) v_r` instead of −v. With a factor c of the weight and one of the bias
    (`Learner.step_scale`), `p_s·k_r` stands for `c_W p_s·k_r + c_b`.
    """
    assert loop.learner.linear_map is not None
    assert how.mix is not None
    (weight, bias), scales = loop.learner.linear_map, loop.learner.step_scales
    k, v, _, p, b, _ = tokens.views
    if loop.plan.linear == "dot":  # the gradient −kᵀv of −⟨v, kW⟩ does not depend on the weights
        pairs = [(k, -v)]
    else:
        before, rows, alpha = how.mix, how.rows, tokens.gates.alpha if loop.rule.gradient_at == "decayed" else None
        count = k.shape[2] // tokens.views.q.shape[2]
        if loop.task.together and count > 1:  # all pairs of a token meet the weights before its first one
            before = before[..., ::count, :].repeat_interleave(count, -2)
            rows = {base: x if x is None else x[..., ::count].repeat_interleave(count, -1) for base, x in rows.items()}
            alpha = None if alpha is None else alpha[..., ::count].repeat_interleave(count, -1)
        asked = k if p is None else p
        right = torch.zeros_like(v)
        for base, row in rows.items():
            z = FastWeights(memory[base], {}, loop.matmul_dtype).linear(asked, weight, bias)
            right = right + (z if row is None else row.unsqueeze(-1) * z)
        if alpha is not None:
            before, right = before * alpha.unsqueeze(-1), right * alpha.unsqueeze(-1)
        factor, own = scales.get(weight), 0 if bias is None else scales.get(bias, 1)
        gram = scaled(matmul(asked, k.mT, loop.matmul_dtype), factor) + own
        if b is None:
            pairs = [(k, solve_unit_lower(before * gram, right - v))]
        else:
            erased = scaled(matmul(asked, b.mT, loop.matmul_dtype), factor)
            right = right + matmul(before * gram, v, loop.matmul_dtype)
            pairs = [(b, solve_unit_lower(before * erased, right)), (k, -v)]
    uses, deltas = [], []
    for left, delta in pairs:
        constant = loop.plan.outer == "first_order"
        uses.append(WeightUse(weight, bias, left.detach() if constant else left, False, False))
        deltas.append(delta.detach() if constant else delta)
    return PerTokenGradients(uses, deltas, loop.matmul_dtype, scales)
