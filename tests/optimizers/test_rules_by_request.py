"""EFLA, Kaczmarz's step and the momentum delta net, against loops written from their equations; others, against the oracle."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import torch
from torch import Tensor

import metattt
from metattt.errors import MetaTTTError
from metattt.testing.specimen import gradients, randomize

T = 21


def efla(k: Tensor, eta: Tensor, _: Any) -> Tensor:
    size = k.square().sum(-1)
    return (1 - torch.exp(-eta * size)) / size


def kaczmarz(k: Tensor, eta: Tensor, rule: Any) -> Tensor:
    return eta / (k.square().sum(-1) + rule.eps)


def unchanged(k: Tensor, eta: Tensor, _: Any) -> Tensor:
    return eta


CASES: dict[str, tuple[tuple[str, ...], Any]] = {
    "efla": (("layer=efla",), efla),
    "gated efla": (("layer=efla", "optimizer.decay=softplus", "optimizer.gradient_at=decayed"), efla),
    "kaczmarz": (("layer=efla", "optimizer.step=projection", "optimizer.eps=0.1"), kaczmarz),
    "mdn": (("layer=mdn",), unchanged),
}


def make(case: str, *more: str) -> Any:
    torch.manual_seed(0)
    layer: Any = metattt.build(*CASES[case][0], "dim=12", "num_heads=3", "layer.norm_eps_scale=none", *more).double()
    randomize(layer)
    return layer


def loop(layer: Any, x: Tensor, step: Any) -> Tensor:
    """One token after the other: `S = β S − η kᵀ(k W − v)`, `W = α W + κ S`."""
    state = layer.start(x)
    ctx = layer.call(x, state).ctx
    views, _ = layer.task.views(x, {}, ctx)
    gates, _ = layer.optimizer.gates(x, {}, ctx)
    ones, zeros = torch.ones_like(gates.eta), torch.zeros_like(gates.eta)
    alpha, beta, kappa = (
        one if gate is None else gate for gate, one in ((gates.alpha, ones), (gates.beta, zeros), (gates.kappa, ones))
    )
    w = next(iter(layer.learner.init.values())).expand(len(x), -1, -1, -1)
    s, outputs = torch.zeros_like(w), []
    for t in range(x.shape[1]):
        k, v, q = (view[:, :, t] for view in (views.k, views.v, views.q))
        a, b, c = (gate[:, :, t, None, None] for gate in (alpha, beta, kappa))
        eta = step(k, gates.eta[:, :, t], layer.optimizer)[..., None, None]
        at = a * w if layer.optimizer.gradient_at == "decayed" else w
        error = (k.unsqueeze(-2) @ at).squeeze(-2) - v
        s = b * s - eta * k.unsqueeze(-1) * error.unsqueeze(-2)
        w = a * w + c * s
        outputs.append((q.unsqueeze(-2) @ w).squeeze(-2))
    return layer.output(x, torch.stack(outputs, dim=2))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", ["auto", "primal"])
def test_equals_a_plain_loop(case: str, form: str) -> None:
    layer = make(case, f"layer.form={form}")
    x = torch.randn(2, T, 12, dtype=torch.float64).requires_grad_()
    found, wanted = layer(x)[0], loop(layer, x, CASES[case][1])
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)
    cotangent = torch.randn_like(found)
    for one, other in zip(*(gradients(layer, x, (y * cotangent).sum()).items() for y in (found, wanted)), strict=True):
        torch.testing.assert_close(one[1], other[1], rtol=1e-9, atol=1e-11, msg=one[0])


@pytest.mark.parametrize("row", ["pkda", "gated_oja", "gsa", "gka"])
@pytest.mark.parametrize("length", [1, 2, T, 70])
def test_equals_the_loop_of_the_oracle(row: str, length: int) -> None:
    """As configured; from a token to more than a chunk of them."""
    torch.manual_seed(0)
    layer: Any = metattt.build(f"layer={row}", "dim=12", "num_heads=3").double()
    randomize(layer)
    x = torch.randn(2, length, 12, dtype=torch.float64).requires_grad_()
    found, wanted = layer(x)[0], oracle.outputs(layer, [oracle.Call(x)])[0]
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    cotangent = torch.randn_like(found)
    one, other = (gradients(layer, x, (y * cotangent).sum()) for y in (found, wanted))
    for name, g in one.items():
        torch.testing.assert_close(g, other[name], rtol=1e-10, atol=1e-12 * max(1, g.norm().item()), msg=name)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("layer=gsa optimizer.channels=0", r"Slots has a decay for every channel: set optimizer\.channels"),
        ("layer=gated_oja optimizer.channels=3", r"optimizer\.channels=3, and v has 4: set optimizer\.channels=head_dim"),
    ],
)
def test_channels_that_do_not_fit(overrides: str, message: str) -> None:
    with pytest.raises(MetaTTTError, match=message):
        metattt.build(*overrides.split(), "dim=12", "num_heads=3")(torch.randn(1, 2, 12))


@pytest.mark.parametrize("row", ["kda", "gla", "pkda", "gated_oja", "gka"])
def test_heads_of_another_width(row: str) -> None:
    """Two heads of four features, beside a model of twelve."""
    layer: Any = metattt.build(f"layer={row}", "dim=12", "num_heads=2", "layer.of_heads=3").double()
    x, state, ys = torch.randn(2, T, 12, dtype=torch.float64), None, []
    for part in x.split(8, 1):
        y, state = layer(part, state)
        ys.append(y)
    torch.testing.assert_close(torch.cat(ys, 1), layer(x)[0], rtol=1e-10, atol=1e-12)


def test_a_state_with_other_slots() -> None:
    one, other = (metattt.build("layer=gsa", "dim=12", "num_heads=3", f"optimizer.channels={n}") for n in (4, 5))
    x = torch.randn(1, 2, 12)
    with pytest.raises(MetaTTTError, match="the state is from another layer"):
        other(x, one(x)[1])


def test_a_key_of_zeros() -> None:
    """It teaches nothing, and derivatives are finite."""
    layer = make("efla", "task.short_conv=null", "task.feature_map=identity")
    x = torch.zeros(1, 3, 12, dtype=torch.float64).requires_grad_()
    y, _ = layer(x)
    assert all(g.isfinite().all() for g in gradients(layer, x, y.sum()).values())


def test_no_key_at_all() -> None:
    """‖H‖ has no derivative at 0, and no ridge is left: answers are 0, and nothing is NaN."""
    layer: Any = metattt.build("layer=gka", "dim=12", "num_heads=3", "learner.chunk=2")
    randomize(layer)
    x = torch.cat([torch.zeros(1, 5, 12), torch.randn(1, 3, 12)], 1).requires_grad_()
    y, _ = layer(x)
    assert not y[:, :5].any() and all(g.isfinite().all() for g in gradients(layer, x, y.sum()).values())


def test_the_answer_to_a_key_is_its_label() -> None:
    """What Kaczmarz's step is for: with η = 1 and ε near 0 the newest pair is stored exactly."""
    layer = make("kaczmarz", "optimizer.lr=constant", "optimizer.eps=1e-12")
    x = torch.randn(1, T, 12, dtype=torch.float64)
    views, _ = layer.task.views(x, {}, layer.call(x, layer.start(x)).ctx)
    _, state = layer(x)
    w = next(iter(state.weights["weights"].values()))
    torch.testing.assert_close((views.k[:, :, -1:] @ w), views.v[:, :, -1:], rtol=1e-8, atol=1e-8)


def test_settings_that_are_not_allowed() -> None:
    with pytest.raises(MetaTTTError, match=r"optimizer\.step=half` is not allowed: choose one of exact, projection"):
        make("efla", "optimizer.step=half")
    with pytest.raises(MetaTTTError, match=r"optimizer\.write_init=1.5"):
        make("mdn", "optimizer.write_init=1.5")
