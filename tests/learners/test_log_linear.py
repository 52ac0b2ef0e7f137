"""Log-linear attention: its buckets, any chunks and cuts, and the linear attention that it is at equal weights."""

from __future__ import annotations

from typing import Any

import layer_references_mesa as references
import pytest
import torch
from torch import Tensor

import metattt
from metattt.errors import MetaTTTError
from metattt.learners import LogLinear
from metattt.learners.log_linear import level
from metattt.state import Context, DataGates, Tensors
from metattt.tasks.base import Views
from metattt.testing import LearnerConformance
from metattt.testing.specimen import compare, gradient_distance, randomize, run

DOUBLE = torch.float64
COUNT, WIDTH, LEVELS = 70, 4, 9


def given(count: int = COUNT, batch: int = 2, levels: int = LEVELS, low: float = 0.5) -> tuple[Views, DataGates]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.rand(batch, 2, count, *shape, generator=generator, dtype=DOUBLE)

    k, v, q = (random(WIDTH) - 0.5 for _ in range(3))
    k = k / k.norm(dim=-1, keepdim=True)
    return Views(k, v, q), DataGates(random(), low + (1 - low) * random(), random(levels) + 0.1)


def scan(
    learner: LogLinear, views: Views, gates: DataGates, state: Tensors | None = None, start: int = 0, **flags: Any
) -> tuple[Tensor, Tensors]:
    steps = torch.arange(views.k.shape[2]).expand(views.k.shape[0], -1) + start
    ctx = Context(flags.get("positions", steps), flags.get("valid"), flags.get("first"), 1)
    return learner.scan(views, state or {}, ctx, gates.masked(ctx.valid))


def expected(views: Views, gates: DataGates, update: str) -> Tensor:
    assert gates.keep is not None and gates.levels is not None
    rows = references.log_linear(
        views.q, views.k, views.v, gates.write, gates.keep, gates.levels, delta=update == "delta"
    )
    return torch.stack(rows, 2)


def part(views: Views, gates: DataGates, piece: Any) -> tuple[Views, DataGates]:
    keep, levels = gates.keep, gates.levels
    assert keep is not None and levels is not None
    return Views(*(x[:, :, piece] for x in views[:3])), DataGates(
        gates.write[:, :, piece], keep[:, :, piece], levels[:, :, piece]
    )


# -- the laws ----------------------------------------------------------------------------------------------------------


class TestSum(LearnerConformance):
    make = staticmethod(lambda: LogLinear(chunk=3))


class TestDelta(LearnerConformance):
    make = staticmethod(lambda: LogLinear("delta", chunk=4, residual=True, norm=True))


# -- buckets -----------------------------------------------------------------------------------------------------------


def test_buckets_are_those_of_a_fenwick_tree() -> None:
    """Level ℓ of token t, as published: `t mod 2^ℓ ≥ 2^(ℓ−1)`, and the 2^(ℓ−1) tokens before `t − t mod 2^(ℓ−1)`."""
    at = torch.arange(64)
    found = level(at.unsqueeze(1), at, 9)
    for t in range(64):
        for number in range(1, 8):
            half = 2 ** (number - 1)
            end = t - t % half
            bucket = range(end - half, end) if t % (2 * half) >= half else range(0)
            assert (found[t, :t] == number).nonzero().flatten().tolist() == list(bucket)
        assert found[t, t] == 0
        for number, bucket in enumerate(references.buckets(t)):
            assert all(found[t, s] == number for s in bucket)
    assert torch.equal(level(at.unsqueeze(1), at, 4), found.clamp(max=3))


