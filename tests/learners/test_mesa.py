"""The Mesa layer: its solver, its derivatives, long decays, and the gates of learners that keep data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from saved import SavedBytes
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap

import metattt
from metattt import MetaTTTError, TTTLayer
from metattt.learners import RecurrentRidge
from metattt.optimizers import Append
from metattt.state import Context, DataGates
from metattt.tasks import Reconstruction, Views
from metattt.testing.specimen import Specimen, cotangent, run

DOUBLE = torch.float64


def layer(dim: int = 8, **options: Any) -> TTTLayer:
    """MesaNet with two heads; the same parameters every time."""
    learner = lambda: RecurrentRidge(**options)  # noqa: E731
    rule = lambda: Append(write="per_head", decay="per_head", decay_init=0.9)  # noqa: E731
    return Specimen(learner, lambda: Reconstruction(feature_map="silu", normalize_qk=True), rule, dim=dim).make()


def tokens(count: int = 11, dim: int = 8, batch: int = 2) -> Tensor:
    return torch.randn(batch, count, dim, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))


def built(learner: RecurrentRidge, heads: int, width: int) -> RecurrentRidge:
    learner.setup(heads, width, width)
    return learner


def scanned(learner: RecurrentRidge, views: Views, gates: DataGates) -> Tensor:
    positions = torch.arange(views.k.shape[2]).expand(views.k.shape[0], -1)
    return learner.scan(views, {}, Context(positions, None, None, 1), gates)[0]


def random_views(count: int, width: int, dtype: torch.dtype = DOUBLE) -> Views:
    generator = torch.Generator().manual_seed(0)
    k, v, q = (torch.randn(1, 2, count, width, generator=generator, dtype=DOUBLE) for _ in range(3))
    k, q = (x / x.norm(dim=-1, keepdim=True) for x in (k, q))
    return Views(*(x.to(dtype) for x in (k, v, q)))


def exactly(views: Views, gates: DataGates) -> Tensor:
    """One token after the other by factorizations in float64. (Against the equations: `test_drawn_compositions`.)"""
    given: list[Any] = [type(of)(*(None if x is None else x.double() for x in of)) for of in (views, gates)]
    return scanned(built(RecurrentRidge("exact", chunk=1), 2, views.k.shape[-1]).double(), *given).detach()


def test_ridge_starts_where_it_is_told() -> None:
    made = metattt.build("layer=mesa_net", "dim=8", "num_heads=2", "learner.ridge=3", "learner.ridge_floor=2.5").learner
    torch.testing.assert_close(torch.nn.functional.softplus(made.slow["ridge"]) + 2.5, torch.full((2, 4), 3.0))


# -- the solver --------------------------------------------------------------------------------------------------------


def test_tokens_that_have_stopped_stay_where_they_are() -> None:
    """While others go on: of long queries a tolerance is far above 1, by which their directions must not grow."""
    views, gates = random_views(40, 8, torch.float32), DataGates(torch.ones(1, 1, 40), None)
    views = views._replace(k=3000 * views.k, q=3000 * views.q)
    expected = exactly(views, gates)
    found = scanned(built(RecurrentRidge(tolerance=0.1), 2, 8), views, gates).detach()
    assert bool(found.isfinite().all()) and float((found - expected).norm() / expected.norm()) < 0.2


def test_few_iterations_give_the_iterate_that_they_reach() -> None:
    """Against the method for one token, as textbooks have it."""
    views, width = random_views(9, 6), 6
    gates = DataGates(torch.full((1, 1, 9), 0.8, dtype=DOUBLE), torch.full((1, 1, 9), 0.9, dtype=DOUBLE))
    found = scanned(built(RecurrentRidge(iterations=2, chunk=4), 2, width).double(), views, gates)
    g = h = torch.zeros(width, width, dtype=DOUBLE)
    for t in range(9):
        k, v, q = (x[0, 1, t] for x in views[:3])
        g, h = 0.9 * g + 0.8 * torch.outer(v, k), 0.9 * h + 0.8 * torch.outer(k, k)
        a, x, r = h + torch.eye(width, dtype=DOUBLE), torch.zeros(width, dtype=DOUBLE), q
        p = r
        for _ in range(2):
            step = (r @ r) / (p @ a @ p)
            x, before, r = x + step * p, r, r - step * (a @ p)
            p = r + (r @ r) / (before @ before) * p
        torch.testing.assert_close(found[0, 1, t], g @ x)


def test_a_tolerance_is_kept_and_saves_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    views = random_views(40, 24)
    gates = DataGates(torch.ones(1, 1, 40, dtype=DOUBLE))
    expected = exactly(views, gates)
    calls: list[int] = []
    module = __import__("metattt.learners.recurrent_ridge", fromlist=["_applied"])
    applied = module._applied
    monkeypatch.setattr(module, "_applied", lambda *given: calls.append(1) or applied(*given))
    errors, steps = [], []
    for tolerance in (0.0, 1e-2, 1e-5, 1e-8):
        calls.clear()
        found = scanned(built(RecurrentRidge(tolerance=tolerance), 2, 24).double(), views, gates)
        errors.append(((found - expected).norm() / expected.norm()).item())
        steps.append(len(calls))
    assert steps[0] == 30 and steps[1] < steps[2] < steps[3] < 30
    assert errors[0] < 1e-8 and errors[1] < 1e-1 and errors[2] < 1e-4 and errors[3] < 1e-7


def test_a_token_stops_by_itself() -> None:
    """What other tokens need changes nothing, so a call may be cut anywhere."""
    made = layer(tolerance=0.05)
    x = tokens(9)
    whole = run(made, x).y
    assert torch.allclose(run(made, x, [1, 2, 5]).y, whole, rtol=0, atol=1e-12)
    assert torch.allclose(run(made, x[1:]).y, whole[1:], rtol=0, atol=1e-12)


def test_memory_does_not_grow_with_the_iterations() -> None:
    def kept(iterations: int) -> int:
        made = layer(iterations=iterations)
        with SavedBytes() as saved:
            y = made(tokens().requires_grad_())
        return saved.now if y else 0

    assert kept(2) == kept(30)


# -- derivatives -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["conjugate_gradients", "exact"])
def test_derivatives_of_first_and_second_order(solver: Any) -> None:
    made = layer(solver=solver, chunk=3)
    x = tokens(5).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: made(x)[0], x)
    assert torch.autograd.gradgradcheck(lambda x: made(x)[0], x[:1, :4].detach().requires_grad_())


@pytest.mark.parametrize("tolerance", [0.0, 1e-13])
def test_transforms_of_torch_func(tolerance: float) -> None:
    made, x = layer(chunk=3, tolerance=tolerance), tokens(5)
    expected = run(made, x, grads=True)
    y, pull = vjp(lambda x: made(x)[0], x)
    torch.testing.assert_close(pull(cotangent(y))[0], expected.grads["x"])
    torch.testing.assert_close(vmap(lambda x: made(x[None])[0][0])(x), expected.y)
    each = vmap(grad(lambda x: made(x[None])[0].square().sum()))(x)
    leaf = x.clone().requires_grad_()
    loss = lambda x: made(x)[0].square().sum()  # noqa: E731
    torch.testing.assert_close(each, torch.autograd.grad(loss(leaf), leaf)[0])
    for v in (torch.ones_like(x), x):  # forward over reverse
        torch.testing.assert_close(jvp(grad(loss), (x,), (v,))[1], torch.autograd.functional.hvp(loss, x, v)[1])


# -- long decays -------------------------------------------------------------------------------------------------------


def decays() -> dict[str, Tensor]:
    count = 4096
    random = torch.rand(1, 2, count, generator=torch.Generator().manual_seed(3), dtype=DOUBLE)
    return {
        "1e-4 to 1": 10 ** (-4 * random),
        "0, 1 and between": torch.where(random < 0.01, 0.0, torch.where(random > 0.9, 1.0, random)),
        "none": torch.ones(1, 1, count, dtype=DOUBLE),
    }


@pytest.mark.parametrize("name", decays())
def test_decays_over_thousands_of_tokens_are_exact_in_single_precision(name: str) -> None:
    keep = decays()[name].float()
    write = torch.rand(1, 2, keep.shape[-1], generator=torch.Generator().manual_seed(4))
    gates, views = DataGates(write, keep), random_views(keep.shape[-1], 16, torch.float32)
    found = scanned(built(RecurrentRidge(), 2, 16), views, gates)
    expected = exactly(views, gates)
    # Some answers are small because their query is almost orthogonal to all keys: measured against what is usual.
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1).square().mean().sqrt()
    assert error.max() < 5e-6


@pytest.mark.parametrize(("words", "advice"), [
    ("layer=kernel_ridge learner.kernel=linear learner.ridge=1e-9", "set learner.ridge above 1e-09"),
    ("layer=mesa_net learner.solver=exact learner.ridge_floor=1e-9 learner.ridge=1e-8 task.normalize_qk=false",
     "set learner.ridge_floor above 1e-09"),
])  # fmt: skip
def test_what_has_no_factor(words: str, advice: str) -> None:
    """Rounding is told of in a line; NaN in one sequence, which a training run looks for in its loss, stays there."""
    layer = metattt.build(*words.split(), "dim=16", "num_heads=2")
    x = torch.randn(3, 30, 16, generator=torch.Generator().manual_seed(0))
    with pytest.raises(MetaTTTError, match=advice):
        layer(1e3 * x)
    expected, layer.refuse_nan = layer(1e-6 * x[:, :4])[0], False
    y, _ = layer(torch.where(torch.arange(3).view(3, 1, 1) == 1, torch.nan, 1e-6 * x[:, :4]))
    torch.testing.assert_close(y[::2], expected[::2], rtol=1e-4, atol=0)  # of 1e-9
    assert y[1].isnan().any()
