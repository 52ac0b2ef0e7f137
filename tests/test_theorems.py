"""Theorems of the paper as it states them, in float64: outputs and gradients. (Its layers: `test_layer_table`,
`models/test_published`.)

Numbers of theorems, equations and sections are those of arXiv 2407.04620.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from metattt.layer import TTTLayer
from metattt.learners import MLP, KernelEstimator, Learner, Linear
from metattt.optimizers import Append, GradientDescent, InnerOptimizer
from metattt.tasks import Reconstruction
from metattt.testing.specimen import Specimen, cotangent, distance, gradient_distance, gradients

BOUND = 1e-9  # relative
Params = dict[str, Tensor]
Sequence = Callable[[Params, Tensor, int], Tensor]
"""A reference for one sequence and one head: parameters, tokens `[T, D]` and the head's number, to predictions
`[T, d]`."""


def build(
    learner: Callable[[], Learner],
    optimizer: Callable[[], InnerOptimizer],
    **options: Any,
) -> TTTLayer:
    return Specimen(learner, Reconstruction, optimizer, options={"output_norm": False, **options}).make()


def assert_equals(layer: TTTLayer, reference: Sequence) -> None:
    """The layer against `reference` for every sequence and head, heads side by side, then the output projection."""
    x = torch.randn(2, 11, layer.dim, dtype=torch.float64, requires_grad=True)
    params = dict(layer.named_parameters())
    merged = [torch.cat([reference(params, row, head) for head in range(layer.num_heads)], dim=-1) for row in x]
    expected = torch.stack(merged) @ params["out.weight"].T
    found, _ = layer(x)
    assert distance(found.detach(), expected.detach()) <= BOUND
    got, want = (gradients(layer, x, (y * cotangent(y)).sum()) for y in (found, expected))
    assert gradient_distance(got, want) <= BOUND
    assert want["x"].abs().max() > 0


def view(params: Params, name: str, x: Tensor, head: int) -> Tensor:
    """`[T, D]` to one head of one view, `[T, d]`."""
    weight = params[f"task.{name}.weight"]
    width = weight.shape[0] // 2
    return x @ weight[head * width : (head + 1) * width].T


def step_size(params: Params, x: Tensor, head: int) -> Tensor:
    """η of every token, `[T]`: Sec. 2.7, divided by the head width as the published models do."""
    logit = x @ params["optimizer.lr_weight"][head] + params["optimizer.lr_bias"][head]
    return torch.sigmoid(logit) / (x.shape[1] // 2)


# -- Theorems 1 and 2 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compute_chunk", [None, 4])
@pytest.mark.parametrize("form", ["primal", "dual"])
def test_theorem_1_linear_attention(form: str, compute_chunk: int | None) -> None:
    """Batch gradient descent with η = ½ on ‖·‖², which is η = 1 on our ½‖·‖², from W0 = 0."""

    def linear_attention(params: Params, x: Tensor, head: int) -> Tensor:
        q, k, v = (view(params, name, x, head) for name in "qkv")
        return torch.stack(
            [sum(((q[t] @ k[s]) * v[s] for s in range(t + 1)), torch.zeros_like(v[0])) for t in range(len(x))]
        )

    rule = {"anchor": "batch", "lr": "constant", "lr_scale": "none", "compute_chunk": compute_chunk}
    learner = lambda: Linear(bias=False, residual=False, norm=False, learn_init=False)  # noqa: E731
    assert_equals(build(learner, lambda: GradientDescent(3, **rule), form=form), linear_attention)


def test_theorem_2_softmax_attention() -> None:
    """The Nadaraya-Watson estimator: Σ κ(q_t, k_s) v_s / Σ κ(q_t, k_s) over s ≤ t, κ = exp(q·k/√d)."""

    def estimate(params: Params, x: Tensor, head: int) -> Tensor:
        q, k, v = (view(params, name, x, head) for name in "qkv")
        weights = [torch.exp(k[: t + 1] @ q[t] / math.sqrt(q.shape[1])) for t in range(len(x))]
        return torch.stack([(w / w.sum()) @ v[: len(w)] for w in weights])

    assert_equals(build(KernelEstimator, Append), estimate)


# -- Appendix A --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["primal", "dual"])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_appendix_a_dual_form_of_k_layers(depth: int, form: str) -> None:
    """X_{k+1} = σ(X_k W_k) in matrix products. (Token by token: `oracle_parts.mlp`.)"""
    size = 4

    def forward_and_deltas(weights: list[Tensor], k: Tensor, v: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        inputs, z = [k], []
        for i, w in enumerate(weights):
            z.append(inputs[i] @ w)
            inputs.append(torch.tanh(z[i]))
        deltas = [z[-1] - v]  # ∂ ½‖z_K − v‖²
        for i in reversed(range(depth - 1)):
            deltas.insert(0, (deltas[0] @ weights[i + 1].T) * (1 - torch.tanh(z[i]) ** 2))
        return inputs[:depth], deltas

    def by_matrix(params: Params, x: Tensor, head: int) -> Tensor:
        q, k, v = (view(params, name, x, head) for name in "qkv")
        eta = step_size(params, x, head)
        weights = [params[f"learner.init.w{i + 1}"][head] for i in range(depth)]
        parts = []
        for start in range(0, len(x), size):
            now = slice(start, start + size)
            inputs, deltas = forward_and_deltas(weights, k[now], v[now])
            read = q[now]
            for i, w in enumerate(weights):
                z = read @ w - torch.tril(read @ inputs[i].T) @ (eta[now, None] * deltas[i])
                read = z if i == depth - 1 else torch.tanh(z)
            parts.append(read)
            weights = [w - a.T @ (eta[now, None] * d) for w, a, d in zip(weights, inputs, deltas, strict=True)]
        return torch.cat(parts)

    def learner() -> Learner:
        return MLP(depth, expansion=1.5, activation="tanh", bias=False, residual=False, norm=False)

    layer = build(learner, lambda: GradientDescent(size), form=form)
    assert_equals(layer, by_matrix)
