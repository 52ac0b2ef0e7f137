"""The Omega rule: what neighbouring windows of tokens have in common is learned once, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest
from torch import Tensor

from metattt.inner.tokens import Tokens
from metattt.learners import MLP, FastWeights
from metattt.optimizers import BlockMomentum, GradientDescent, InnerOptimizer, Momentum
from metattt.state import Context, Tensors
from metattt.tasks import Views, WindowViews
from metattt.testing.specimen import Run, Specimen, compare, run

BOUND = 1e-9
window = partial(WindowViews, window=3)
descent = partial(GradientDescent, mini_batch_size=4, base_lr=0.3, lr_scale="none")
RULES: dict[str, Callable[[], InnerOptimizer]] = {
    "descent": descent,
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


@pytest.mark.parametrize("form", ["auto", "primal", "summed"])
def test_a_step_size_for_all_pairs_of_a_token(form: str) -> None:
    """η `[B, H, T, 1]` stands for all pairs, as an axis of length 1 does elsewhere."""

    class Plain(WindowViews):
        def views(self, x: Tensor, state: Tensors, ctx: Context, projected: Any = None) -> tuple[Views, Tensors]:
            views, kept = super().views(x, state, ctx, projected)
            return views._replace(weight=None), kept

    class One(GradientDescent):
        def prepare(self, views: Views, gates: Any, x: Tensor, state: Tensors, ctx: Context) -> Any:
            return views, gates._replace(eta=gates.eta.unsqueeze(-1)), state

    runs = []
    for rule in (GradientDescent, One):
        spec = Specimen(MLP, partial(Plain, window=3), partial(rule, 4, read="previous"), options={"form": form})
        runs.append(run(spec.make(), spec.tokens(), grads=True))
    assert compare(*runs) < BOUND
