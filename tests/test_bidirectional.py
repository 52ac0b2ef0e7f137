"""A layer in both directions: what it is of, and that padding and documents change nothing."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from refusals_for_tests import refusal
from torch import Tensor

import metattt
from metattt.bidirectional import Bidirectional
from metattt.composition.compose import compose
from metattt.composition.instantiate import instantiate_model
from metattt.errors import MetaTTTError
from metattt.testing.foreign import EXACT, Subject, padding, resets
from metattt.testing.specimen import randomize

T = 13


def make(name: str = "ttt_linear") -> Any:
    torch.manual_seed(0)
    both = Bidirectional(16, metattt.build(f"layer={name}", "dim=16", "num_heads=2")).double()
    randomize(both.layer)
    torch.nn.init.normal_(both.gate)
    torch.nn.init.normal_(both.gate_reversed)
    return both


def tokens() -> Tensor:
    return torch.randn(3, T, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["ttt_linear", "gated_delta_net", "mamba", "titans_mag"])
def test_both_directions_are_of_one_layer(name: str) -> None:
    both, x = make(name), tokens()
    y, state = both(x)
    forward, back = both.layer(x)[0], both.layer(x.flip(1))[0].flip(1)
    torch.testing.assert_close(y, forward * both.gate.tanh() + back * both.gate_reversed.tanh())
    assert state is None
    for apart in (lambda: both.learn(x), lambda: both.read(x, None)):
        refusal(apart, "Bidirectional carries no state", "set direction=forward")
    late = x.clone()
    late[:, -1] += 1
    assert (both(late)[0][:, 0] != y[:, 0]).any(dim=-1).all()  # the first token sees the last one


@pytest.mark.parametrize("name", ["ttt_linear", "gated_delta_net", "mamba"])
def test_padding_and_documents(name: str) -> None:
    subject = Subject(partial(make, name), 16)
    subject.has_state = False
    assert max(*padding(subject).values(), resets(subject)) < EXACT


def test_a_configuration_chooses_both_directions() -> None:
    """Of a layer, and of those of a model; what predicts the next token refuses it."""
    torch.manual_seed(0)
    both = metattt.build("layer=delta_net", "direction=both", "seed=0", dim=16, num_heads=2)
    alone = metattt.build("layer=delta_net", "seed=0", dim=16, num_heads=2)
    assert isinstance(both, Bidirectional) and torch.equal(both.layer(tokens().float())[0], alone(tokens().float())[0])
    images = instantiate_model(compose("experiment=digits_pixel", "direction=both", job="train"))
    assert sum(isinstance(module, Bidirectional) for module in images.modules()) == len(images.blocks)
    with pytest.raises(MetaTTTError, match=r"Bidirectional declares causal = False.*direction=forward"):
        instantiate_model(compose("direction=both", "dim=16", "num_heads=2", job="train"))
    cfg = compose("dim=16", "num_heads=2", job="train")
    cfg.direction = "backward"  # assigned, or of a file
    refusal(lambda: instantiate_model(cfg), "direction=backward is not allowed")
