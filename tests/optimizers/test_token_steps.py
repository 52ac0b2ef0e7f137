"""Steps of tokens, as they are kept while decoding."""

from __future__ import annotations

import torch

import metattt


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
