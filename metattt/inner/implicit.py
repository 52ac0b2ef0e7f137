"""The outer gradient through the fixed point of an inner loop that has converged (`layer.outer=implicit`).

One pass over the tokens of a call takes W to `U(W; θ)`; θ is everything else: k, v, gates, the task's parameters, slow
weights, and W0 where the rule pulls to it. At the fixed point `W* = U(W*; θ)`, so (arXiv 1909.04630, Lemma 2, for any
θ)

`dW*/dθ = H⁻¹ ∂U/∂θ`, `H = I − ∂U/∂W`.

For gradient descent on all tokens H is `(1 − Πα) I + Σ_s w_s ∇²ℓ_s(W*)`, symmetric, and positive definite where the
inner problem is strictly convex: then conjugate gradients solve `H u = dL/dW*`, one vector–Jacobian product of a single
pass an iteration, and memory does not grow with the number of inner steps. The start of the loop has no influence on
W*, and no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.inner.execution import in_groups
from metattt.inner.final import steps
from metattt.inner.parts import Parts
from metattt.inner.tokens import Block, Tokens
from metattt.memory import Memory
from metattt.state import Tensors

CONVERGED = 1e-3  # the length of the last step by that of the first, at most
ITERATIONS = 1000  # of conjugate gradients, at most


def tolerance(dtype: torch.dtype) -> float:
    """‖H u − g‖/‖g‖ at which conjugate gradients stop: 2.4e-5 in float32, 3.7e-11 in float64."""
    return float(torch.finfo(dtype).eps ** (2 / 3))


def converged(
    loop: Parts,
    tokens: Tokens,
    memory: Memory,
    blocks: Sequence[Block],
    is_filled: Tensor | None,
    after: Tensor,
) -> tuple[Tensors, Memory]:
    """W* with its implicit derivative, and the memory after the inner steps, which has none.

    Raises:
        MetaTTTError: the steps did not converge; or in the backward pass, the inner problem is not strictly convex.
    """
    filled = after % loop.rule.mini_batch_size
    with torch.no_grad():
        passes = steps(loop, tokens, memory, blocks, is_filled, after)
        start = last = loop.rule.current(next(passes), filled)
        sizes: list[Tensor] = []  # of the steps, [B, H]
        left = memory
        for left in passes:
            now = loop.rule.current(left, filled)
            sizes, last = [*sizes[:1], _norm([now[n] - last[n] for n in now])], now
    if not torch.is_grad_enabled():
        return last, left
    if not bool((sizes[-1] <= CONVERGED * sizes[0].clamp(min=torch.finfo(sizes[0].dtype).tiny)).all()):
        share = (sizes[-1] / sizes[0]).max().item()
        raise MetaTTTError(
            f"layer.outer=implicit needs inner steps that converge, and the last of optimizer.steps={loop.rule.steps} "
            "is "
            f"{share:.2g} of the first: it must be {CONVERGED:g} at most; raise optimizer.steps, or set "
            "layer.outer=exact"
        )
    names = list(start)
    at = {name: last[name].detach().requires_grad_() for name in names}
    entering = {slot: memory[slot] for slot in ("origin",) if slot in memory} | {"anchor": at}
    after_one = in_groups(loop, tokens, entering, blocks, False)[1]
    stepped = loop.rule.current(after_one, filled)
    points = [at[name] for name in names]
    gaps = [at[name] - stepped[name] for name in names]  # W − U(W)

    def product(u: Sequence[Tensor]) -> Sequence[Tensor]:
        return torch.autograd.grad(gaps, points, u, retain_graph=True, allow_unused=True, materialize_grads=True)

    found = _FixedPoint.apply(product, *[last[name] for name in names], *gaps)
    return dict(zip(names, found, strict=True)), left


class _FixedPoint(torch.autograd.Function):
    """W*, whose cotangent g becomes `−H⁻¹ g` of the gaps `W − U(W; θ)`."""

    @staticmethod
    def forward(
        ctx: Any, product: Callable[[Sequence[Tensor]], Sequence[Tensor]], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.product, ctx.count = product, len(tensors) // 2
        return tuple(x.clone() for x in tensors[: ctx.count])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        solution = conjugate_gradients(ctx.product, cotangents)
        return (None, *[None] * ctx.count, *[-u for u in solution])


def conjugate_gradients(
    product: Callable[[Sequence[Tensor]], Sequence[Tensor]], right: Sequence[Tensor]
) -> list[Tensor]:
    """`H⁻¹ right` for the problem of every sequence and head, up to `tolerance` of ‖right‖.

    Args:
        product: `H u`, for tensors like those of `right`; H is symmetric.
        right: `[B, H, ...]` each.

    Raises:
        MetaTTTError: H is not positive definite, or the iterations do not end.
    """
    shapes = [x.shape[2:] for x in right]
    g = _joined(right)
    bound = tolerance(g.dtype) * _norm([g])
    u, r = torch.zeros_like(g), g
    p, squared = r, (r * r).sum(-1)
    for _ in range(ITERATIONS):
        if bool((squared.sqrt() <= bound).all()):
            return _apart(u, shapes)
        moved = _joined(product(_apart(p, shapes)))
        curvature = (p * moved).sum(-1)
        open_ = squared.sqrt() > bound
        if not bool((curvature[open_] > 0).all()):
            break
        length = torch.where(open_, squared / curvature, 0).unsqueeze(-1)
        u, r = u + length * p, r - length * moved
        after = (r * r).sum(-1)
        p, squared = r + torch.where(open_, after / squared, 0).unsqueeze(-1) * p, after
    raise MetaTTTError(
        "layer.outer=implicit: conjugate gradients found no solution, so the inner problem is not strictly convex "
        "here: "
        "give it more tokens than the learner has inputs, optimizer=momentum with optimizer.decay_to_init=true, or "
        "layer.outer=exact"
    )


def _norm(weights: Sequence[Tensor]) -> Tensor:
    """‖W‖ of every sequence and head, `[B, H]`."""
    return _joined(weights).square().sum(-1).sqrt()


def _joined(weights: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.flatten(2) for x in weights], -1)


def _apart(joined: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    parts = joined.split([shape.numel() for shape in shapes], -1)
    return [part.unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True)]