@pytest.mark.parametrize("update", ["sum", "delta"])
@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 100])
@pytest.mark.parametrize("levels", [LEVELS, 4, 2])
def test_any_chunk_gives_the_published_sums(update: Any, chunk: int, levels: int) -> None:
    views, gates = given(levels=levels)
    y, _ = scan(LogLinear(update, chunk), views, gates)
    torch.testing.assert_close(y, expected(views, gates, update), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("update", ["sum", "delta"])
def test_gradients_are_those_of_the_plain_loop(update: Any) -> None:
    found = []
    for function in (lambda v, g: scan(LogLinear(update, 8), v, g)[0], lambda v, g: expected(v, g, update)):
        views, gates = given(count=23, levels=4)
        leaves = {str(i): x.requires_grad_() for i, x in enumerate((*views, *gates)) if x is not None}
        y = function(views, gates)
        found.append(dict(zip(leaves, torch.autograd.grad(y.sin().sum(), list(leaves.values())), strict=True)))
    assert gradient_distance(*({"x": torch.ones(1, dtype=DOUBLE), **one} for one in found)) < 1e-11


@pytest.mark.parametrize("update", ["sum", "delta"])
def test_any_cut_gives_the_same_outputs_and_state(update: Any) -> None:
    views, gates = given()
    learner = LogLinear(update, 16)
    whole, last = scan(learner, views, gates)
    for cuts in ([1, 2, 3, 4, 40], [31, 32, 33], [63, 64, 65], list(range(1, COUNT))):
        state: Tensors = {}
        ys = []
        for start, end in zip([0, *cuts], [*cuts, COUNT], strict=True):
            y, state = scan(learner, *part(views, gates, slice(start, end)), state, start)
            ys.append(y)
        torch.testing.assert_close(torch.cat(ys, 2), whole, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(state["levels"], last["levels"], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("update", ["sum", "delta"])
def test_the_memories_are_those_of_the_bits_that_are_set(update: Any) -> None:
    views, gates = given(batch=1)
    learner = LogLinear(update, 16)
    for count in (1, 2, 5, 32, 37, 64, 70):
        memories = scan(learner, *part(views, gates, slice(0, count)))[1]["levels"]
        held = [bool(memories[:, :, i].any()) for i in range(LEVELS - 1)]
        assert held == [bool(count >> i & 1) for i in range(LEVELS - 1)]


@pytest.mark.parametrize("update", ["sum", "delta"])
def test_documents_that_start_at_different_places_and_padding(update: Any) -> None:
    """Three rows: documents at 0, 5 and 37; one from the call before that goes on for 20 tokens; padding at the end."""
    views, gates = given(batch=3)
    learner = LogLinear(update, 16)
    before = 13
    old, old_gates = part(views, gates, slice(0, before))
    _, state = scan(learner, old, old_gates)
    new, new_gates = part(views, gates, slice(before, COUNT))
    count = COUNT - before
    first = torch.zeros(3, count, dtype=torch.bool)
    first[0, 0] = first[0, 5] = first[0, 37] = first[1, 20] = True
    valid = torch.ones(3, count, dtype=torch.bool)
    valid[2, 9:] = False
    steps = torch.arange(count).expand(3, -1)
    start = torch.where(first, steps, -1).cummax(1).values
    positions = torch.where(start < 0, steps + before, steps - start)
    y, after = scan(learner, new, new_gates, state, positions=positions, first=first, valid=valid)

    def alone(row: int, begin: int, end: int) -> tuple[Tensor, Tensors]:
        rows = Views(*(x[row : row + 1] for x in views[:3])), DataGates(*(x[row : row + 1] for x in gates))  # type: ignore[misc]
        return scan(learner, *part(*rows, slice(begin, end)))

    for row, documents in enumerate([[(13, 18), (18, 50), (50, 70)], [(0, 33), (33, 70)], [(0, 22)]]):
        for begin, end in documents:
            wanted, kept = alone(row, begin, end)
            shown = max(begin, before)
            torch.testing.assert_close(
                y[row : row + 1, :, shown - before : end - before],
                wanted[:, :, shown - begin :],
                rtol=1e-11,
                atol=1e-12,
            )
        torch.testing.assert_close(after["levels"][row : row + 1], kept["levels"], rtol=1e-11, atol=1e-12)


# -- limits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", ["sum", "delta"])
def test_with_equal_weights_it_is_plain_linear_attention(update: Any) -> None:
    views, gates = given()
    learner = LogLinear(update, 16)
    plain, one = scan(learner, views, gates._replace(levels=None))
    for levels in (2, 3, LEVELS):
        y, state = scan(learner, views, gates._replace(levels=torch.ones(2, 2, COUNT, levels, dtype=DOUBLE)))
        torch.testing.assert_close(y, plain, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(state["levels"].sum(2), one["levels"].sum(2), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("row", "other", "overrides"),
    [
        ("log_linear_mamba2", "mamba2", []),
        ("log_linear_gated_delta_net", "gated_delta_net", ["layer.norm_eps_scale=head_dim"]),  # the norm of the other
    ],
)
def test_without_levels_the_rows_are_those_of_linear_attention(row: str, other: str, overrides: list[str]) -> None:
    size = ("dim=8", "num_heads=2")
    found = metattt.build(f"layer={row}", *size, "optimizer.levels=0", "learner.chunk=4", *overrides).double()
    plain = metattt.build(f"layer={other}", *size).double()
    randomize(found)
    names = {"write_gate.weight": "lr_weight", "write_gate.bias": "lr_bias"}
    values = {name: x for name, x in plain.state_dict().items() if name.startswith("learner.init")}
    renamed: Tensors = {}
    for name, x in found.state_dict().items():
        key = name.removeprefix("optimizer.")
        renamed[f"optimizer.{names[key]}" if key in names else name] = x
    plain.load_state_dict(values | renamed)
    x = torch.randn(2, 21, 8, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
    one, two = run(found, x, grads=True), run(plain, x, grads=True)
    for old, new in names.items():
        if f"optimizer.{old}" in one.grads:
            one.grads[f"optimizer.{new}"] = one.grads.pop(f"optimizer.{old}")
    shared = one.grads.keys() & two.grads.keys()
    assert shared >= {"x", "task.k.weight", "optimizer.decay_gate.weight"}
    assert (
        compare(
            one._replace(grads={n: one.grads[n] for n in shared}), two._replace(grads={n: two.grads[n] for n in shared})
        )
        < 1e-10
    )


@pytest.mark.parametrize("update", ["sum", "delta"])
@pytest.mark.parametrize("low", [1e-4, 0.999])
def test_decays_over_thousands_of_tokens_are_exact_in_single_precision(update: Any, low: float) -> None:
    views, gates = given(count=4096, batch=1, levels=14, low=0.0)
    assert gates.keep is not None
    keep = low ** (1 - gates.keep) if low < 0.5 else low + (1 - low) * gates.keep  # from `low` to 1
    gates = DataGates(*(x.float() for x in gates._replace(keep=keep)))  # type: ignore[misc]
    views = Views(*(x.float() for x in views[:3]))
    found = scan(LogLinear(update), views, gates)[0]
    wide = [type(one)(*(x if x is None else x.double() for x in one)) for one in (views, gates)]
    exact = scan(LogLinear(update, chunk=1), *wide)[0]  # type: ignore[arg-type]
    worst = ((found - exact).norm(dim=-1) / exact.norm(dim=-1).clamp(min=1e-2)).max().item()
    print(f"update={update}, keep from {low}: largest relative error {worst:.1e}")
    assert worst < 2e-5


# -- state -------------------------------------------------------------------------------------------------------------


def test_the_state_is_of_constant_size() -> None:
    layer = metattt.build("layer=log_linear_mamba2", "dim=8", "num_heads=2")
    sizes = [layer(torch.randn(1, count, 8))[1].nbytes for count in (1, 5, 70)]
    # Fourteen matrices for two heads, the tails of three convolutions, and the position.
    assert sizes == [14 * 2 * 4 * 4 * 4 + 3 * 3 * 8 * 4 + 8] * 3


def test_a_state_with_other_levels_is_refused() -> None:
    size = ("layer=log_linear_mamba2", "dim=8", "num_heads=2")
    x = torch.randn(1, 3, 8)
    _, state = metattt.build(*size, "optimizer.levels=4")(x)
    with pytest.raises(MetaTTTError, match=r"it holds 4 levels, this one has optimizer\.levels=15"):
        metattt.build(*size)(x, state)
