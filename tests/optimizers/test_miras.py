"""MIRAS: losses besides the squared error, and retentions as mirror descent, where numbers are extreme. (What they compute:
`oracle`, `layer_references_miras`.)"""

from __future__ import annotations

import pytest
import torch

from metattt.layer import TTTLayer
from metattt.learners import MLP
from metattt.optimizers import MirrorDescent
from metattt.tasks import Reconstruction
from metattt.tasks.losses import IN_SYMBOLS, loss_per_token
from metattt.testing.specimen import run


@pytest.mark.parametrize("size", [0.0, 1e-12, 1e-3, 1e6])
@pytest.mark.parametrize("name", [name for name in IN_SYMBOLS if name != "squared"])
def test_derivatives_are_finite_near_zero_and_far_away(name: str, size: float) -> None:
    for dtype in (torch.float32, torch.float64):
        v, error = torch.randn(1, 2, 5, 4, dtype=dtype), (size * torch.randn(1, 2, 5, 4, dtype=dtype)).requires_grad_()
        delta = torch.ones(1, 2, 5, dtype=dtype, requires_grad=True)
        loss = loss_per_token(name, v + error, v, 1.0, delta)
        (first,) = torch.autograd.grad(loss.sum(), error, create_graph=True)
        total = first.square().sum() + loss.sum()
        second = torch.autograd.grad(total, [error, delta], allow_unused=True, materialize_grads=True)
        assert all(bool(x.isfinite().all()) for x in (loss, first, *second))


def test_weights_of_zero_can_be_kept() -> None:
    layer = TTTLayer(8, 2, Reconstruction(), MLP(), MirrorDescent(4)).double()  # biases start at zero
    grads = run(layer, torch.randn(2, 11, 8, dtype=torch.float64), grads=True).grads
    assert all(bool(g.isfinite().all()) for g in grads.values())
