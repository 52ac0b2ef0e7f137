"""MTTT layers against vectors computed with the published code, in float64."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_for_tests import part
from torch import Tensor

from metattt import TTTLayer, build
from metattt.measures.inner_steps import inner_losses
from metattt.testing.specimen import distance

GOLDEN: Any = np.load(Path(__file__).parents[1] / "golden" / "mttt_layer.npz")
STEPS = {"mlp1": 1, "mlp4": 4, "lin": 1}
SIZES = ("dim=32", "num_heads=4")


def to_ours(published: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parameters of the JAX code (or their gradients) by our names, in our layout."""
    ours: dict[str, Tensor] = {}
    for name, value in published.items():
        match name.split("/"):
            case [("phi" | "psi") as view, "kernel"]:
                ours[f"task.{view}.weight"] = value.mT.flatten(0, 1)
            case [("phi" | "psi") as view, "bias"]:
                ours[f"task.{view}.bias"] = value.flatten()
            case ["g", "kernel"]:
                ours["task.decoder"] = value
            case ["g_bias"]:
                ours["task.decoder_bias"] = value[0]
            case ["h", "kernel"]:
                ours["out.weight"] = value.flatten(0, 1).mT
            case ["h_bias"]:
                ours["out.bias"] = value[0]
            case ["decoder_LN", kind]:
                ours[f"task.norm_{kind}"] = value
            case [inner, kind]:
                ours[f"learner.init.{'w' if kind == 'kernel' else 'b'}{int(inner[-1]) + 1}"] = value
    return ours


def built(kind: str, *overrides: str) -> TTTLayer:
    """What the command line would train, with the published parameters."""
    name = "mttt_linear" if kind == "lin" else "mttt_mlp"
    layer = build(f"layer={name}", f"optimizer.steps={STEPS[kind]}", *SIZES, *overrides).double()
    layer.load_state_dict(to_ours(part(GOLDEN, f"{kind}/p/")))
    return layer


def check(layer: TTTLayer, kind: str) -> None:
    x, weights = torch.tensor(GOLDEN["x"]).requires_grad_(), torch.tensor(GOLDEN["ct"])
    y, _ = layer(x)
    (y * weights).sum().backward()
    assert x.grad is not None
    assert distance(y, torch.tensor(GOLDEN[f"{kind}/y"])) < 1e-9
    assert distance(x.grad, torch.tensor(GOLDEN[f"{kind}/gx"])) < 1e-9
    expected = to_ours(part(GOLDEN, f"{kind}/g/"))
    ours = dict(layer.named_parameters())
    assert ours.keys() == expected.keys()
    for name, parameter in ours.items():
        if parameter.requires_grad:
            assert parameter.grad is not None
            assert distance(parameter.grad, expected[name]) < 1e-9, name
        else:
            assert kind == "lin" and name == "learner.init.w1"


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("override", ["seed=null", "optimizer.compute_chunk=5", "layer.form=summed", "layer.group_size=0"])
def test_golden_vectors(kind: str, override: str) -> None:
    layer = built(kind, override)
    check(layer, kind)
    losses = inner_losses(layer, torch.tensor(GOLDEN["x"]))
    assert losses.shape == (STEPS[kind] + 1, 4)
    assert distance(losses.sum(1), torch.tensor(GOLDEN[f"{kind}/il"])) < 1e-9


SGD = ("layer=mttt_mlp", "optimizer.steps=4", "optimizer.sampling=sgd", *SIZES)


def test_sgd_is_repeatable_with_a_seed() -> None:
    x = torch.randn(2, 12, 32)
    seeded, free = build(*SGD, "optimizer.seed=3"), build(*SGD)
    assert torch.equal(seeded(x)[0], seeded(x)[0])
    assert not torch.equal(free(x)[0], free(x)[0])
    losses = inner_losses(seeded, x)
    assert losses.shape == (5, 4) and torch.equal(losses, inner_losses(seeded, x))
