"""The outer loop with Muon: which parameters it moves, where to, and that a stopped run goes on."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from metattt.composition.compose import compose
from metattt.composition.instantiate import instantiate_model, instantiate_part
from metattt.training.muon import Muon, MuonAndAdamW


def iterated(gradient: Tensor) -> Tensor:
    """Muon's five quintic iterations, on the singular values."""
    u, s, vh = torch.linalg.svd(gradient, full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ vh


@pytest.mark.parametrize("layer", ["ttt_linear", "nested_ttt"])  # the maps of the latter's learner hold no weights
def test_matrices_of_the_blocks_are_moved_by_muon_and_nothing_is_moved_twice(layer: str) -> None:
    cfg = compose("dim=32", "num_heads=2", "training=muon", f"layer={layer}")
    recipe, model = instantiate_part(cfg, "training"), instantiate_model(cfg)
    moved, decayed, others = recipe.groups(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    by_muon = {names[id(p)] for p in moved["params"]}
    assert {"blocks.0.ffn.up.weight", "blocks.1.ffn.down.weight"} <= by_muon
    assert all(name.startswith("blocks.") and p.ndim == 2 for p in moved["params"] for name in [names[id(p)]])
    assert "embedding.weight" in {names[id(p)] for p in decayed["params"]}
    assert others["weight_decay"] == 0 and moved["weight_decay"] == decayed["weight_decay"] > 0
    every = [names[id(p)] for group in (moved, decayed, others) for p in group["params"]]
    assert sorted(every) == sorted(names.values())


def test_two_steps_are_those_of_the_papers() -> None:
    torch.manual_seed(0)
    start = [torch.randn(shape).double() for shape in ((6, 9), (6, 9), (9, 4), (5,))]
    matrices, vector = [nn.Parameter(p.clone()) for p in start[:3]], nn.Parameter(start[3].clone())
    lr, decay, mu = 0.03, 0.1, 0.9
    groups: dict[str, Any] = {"params": matrices, "weight_decay": decay, "muon": True}
    both = [groups, {"params": [vector], "weight_decay": 0.0}]
    ours = MuonAndAdamW(both, lr, momentum=mu)
    alone = nn.Parameter(start[3].clone())
    adamw = torch.optim.AdamW([alone], lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    expected, means = [p.clone() for p in start[:3]], [torch.zeros_like(p) for p in start[:3]]
    for number in range(2):
        if number:  # a state that was saved
            ours, content = MuonAndAdamW(both, lr, momentum=mu), copy.deepcopy(ours.state_dict())
            ours.load_state_dict(content)
        gradients = [torch.randn_like(p) for p in start]
        for parameter, gradient in zip([*matrices, vector], gradients, strict=True):
            parameter.grad = gradient.clone()
        alone.grad = gradients[3].clone()
        ours.step()
        adamw.step()
        for number, gradient in enumerate(gradients[:3]):
            means[number] = mu * means[number] + gradient
            step = iterated(gradient + mu * means[number])
            size = lr * 0.2 * math.sqrt(max(gradient.shape))
            expected[number] = (1 - lr * decay) * expected[number] - size * step
    torch.testing.assert_close([one.detach() for one in matrices], expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(vector, alone, rtol=0, atol=0)


def test_a_parameter_without_a_gradient_stays_and_a_model_without_blocks_is_trained() -> None:
    plain = nn.Sequential(nn.Linear(20, 20), nn.LayerNorm(20))
    optimizer = Muon().optimizer(plain)
    before = copy.deepcopy(plain.state_dict())
    optimizer.step()
    assert all(torch.equal(before[name], value) for name, value in plain.state_dict().items())
    for parameter in plain.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    assert all(not torch.equal(before[name], value) for name, value in plain.state_dict().items())


def test_the_rate_rises_and_falls_on_lines() -> None:
    recipe, wsd = Muon(lr=1.0, warmup_fraction=0.1, min_lr=0.0), Muon(decay_fraction=0.3)
    factors = [recipe.factor(step, 100) for step in range(101)]
    assert factors[0] == 0.1 and factors[9] == factors[10] == 1 and math.isclose(factors[55], 0.5) and factors[100] == wsd.factor(9, 9) == 0
