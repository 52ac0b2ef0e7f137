"""Steps of tokens, as they are kept while decoding; and steps that are clipped."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import metattt
from metattt.learners import MLP
from metattt.optimizers import GradientDescent
from metattt.tasks import Reconstruction
from metattt.testing.laws import forms, packing, splits
from metattt.testing.specimen import Specimen


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


@pytest.mark.parametrize("token_steps", ["none", "shared"])
@pytest.mark.parametrize("law", [forms, splits, packing], ids=lambda law: law.__name__)
def test_laws_of_clipping(law: Callable[[Specimen], float], token_steps: str) -> None:
    """What an open mini-batch has added counts, whichever call has added it."""
    spec = Specimen(
        MLP, Reconstruction, lambda: GradientDescent(4, base_lr=0.3, max_norm=0.15, token_steps=token_steps)
    )
    assert law(spec) <= 1e-9
