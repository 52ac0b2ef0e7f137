"""Ridge regression on all tokens in a state of constant size: the Mesa layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx

from metattt.errors import check_number
from metattt.learners.base import Weight
from metattt.learners.chunks import Chunk, chunks, joined, together
from metattt.learners.non_parametric import NonParametric, cholesky
from metattt.modules import exact, transformed
from metattt.ops.chunk import chunk_read, chunk_state
from metattt.registry import register
from metattt.setting import setting
from metattt.state import Context, DataGates, Tensors
from metattt.tasks.base import Views

TOGETHER = {"cpu": 2**17}  # numbers of the queries that are solved at once: they stay in a CPU's cache
MANY = 2**24  # where each operation waits for the host


@register(group="learner", name="recurrent_ridge")
class RecurrentRidge(NonParametric, takes=("residual", "norm")):
    """`f_t(q) = q (H_t + Λ)⁻¹ B_t` with `H_t = γ_t H_{t−1} + β_t k_tᵀ k_t`, `B_t = γ_t B_{t−1} + β_t k_tᵀ v_t` (k, v
    and q are rows): the minimum over maps of `½ Σ_s ζ_ts ‖k_s W − v_s‖² + ½ tr(Wᵀ Λ W)`, `ζ_ts = β_s Π_{s<r≤t} γ_r`
    (MesaNet, arXiv 2506.05233).

    Λ is a learned diagonal for each head, `softplus(θ) + ridge_floor`. The gates γ (`keep`) and β (`write`) come from
    the rule. The state is H and B: 2 d² numbers per head, independent of the length.

    Queries of a chunk are solved together, by conjugate gradients from 0: H_t is not formed, but applied to a vector of
    each token by products of the chunk's matrices. Every token takes `iterations` steps, or fewer if its residual is at
    most `tolerance` times the length of its query. If `iterations` do not reach that, the result is the last iterate
    without a warning, as in the published model. In exact arithmetic d steps suffice.
    Derivatives are those of the exact solution (implicit differentiation): the backward pass is one more solve of the
    same accuracy, and stores no iterates.

    Args:
        solver: `conjugate_gradients`, or `exact`: a Cholesky factorisation at every token, O(d³) time and O(d²) memory
            each.
        iterations: steps of the solver.
        tolerance: of the residual, relative; 0 goes on until what is left is rounding, or `iterations` end.
        ridge: Λ at the start.
        ridge_floor: the lower bound of Λ.
        chunk: tokens solved together; changes memory and speed, never a result.
    """

    gates = frozenset({"write", "keep"})

    learn_init = False
    solver: Literal["conjugate_gradients", "exact"] = setting(default="conjugate_gradients")
    iterations: int = setting(default=30, most=100_000)
    tolerance: float = setting(default=0.0, least=0, below=1)
    ridge: float = setting(default=1.0, fixed=True)
    ridge_floor: float = setting(default=0.25, least=0)
    chunk: int = setting(default=64)

    def check_settings(self) -> None:
        super().check_settings()
        check_number("learner.ridge", self.ridge, above=self.ridge_floor, advice=", which is learner.ridge_floor")

    def equations(self) -> list[str]:
        exactly = self.solver == "exact"
        how = "solved exactly" if exactly else f"by {self.iterations} steps of conjugate gradients from 0"
        return [
            f"f(q_t) = {self._in_symbols('q_t (H_t + Λ)⁻¹ B_t')}, {how}",
            "H_t = keep_t H_{t−1} + write_t k_tᵀ k_t, B_t = keep_t B_{t−1} + write_t k_tᵀ v_t",
            f"Λ = softplus(λ) + {self.ridge_floor:g} of each head and channel; {self.ridge:g} at the start",
        ]

    def weights(self, d_in: int, d_out: int) -> dict[str, Weight]:
        start = self.ridge - self.ridge_floor
        return {"ridge": Weight((d_in,), value=start + math.log(-math.expm1(-start)), fast=False)}

    def scan(self, views: Views, state: Tensors, ctx: Context, gates: DataGates) -> tuple[Tensor, Tensors]:
        """Predictions `[B, H, T, d]`, and `gram` = H `[B, H, d, d]` and `moment` = B `[B, H, d, d_v]`."""
        batch, heads, _, width = views.k.shape
        with exact(views.k.device.type):
            gram, moment = (
                state[name] if state else gates.write.new_zeros(batch, heads, width, x.shape[-1])
                for name, x in (("gram", views.k), ("moment", views.v))
            )
            ys, most = [], TOGETHER.get(views.k.device.type, MANY) // max(1, batch * heads * self.chunk * width)
            for parts in together(chunks(views, ctx, gates, self.chunk), max(1, most)):
                grams, moments = [], []  # before every chunk
                for part in parts:
                    grams.append(gram)
                    moments.append(moment)
                    gram, moment = (
                        chunk_state(part.k, x, part.mix, part.kept, s) for x, s in ((part.k, gram), (part.v, moment))
                    )
                y = self._answer(joined(parts), torch.stack(grams, 2), torch.stack(moments, 2))
                ys.append(y.flatten(2, 3))
            y = self._wrapped(views.q, torch.cat(ys, dim=2))
        return y, {"gram": gram, "moment": moment}

    def _answer(self, part: Chunk, gram: Tensor, moment: Tensor) -> Tensor:
        """`q_t (H_t + Λ)⁻¹ B_t` of the tokens of chunks, `[B, H, chunks, c, d]`, from H and B before each of them."""
        mix = part.mix  # ζ
        ridge = F.softplus(self.slow["ridge"].to(mix.dtype))[:, None, None] + self.ridge_floor  # [H, 1, 1, d]
        if self.solver == "exact":
            outer = (part.k.unsqueeze(-1) * part.k.unsqueeze(-2)).flatten(-2)  # [..., c, d²]
            full = part.kept[..., None, None] * gram.unsqueeze(-3) + (mix @ outer).unflatten(-1, gram.shape[-2:])
            factor = cholesky(full + torch.diag_embed(ridge), "learner.ridge_floor", self.ridge_floor)
            x = torch.cholesky_solve(part.q.unsqueeze(-1), factor).squeeze(-1)
        else:
            shape = part.k.shape[:-1]
            operator = part.k, mix.expand(*shape, shape[-1]), part.kept.expand(shape)
            solve = called(_Solve)
            x = solve(part.q, *operator, gram, ridge.expand_as(part.q), self.iterations, self.tolerance)
        return chunk_read(x, part.k, part.v, mix, part.kept, moment)


def called(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply`, or `forward` itself in forward mode (`torch.func.jvp`), which a `backward` does not serve."""
    return function.forward if forward_ad._current_level >= 0 else function.apply


