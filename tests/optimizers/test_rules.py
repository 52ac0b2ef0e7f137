"""Rules beyond plain gradient descent: clipping, momentum, rules per mini-batch, Muon; the laws hold for each with
every read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import metattt
from metattt.errors import MetaTTTError
from metattt.learners import MLP, Linear
from metattt.optimizers import Adam, BlockMomentum, GradientDescent, InnerOptimizer, Momentum, Sign
from metattt.optimizers.block import newton_schulz
from metattt.tasks import Reconstruction
from metattt.testing.laws import causality, forms, splits
from metattt.testing.padding import masks, packing
from metattt.testing.specimen import Specimen, run

BOUND = 1e-9
task = partial(Reconstruction, normalize_qk=True)

CLIPPED: dict[str, dict[str, Any]] = {
    "plain": {},
    "token steps": {"token_steps": "shared"},
    "exclusive": {"read": "exclusive"},
    "batch anchor": {"anchor": "batch"},
    "online": {"anchor": "online"},
    "previous": {"read": "previous"},
    "small chunks": {"compute_chunk": 3},
}
BLOCK: dict[str, Callable[..., InnerOptimizer]] = {
    "titans": partial(BlockMomentum, 4, base_lr=0.3, decay="per_head"),
    "lact": partial(
        BlockMomentum,
        4,
        base_lr=0.3,
        lr="per_weight",
        momentum="per_head",
        pool="gates",
        orthogonalize=True,
        row_norm=True,
    ),
    "muon": partial(BlockMomentum, 3, base_lr=0.3, momentum="none", orthogonalize=True),
    "sign": partial(Sign, 4, base_lr=0.01),
    "adam": partial(Adam, 4),
}


def hold(spec: Specimen) -> None:
    for law in (forms, splits, causality, masks, packing):
        assert law(spec) <= (0.0 if law is causality else BOUND), law.__name__


@pytest.mark.parametrize("name", CLIPPED)
def test_laws_of_clipping(name: str) -> None:
    hold(Specimen(MLP, task, lambda: GradientDescent(4, base_lr=0.3, max_norm=0.15, **CLIPPED[name])))


def test_clipping_bounds_the_step_of_a_mini_batch() -> None:
    layer = Specimen(MLP, task, lambda: GradientDescent(8, base_lr=3.0, max_norm=0.05), longest_mini_batch=8).make()
    x = torch.randn(2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    after, before = run(layer, x).state.weights["commit"], layer.learner.init
    moved = sum((after[name] - before[name]).square().flatten(2).sum(-1) for name in after)
    torch.testing.assert_close(moved.sqrt(), torch.full_like(moved, 0.05))  # type: ignore[union-attr]


@pytest.mark.parametrize("read", ["previous", "committed"])
@pytest.mark.parametrize("name", BLOCK)
def test_laws_of_rules_per_mini_batch(name: str, read: str) -> None:
    hold(Specimen(partial(Linear, bias=False, norm=False), task, partial(BLOCK[name], read=read)))


def test_newton_schulz_brings_singular_values_near_1() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.linalg.svdvals(newton_schulz(torch.randn(8, 8, dtype=torch.float64, generator=generator)))
    assert values.min() > 0.3 and values.max() < 1.3  # five quintic steps bring them near 1, not to it


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: Momentum(nesterov=True, momentum="none"), "optimizer.momentum=none"),
        (lambda: Momentum(decay_to_init=True), "optimizer.decay=none"),
        (lambda: Momentum(gradient_at="decayed", decay="per_head"), "optimizer.anchor=online"),
        (lambda: Momentum(momentum_init=1.5), "optimizer.momentum_init=1.5"),
        (lambda: BlockMomentum(read="inclusive"), "optimizer.read=previous"),
        (lambda: Adam(beta1=1.0), "optimizer.beta1=1.0"),
        (lambda: GradientDescent(max_norm=0.0), "optimizer.max_norm=0.0"),
    ],
)
def test_refused(make: Callable[[], InnerOptimizer], word: str) -> None:
    with pytest.raises(MetaTTTError) as caught:
        make()
    assert word in str(caught.value)


def test_token_steps_are_those_of_the_numbers_that_are_there() -> None:
    """They are kept while decoding; `.data` changes a parameter without a trace."""
    layer = metattt.build("ttt_linear", dim=8, num_heads=2)
    rule, x = layer.optimizer, torch.randn(1, 20, 8)
    with torch.no_grad():
        before, (y, _) = rule.token_steps(), layer(x)
        assert rule.token_steps() is before
        rule.token_step_offset.data += 1
        after, (z, _) = rule.token_steps(), layer(x)
        assert (after > before).all() and not torch.equal(y, z)
        rule.token_step_map = "relu"
        assert torch.equal(rule.token_steps(), 1 / torch.arange(1, 17) + rule.token_step_offset)
        layer.double()
        assert rule.token_steps().dtype == torch.float64
    assert rule.token_steps().requires_grad
