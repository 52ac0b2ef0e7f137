"""`metattt.ops` against plain loops over tokens, in float64, with decays of 0 and 1 and two derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from metattt.ops import channel_decays
from metattt.ops import chunk as ops

LENGTHS = (1, 2, 5, 7)  # tokens; but for 1 and 2 no powers of two


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def gates(*shape: int, dim: int = -1) -> Tensor:
    """Decays between 0 and 1, with a 0 in the middle and a 1 at the end of an axis."""
    gate = torch.rand(*shape, dtype=torch.float64)
    gate.select(dim, shape[dim] // 2).zero_()
    gate.select(dim, shape[dim] - 1).fill_(1)
    return gate


def assert_same(call: Callable[..., Sequence[Tensor]], loop: Callable[..., Sequence[Tensor]], *given: Tensor) -> None:
    """Results, and first and second derivatives along random directions."""
    given = tuple(x.clone().requires_grad_() for x in given)
    runs: list[list[Tensor]] = []
    for function in (call, loop):
        torch.manual_seed(1)
        found = list(function(*given))
        total = torch.stack([(x * random(*x.shape)).sum() for x in found]).sum()
        slopes = torch.autograd.grad(total, given, create_graph=True, materialize_grads=True)
        slope = torch.stack([(x * random(*x.shape)).sum() for x in (*slopes, *given)]).sum()
        again = torch.autograd.grad(slope, given)
        runs.append([*found, *slopes, *again])
    torch.testing.assert_close(*runs, rtol=1e-10, atol=1e-10)


def matrix_of_products(gate: Tensor) -> Tensor:
    """`Π_{s<r≤t} g_r`, every entry by itself: `[..., n]` to `[..., n, n]`."""
    count, zero = gate.shape[-1], torch.zeros_like(gate[..., 0])
    rows = [
        torch.stack([gate[..., s + 1 : t + 1].prod(-1) if s <= t else zero for s in range(count)], -1)
        for t in range(count)
    ]
    return torch.stack(rows, -2)


def products(gate: Tensor) -> tuple[Tensor, Tensor]:
    """Between two tokens, and from before the first one."""
    after = [gate[..., : t + 1].prod(-1) for t in range(gate.shape[-1])]
    return matrix_of_products(gate), torch.stack(after, -1)


@pytest.mark.parametrize("count", LENGTHS)
def test_decays(count: int) -> None:
    assert_same(ops.decays, products, gates(2, 3, count))
    growing = 2 * gates(count)
    assert_same(lambda gate: (ops.decay_matrix(gate),), lambda gate: products(gate)[:1], growing)


@pytest.mark.parametrize("count", LENGTHS)
def test_decays_of_logs(count: int) -> None:
    log_gate = random(2, count).abs().neg()
    assert_same(ops.decays_of_logs, lambda log: products(log.exp()), log_gate)
    log_gate[:, count // 2] = -torch.inf
    torch.testing.assert_close(ops.decays_of_logs(log_gate), products(log_gate.exp()))
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


@pytest.mark.parametrize("count", [*LENGTHS, 33])
def test_scores_with_a_decay_for_every_channel(count: int) -> None:
    """Strictly lower triangular scores of rows before and after the decay of their token with two kinds of columns."""

    def at_once(p: Tensor, q: Tensor, k: Tensor, b: Tensor, decay: Tensor) -> list[Tensor]:
        rows = [channel_decays.Rows(p, True), channel_decays.Rows(q, False)]
        found = channel_decays.decayed_scores(rows, [k, b], decay, decay.dtype)
        assert found.kept is not None
        return [*found.scores[0], *found.scores[1], *found.rows, *found.columns, found.kept.squeeze(1)]

    def entry_by_entry(p: Tensor, q: Tensor, k: Tensor, b: Tensor, decay: Tensor) -> list[Tensor]:
        between = matrix_of_products(decay.mT)  # [B, d, n, n]
        from_start = torch.stack([decay[:, : t + 1].prod(1) for t in range(count)], 1)
        before = torch.cat([torch.ones_like(decay[:, :1]), from_start[:, :-1]], 1)
        shifted = torch.cat([torch.zeros_like(between[:, :, :1]), between[:, :, :-1]], 2)
        scores = [
            torch.einsum("btc,bsc,bcts->bts", row, column, mix).tril(-1)
            for row, mix in ((p, shifted), (q, between))
            for column in (k, b)
        ]
        left = between[:, :, -1].mT
        return [*scores, p * before, q * from_start, k * left, b * left, from_start[:, -1]]

    given = [random(2, count, 3) for _ in range(4)]
    assert_same(at_once, entry_by_entry, *given, gates(2, count, 3, dim=1))
