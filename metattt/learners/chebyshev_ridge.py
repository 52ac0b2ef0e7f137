"""Ridge regression on all tokens with a ridge that grows with the keys, by Chebyshev's iteration: Gated KalmaNet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from metattt.learners.base import Weight
from metattt.learners.chunks import Chunk
from metattt.learners.recurrent_ridge import RecurrentRidge, _applied, _by_operator, called
from metattt.modules import exact
from metattt.ops.chunk import chunk_read
from metattt.registry import register
from metattt.setting import setting
from metattt.state import Context, DataGates, Tensors
from metattt.tasks.base import Views

LEAST = 1e-6  # factor of k and v, as in the released code; of keys of unit length it leaves ‖H‖ at least its square
Operator = tuple[Tensor, Tensor, Tensor, Tensor]  # k, mix, kept and gram


@register(group="learner", name="chebyshev_ridge")
class ChebyshevRidge(RecurrentRidge, takes=("chunk", "residual", "norm")):
    """`f_t(q) = (q + blend_t (x − q)) B_t` with x near `q (H_t + λ_t)⁻¹` and `λ_t = ridge ‖H_t‖`, the Frobenius norm
    (GKA, Gated KalmaNet, arXiv 2511.21016). H and B are those of `RecurrentRidge` for keys and values that are
    both multiplied by `write_t + 1e-6`.

    x comes from n steps of Chebyshev's iteration, which starts at `2 q/(2λ + ‖H‖)`, for all tokens of a chunk together.
    It needs bounds of the eigenvalues of H, and they are from 0 to ‖H‖ whatever the keys are: the residual is at most
    `1/T(1 + 2 ridge)` of the query, for Chebyshev's polynomial T of degree n + 1 (3.2e-4 with the defaults).
    Derivatives are those of the n steps: the backward pass computes the steps again, and stores none.
    While H is 0 the answer is 0; otherwise ‖H‖ is at least 1e-12.

    Args:
        iterations: n.
        ridge: λ, relative to the norm of H.
        chunk: tokens solved together; changes memory and speed, never a result.
    """

    gates = frozenset({"write", "keep", "blend"})
    ridge_floor = 0.0
    iterations: int = setting(default=30, most=100_000)
    ridge: float = setting(default=0.02, above=0)

    def equations(self) -> list[str]:
        return [
            f"f(q_t) = {self._in_symbols('(q_t + blend_t (x_t − q_t)) B_t')}",
            f"x_t = q_t (H_t + λ_t)⁻¹, λ_t = {self.ridge:g} ‖H_t‖, ‖H‖ = √(Σ H²), by {self.iterations} steps of "
            "Chebyshev's iteration from 2 q_t/(2 λ_t + ‖H_t‖), for eigenvalues of H_t from 0 to ‖H_t‖",
            "H_t = keep_t H_{t−1} + s_t² k_tᵀ k_t, B_t = keep_t B_{t−1} + s_t² k_tᵀ v_t",
            f"s_t = write_t + {LEAST:g}",
        ]

    def weights(self, d_in: int, d_out: int) -> dict[str, Weight]:
        return {}

    def scan(self, views: Views, state: Tensors, ctx: Context, gates: DataGates) -> tuple[Tensor, Tensors]:
        """As `RecurrentRidge`; what is not written (padding, for one) stays out."""
        write = torch.where(gates.write > 0, gates.write + LEAST, 0).square()
        return super().scan(views, state, ctx, gates._replace(write=write))

    def _answer(self, part: Chunk, gram: Tensor, moment: Tensor) -> Tensor:
        """With H/‖H‖ the numbers of the iteration are constants. `‖H_t‖²` is a sum of terms that are not negative."""
        mix = part.mix
        before, between = ((part.k @ gram) * part.k).sum(-1, keepdim=True), (part.k @ part.k.mT).square()
        square = ((mix @ between) * mix).sum(-1) + 2 * part.kept * (mix @ before).squeeze(-1)
        square = square + part.kept.square() * gram.square().sum((-2, -1)).unsqueeze(-1)
        size = torch.where(square > 0, square.clamp(min=LEAST**4), 1).sqrt().unsqueeze(-1)  # [B, H, c, 1]
        operator = part.k, mix / size, part.kept / size.squeeze(-1), gram
        p = called(_Iterate)(part.q, *operator, self.ridge, self.iterations) / size
        if part.blend is not None:
            p = part.q + part.blend.unsqueeze(-1) * (p - part.q)
        return chunk_read(p, part.k, part.v, mix, part.kept, moment)


def _omegas(ridge: float, iterations: int) -> list[float]:
    """`ω ← 1/(1 − ω ρ²/4)` from 2, with `ρ = 1/(1 + 2 ridge)`."""
    found = [2.0]
    for _ in range(iterations):
        found.append(1 / (1 - found[-1] / (2 + 4 * ridge) ** 2))
    return found[1:]


def _iterates(q: Tensor, operator: Operator, ridge: float, iterations: int) -> Iterator[Tensor]:
    """`y ← ω (y − τ ((H + ridge) y − q)) + (1 − ω) y'` from `τ q`, for the iterate y' before y: 0 at the start."""
    step = 2 / (1 + 2 * ridge)
    y, before = step * q, torch.zeros_like(q)
    yield y
    for omega in _omegas(ridge, iterations):
        y, before = omega * (y - step * (_applied(y, *operator, ridge) - q)) + (1 - omega) * before, y
        yield y


class _Iterate(torch.autograd.Function):
    """The last iterate for `H_t = kept_t H_0 + Σ_s mix_ts k_s k_sᵀ` of norm 1, all tokens at once."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q: Tensor, k: Tensor, mix: Tensor, kept: Tensor, gram: Tensor, ridge: float, iterations: int) -> Tensor:
        for y in _iterates(q, (k, mix, kept, gram), ridge, iterations):  # noqa: B007
            pass
        return y

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:5])
        ctx.settings = inputs[5:]  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The steps in reverse: `a` is the derivative by an iterate, `w` that by its product with H + ridge."""
        begun, *rest = ctx.saved_tensors  # once: torch.utils.checkpoint allows no more
        operator: Operator = tuple(rest)
        ridge, iterations = ctx.settings
        step, a, later, by_q = 2 / (1 + 2 * ridge), grad, torch.zeros_like(grad), torch.zeros_like(grad)
        found = tuple(map(torch.zeros_like, operator))
        with exact(grad.device.type):
            *ys, _ = _iterates(begun, operator, ridge, iterations)
            for omega, y in zip(reversed(_omegas(ridge, iterations)), reversed(ys), strict=True):
                w = -step * omega * a
                by_q, found = by_q - w, tuple(map(torch.add, _by_operator(w, y, *operator), found))
                a, later = omega * a + _applied(w, *operator, ridge) + later, (1 - omega) * a
            return by_q + step * a, *found, None, None
