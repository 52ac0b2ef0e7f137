"""The Omega rule: what neighbouring windows of tokens have in common is learned once, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from metattt.inner.tokens import Tokens
from metattt.layer import TTTLayer
from metattt.learners import MLP, FastWeights, Learner, Linear
from metattt.optimizers import BlockMomentum, GradientDescent, InnerOptimizer, Momentum
from metattt.state import Context, Tensors
from metattt.tasks import Views, WindowViews
from metattt.testing.laws import causality, derivatives, forms, round_trips, splits
from metattt.testing.padding import masks, packing
from metattt.testing.specimen import Run, Specimen, compare, run

BOUND = 1e-9
window = partial(WindowViews, window=3)
descent = partial(GradientDescent, mini_batch_size=4, base_lr=0.3, lr_scale="none")
RULES: dict[str, Callable[[], InnerOptimizer]] = {
    "descent": descent,
    "batch": partial(descent, anchor="batch"),
    "committed": partial(descent, read="committed"),
    "several steps": partial(descent, read="committed", steps=2),
    "momentum and decay": partial(Momentum, 4, base_lr=0.3, momentum="per_head", decay="per_head"),
    "blocks": partial(BlockMomentum, 4, base_lr=0.1, lr="per_weight", decay="per_head", orthogonalize=True),
}


class Shuffled(WindowViews):
    """The same pairs in the opposite order: no row of one token is where the next one has it."""

    def views(self, x: Tensor, state: Tensors, ctx: Context, projected: Any = None) -> tuple[Views, Tensors]:
        views, kept = super().views(x, state, ctx, projected)
        assert views.weight is not None
        return views._replace(k=views.k.flip(3), v=views.v.flip(3), weight=views.weight.flip(3)), kept


class Counting(MLP):
    """Remembers how many tokens it was asked at."""

    asked: ClassVar[list[int]] = []

    def predict(self, w: FastWeights, x: Tensor) -> Tensor:
        self.asked.append(x.shape[2])
        return super().predict(w, x)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("learner", [partial(Linear, bias=False), MLP])
def test_laws(learner: Callable[[], Learner], rule: str) -> None:
    spec = Specimen(learner, window, RULES[rule])
    for law in (forms, splits, causality, masks, packing, round_trips):
        assert law(spec) <= (0.0 if law is causality else BOUND), law.__name__


def test_derivatives() -> None:
    assert derivatives(Specimen(MLP, window, descent)) <= 1e-6


def test_features() -> None:
    spec = Specimen(partial(Linear, bias=False, norm=False, residual=False), partial(window, degree=2), descent)
    for law in (forms, splits, masks, packing, derivatives):
        assert law(spec) <= (1e-6 if law is derivatives else BOUND), law.__name__


def asked(spec: Specimen) -> tuple[Run, int]:
    """A run, and how many tokens the learner was asked at."""
    layer, x = spec.make(), spec.tokens()
    layer(x)  # what a layer looks at once
    Counting.asked.clear()
    found = run(layer, x, grads=True)
    return found, sum(Counting.asked)


@pytest.mark.parametrize("rule", RULES)
def test_each_pair_is_learned_once(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Specimen(Counting, partial(WindowViews, window=4), RULES[rule])
    (once, few) = asked(spec)
    monkeypatch.setattr(Tokens, "in_common", property(lambda tokens: False))
    (each, many) = asked(spec)
    assert compare(once, each) < BOUND
    assert few < 0.75 * many


def test_pairs_in_another_order_are_as_many_pairs() -> None:
    """Nothing is read off a name: a task that gives the same windows in another way is learned pair by pair."""
    (plain, few), (shuffled, many) = (
        asked(Specimen(Counting, one, descent)) for one in (window, partial(Shuffled, window=3))
    )
    assert compare(plain, shuffled) < BOUND
    assert few < 0.8 * many


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(dtype: torch.dtype) -> None:
    spec = Specimen(Counting, window, descent)
    layer, x = spec.make(dtype=torch.float32), spec.tokens(dtype=torch.float32)
    Counting.asked.clear()
    plain = layer(x)[0]
    Counting.asked.clear()
    with torch.autocast("cpu", dtype):
        rounded = layer(x)[0]
    assert 6 in Counting.asked and 12 not in Counting.asked
    assert (rounded.float() - plain).abs().max() < 0.05 * plain.abs().max()


def test_a_mini_batch_of_one_token() -> None:
    """One token has all its pairs to itself."""
    spec = Specimen(MLP, window, partial(descent, mini_batch_size=1))
    for law in (forms, splits, masks, packing):
        assert law(spec) <= BOUND, law.__name__


def test_inside_a_transform_of_torch() -> None:
    spec = Specimen(MLP, window, descent)
    layer, x = spec.make(), spec.tokens()

    def loss(params: Tensors) -> Tensor:
        return torch.func.functional_call(layer, params, (x,))[0].square().sum()

    params = dict(layer.named_parameters())
    found = torch.func.grad(loss)(params)
    expected = torch.autograd.grad(loss(params), list(params.values()), allow_unused=True)
    for name, g in zip(params, expected, strict=True):
        assert torch.allclose(found[name], torch.zeros_like(params[name]) if g is None else g, atol=1e-12), name


def test_long_sequences_are_recomputed_in_groups() -> None:
    rule = partial(Momentum, 8, base_lr=0.3, momentum="per_head", decay="per_head")
    x = torch.randn(1, 203, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    runs = [
        run(Specimen(MLP, window, rule, longest_mini_batch=8).make(group_size=size), x, grads=True)
        for size in (0, 3, None)
    ]
    assert compare(runs[0], runs[1]) < BOUND and compare(runs[0], runs[2]) < BOUND


def test_compiled_calls() -> None:
    layer = Specimen(MLP, window, descent).make(dtype=torch.float32)
    x = torch.randn(2, 12, 8)
    compiled = torch.compile(layer, backend="aot_eager")
    assert torch.allclose(compiled(x)[0], layer(x)[0], atol=1e-5)
    assert isinstance(layer, TTTLayer)
