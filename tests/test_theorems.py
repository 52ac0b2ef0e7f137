"""Theorems 1 and 2 of arXiv 2407.04620 as it states them, in float64: outputs and gradients. (Its layers: `test_layer_table`,
`models/test_published`; the dual form of several layers, Appendix A: `test_drawn_compositions`.)"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from metattt.learners import KernelEstimator, Linear
from metattt.optimizers import Append, GradientDescent
from metattt.tasks import Reconstruction
from metattt.testing.specimen import Specimen, cotangent, distance, gradient_distance, gradients

BOUND = 1e-9  # relative


def descent(compute_chunk: int | None) -> Specimen:
    """Theorem 1: batch gradient descent with η = ½ on ‖·‖², which is η = 1 on our ½‖·‖², from W0 = 0."""
    rule: dict[str, Any] = {"anchor": "batch", "lr": "constant", "lr_scale": "none", "compute_chunk": compute_chunk}
    options = {"bias": False, "residual": False, "norm": False, "learn_init": False}
    return Specimen(lambda: Linear(**options), Reconstruction, lambda: GradientDescent(3, **rule), options={"output_norm": False})


ESTIMATOR = Specimen(KernelEstimator, Reconstruction, Append, options={"output_norm": False})


def softmax(score: Tensor) -> Tensor:
    """Theorem 2, the Nadaraya-Watson estimator: κ(q_t, k_s) / Σ κ(q_t, k_s) over s ≤ t, κ = exp(q·k/√d), d = 4."""
    return (score / math.sqrt(4)).masked_fill(torch.ones_like(score).triu(1).bool(), -torch.inf).softmax(-1)


@pytest.mark.parametrize(
    ("spec", "form", "weights"),
    [*((descent(chunk), form, torch.tril) for chunk in (None, 4) for form in ("primal", "dual")), (ESTIMATOR, None, softmax)],
    ids=["1-primal", "1-dual", "1-primal-chunks", "1-dual-chunks", "2"],
)
def test_theorem(spec: Specimen, form: str | None, weights: Callable[[Tensor], Tensor]) -> None:
    layer, x = spec.make(form=form), torch.randn(2, 11, 8, dtype=torch.float64, requires_grad=True)
    params = dict(layer.named_parameters())
    q, k, v = ((x @ params[f"task.{name}.weight"].T).unflatten(-1, (2, 4)).transpose(1, 2) for name in "qkv")
    expected = (weights(q @ k.mT) @ v).transpose(1, 2).flatten(2) @ params["out.weight"].T
    found, _ = layer(x)
    assert distance(found.detach(), expected.detach()) <= BOUND
    got, want = (gradients(layer, x, (y * cotangent(y)).sum()) for y in (found, expected))
    assert gradient_distance(got, want) <= BOUND and want["x"].abs().max() > 0