def _applied(x: Tensor, k: Tensor, mix: Tensor, kept: Tensor, gram: Tensor, ridge: Tensor | float) -> Tensor:
    """`(kept_t H_0 + Σ_s mix_ts k_s k_sᵀ + Λ) x_t` for a vector of every token, `[B, H, c, d]`."""
    return chunk_read(x, k, k, mix, kept, gram) + ridge * x


def _by_operator(w: Tensor, x: Tensor, k: Tensor, mix: Tensor, kept: Tensor, gram: Tensor) -> tuple[Tensor, ...]:
    """The derivatives of `Σ_t ⟨w_t, (kept_t H_0 + Σ_s mix_ts k_s k_sᵀ) x_t⟩` by k, mix, kept and gram."""
    xk, wk = x @ k.mT, w @ k.mT
    by_k = (mix * wk).mT @ x + (mix * xk).mT @ w
    return by_k, xk * wk, ((x @ gram) * w).sum(-1), (kept.unsqueeze(-1) * x).mT @ w


class _Solve(torch.autograd.Function):
    """`x_t = (kept_t H_0 + Σ_s mix_ts k_s k_sᵀ + Λ)⁻¹ q_t` by conjugate gradients, all tokens at once.

    With A the matrix and g the derivative by x, `w = A⁻¹ g` is that by q, and that by anything in A is the derivative
    of `−⟨w, A x⟩`. These are again solves and products, so that they can be differentiated.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, mix: Tensor, kept: Tensor, gram: Tensor, ridge: Tensor, iterations: int, tolerance: float
    ) -> Tensor:
        watched = tolerance > 0 and not torch.compiler.is_compiling() and not transformed()
        x, residual, direction = torch.zeros_like(q), q, q
        size = q.square().sum(-1, keepdim=True)
        goal = max(tolerance, torch.finfo(q.dtype).eps) ** 2 * size  # below it is rounding
        for _ in range(iterations):
            if watched and not bool((size > goal).any()):
                break
            image = _applied(direction, k, mix, kept, gram, ridge)
            curvature = (direction * image).sum(-1, keepdim=True)
            moving = (size > goal) & (curvature > 0)
            step = torch.where(moving, size / torch.where(moving, curvature, 1), 0)
            x, residual = x + step * direction, residual - step * image
            after = residual.square().sum(-1, keepdim=True)
            # (What has stopped keeps its direction: by a ratio that is none it would grow until it is infinite.)
            direction = torch.where(moving, residual + after / torch.where(moving, size, 1) * direction, direction)
            size = after
        return x

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:6], output)
        ctx.settings = inputs[6:]  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        k, mix, kept, gram, ridge, x = ctx.saved_tensors
        with exact(grad.device.type):
            w = _Solve.apply(grad, k, mix, kept, gram, ridge, *ctx.settings)
            return w, *_by_operator(-w, x, k, mix, kept, gram), -x * w, None, None
