"""`metattt.ops` where decays are smaller than any number, or 0. (What it computes, and its derivatives: `test_layer_table`,
`test_laws`, `optimizers/test_generalised_delta`, `mixers/test_mamba`.)"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from metattt.ops import chunk as ops


def matrix_of_products(gate: Tensor) -> Tensor:
    """`Π_{s<r≤t} g_r`, every entry by itself: `[..., n]` to `[..., n, n]`."""
    count, zero = gate.shape[-1], torch.zeros_like(gate[..., 0])
    rows = [
        torch.stack([gate[..., s + 1 : t + 1].prod(-1) if s <= t else zero for s in range(count)], -1)
        for t in range(count)
    ]
    return torch.stack(rows, -2)


@pytest.mark.parametrize("count", [1, 2, 5, 7])
def test_a_decay_of_zero(count: int) -> None:
    """Its logarithm is −∞, and no derivative is lost for it."""
    log_gate = torch.randn(2, count, dtype=torch.float64).abs().neg()
    log_gate[:, count // 2] = -torch.inf
    gate = log_gate.exp()
    for found in (ops.decays(gate), ops.decays_of_logs(log_gate)):
        torch.testing.assert_close(found, (matrix_of_products(gate), gate.cumprod(-1)))
    torch.testing.assert_close(ops.decay_matrix(2 * gate), matrix_of_products(2 * gate))  # one may grow
    log_gate.requires_grad_()
    (slope,) = torch.autograd.grad(sum(x.sum() for x in ops.decays_of_logs(log_gate)), log_gate)
    assert bool(slope.isfinite().all())


def test_decays_smaller_than_any_number() -> None:
    """Products underflow to 0, and nothing is lost beside them."""
    gate = torch.full((40,), 1e-30, dtype=torch.float64)
    gate[1::2] = 1
    for between, kept in (ops.decays(gate), ops.decays_of_logs(gate.log())):
        torch.testing.assert_close(between, matrix_of_products(gate), rtol=1e-12, atol=0)
        torch.testing.assert_close(kept, gate.cumprod(0), rtol=1e-12, atol=0)
