"""MIRAS: losses besides the squared error, and retentions as mirror descent."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from layer_references import (
    Parameters,
    gate,
    gradient,
    heads_of,
    mlp_predict,
    output,
    residual_norm,
    spread,
    weights_of,
)
from torch import Tensor

import metattt
from metattt.errors import MetaTTTError
from metattt.layer import TTTLayer
from metattt.learners import MLP, Linear
from metattt.optimizers import GradientDescent, MirrorDescent, Momentum
from metattt.tasks import NextToken, Reconstruction
from metattt.tasks.losses import LOSSES, loss_per_token
from metattt.testing.laws import causality, derivatives, forms, round_trips, splits
from metattt.testing.padding import masks, packing
from metattt.testing.specimen import Run, Specimen, compare, cotangent, gradients, randomize, run

BOUND = 1e-9
RETENTIONS = ("lq", "softmax", "elastic_net", "elastic_net_ftrl", "sigmoid")


def hold(spec: Specimen, *more: Callable[[Specimen], float]) -> None:
    for law in (forms, splits, causality, masks, packing, round_trips, *more):
        assert law(spec) <= (0.0 if law is causality else 1e-6 if law is derivatives else BOUND), law.__name__


def numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# -- losses ------------------------------------------------------------------------------------------------------------


def slope(name: str, error: Tensor, p: float = 3.0, delta: Any = 1.0) -> Tensor:
    """∇ℓ by the prediction, at predictions `error` of labels 0."""
    error = error.clone().requires_grad_()
    return torch.autograd.grad(loss_per_token(name, error, torch.zeros_like(error), p, delta).sum(), error)[0]


def test_lp_is_the_power_of_the_error() -> None:
    error = numbers(2, 3, 5, 4)
    for p in (1.0, 1.5, 2.0, 3.0, 4.0):
        torch.testing.assert_close(
            slope("lp", error, p), p * error.sign() * error.abs() ** (p - 1), rtol=1e-2, atol=1e-4
        )
    torch.testing.assert_close(slope("lp", error, 2.0), 2 * error)


def test_huber_by_the_norm() -> None:
    error = numbers(2, 3, 50, 4)
    norm, delta = error.norm(dim=-1, keepdim=True), numbers(2, 3, 50, seed=1).exp()
    bound = delta.unsqueeze(-1)
    assert (norm < bound).any() and (norm > bound).any()
    torch.testing.assert_close(slope("norm_huber", error, delta=delta), error * (bound / norm).clamp(max=1))
    expected = torch.where(norm <= bound, error, bound * torch.tanh(10 * error))
    torch.testing.assert_close(slope("mixed_huber", error, delta=delta), expected)
    each = torch.where(error.abs() <= bound, error, bound * error.sign())
    torch.testing.assert_close(slope("huber", error, delta=delta), each)
    value = loss_per_token("norm_huber", error, torch.zeros_like(error), 3.0, delta)
    far = norm.squeeze(-1) > delta
    torch.testing.assert_close(
        value, torch.where(far, delta * norm.squeeze(-1) - delta**2 / 2, error.square().sum(-1) / 2)
    )


def test_kl_is_that_of_torch() -> None:
    prediction, v = numbers(2, 3, 5, 4, scale=3.0).requires_grad_(), numbers(2, 3, 5, 4, seed=1)
    found = loss_per_token("kl", prediction, v, 3.0, 1.0)
    expected = torch.distributions.kl_divergence(*(torch.distributions.Categorical(logits=x) for x in (v, prediction)))
    torch.testing.assert_close(found, expected)
    (slope_,) = torch.autograd.grad(found.sum(), prediction)
    torch.testing.assert_close(slope_, prediction.softmax(-1) - v.softmax(-1))


@pytest.mark.parametrize("size", [0.0, 1e-12, 1e-3, 1e6])
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "squared"])
def test_derivatives_are_finite_near_zero_and_far_away(name: str, size: float) -> None:
    for dtype in (torch.float32, torch.float64):
        v, given = numbers(1, 2, 5, 4, seed=1).to(dtype), numbers(1, 2, 5, 4, scale=size).to(dtype)
        error, delta = given.requires_grad_(), torch.ones(1, 2, 5, dtype=dtype, requires_grad=True)
        loss = loss_per_token(name, v + error, v, 1.0, delta)
        (first,) = torch.autograd.grad(loss.sum(), error, create_graph=True)
        second = torch.autograd.grad(
            first.square().sum() + loss.sum(), [error, delta], allow_unused=True, materialize_grads=True
        )
        assert all(bool(x.isfinite().all()) for x in (loss, first, *second))


@pytest.mark.parametrize("delta", ["constant", "per_head"])
@pytest.mark.parametrize("name", ["huber", "norm_huber", "mixed_huber", "lp", "kl"])
def test_laws_of_losses(name: Any, delta: Any) -> None:
    settings = {"huber_delta_from": delta, "huber_delta": 0.8} if "huber" in name else {}
    if settings or delta == "constant":
        task = partial(Reconstruction, normalize_qk=True, loss=name, **settings)
        more = () if name == "mixed_huber" else (derivatives,)  # a step of the difference may cross the threshold
        hold(Specimen(MLP, task, lambda: GradientDescent(4, base_lr=0.3)), *more)


def test_a_threshold_of_the_token_in_other_tasks() -> None:
    for task in (
        partial(Reconstruction, kv_heads=1, loss="norm_huber", huber_delta_from="per_head"),
        partial(Reconstruction, views="shared_qk", rope="mini_batch", loss="huber", huber_delta_from="per_head"),
        partial(Reconstruction, views="no_key", feature_map="silu", loss="huber", huber_delta_from="per_head"),
        partial(NextToken, loss="mixed_huber", huber_delta_from="per_head"),
    ):
        spec = Specimen(partial(Linear, norm=False), task, lambda: GradientDescent(4, base_lr=0.3))
        hold(spec)
        layer = spec.make()
        assert layer.task.label_dim == 5
        grads = run(layer, spec.tokens(), grads=True).grads
        assert grads["task.delta_weight"].any() and grads["task.delta_bias"].any()


def test_the_threshold_starts_where_it_is_put() -> None:
    for delta in (1e-3, 0.7, 800.0):
        task = Reconstruction(loss="norm_huber", huber_delta_from="per_head", huber_delta=delta).setup(8, 2, 4)
        torch.testing.assert_close(torch.nn.functional.softplus(task.delta_bias), torch.full((2,), delta))


def test_no_fast_path_takes_these_losses_for_the_squared_error() -> None:
    for name in ("lp", "norm_huber", "mixed_huber", "kl"):
        for delta in ("constant", *(["per_head"] if "huber" in name else [])):
            task = partial(Reconstruction, loss=name, loss_p=2.0, huber_delta_from=delta)  # type: ignore[arg-type]
            assert Specimen(Linear, task, lambda: GradientDescent(4)).make().form == "dual"
            linear = partial(Linear, residual=False, norm=False, bias=False)
            assert Specimen(linear, task, lambda: GradientDescent(4, "online")).make().plan.form == "dual"


# -- retentions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", ["previous", "committed"])
@pytest.mark.parametrize("retention", RETENTIONS)
def test_laws_of_retentions(retention: Any, read: Any) -> None:
    rule = partial(MirrorDescent, 4, read=read, retention=retention, base_lr=0.3)
    smooth = () if retention.startswith("elastic") else (derivatives,)  # a step of the difference may cross a threshold
    hold(Specimen(partial(MLP, bias=False), partial(Reconstruction, normalize_qk=True), rule), *smooth)


@pytest.mark.parametrize(
    "settings",
    [
        {"anchor": "batch"},
        {"steps": 2},
        {"decay": "none"},
        {"decay": "constant", "decay_init": 0.0},
        {"compute_chunk": 3},
        {"simplex": "output", "mass": 3.0},
        {"read": "block"},
        {"read": "final", "steps": 2},
    ],
    ids=str,
)
def test_laws_with_other_settings(settings: dict[str, Any]) -> None:
    spec = Specimen(Linear, Reconstruction, partial(MirrorDescent, 4, retention="softmax", base_lr=0.3, **settings))
    laws = (forms, masks) if settings.get("read") in ("block", "final") else (forms, splits, causality, masks, packing)
    for law in laws:
        assert law(spec) <= (0.0 if law is causality else BOUND), law.__name__


MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "lq": lambda a: a / (a.square() + 1e-6).pow(1.5).sum((-2, -1), keepdim=True) ** (1 / 3),  # q = 3
    "softmax": lambda a: 2 * a[0, 0].numel() ** 0.5 * a.exp() / a.exp().sum((-2, -1), keepdim=True),
    "elastic_net": lambda a: a.sign() * (a.abs() - 0.05).clamp(min=0),
    "elastic_net_ftrl": lambda a: a.sign() * (a.abs() - 0.05).clamp(min=0),
    "sigmoid": lambda a: 1 / (1 + (-a).exp()),
}
BACK: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "softmax": lambda a, w: w.log(),
    "elastic_net": lambda a, w: w,
    "sigmoid": lambda a, w: (w / (1 - w)).log(),
}
"""The A that the next token starts from, by the A and the W of this one; elsewhere A itself."""


def looped(p: Parameters, x: Tensor, num_heads: int, retention: str) -> Tensor:
    """`A_t = α_t A_{t−1} − η_t ∇ℓ(W_{t−1})`, `W_t = m(A_t)`, token by token."""
    q, k, v = (heads_of(x @ p[f"task.{name}.weight"].T, num_heads) for name in ("q", "k", "v"))
    lr = torch.sigmoid(gate(p, "lr_", x)) / q.shape[-1]
    keep = torch.sigmoid(gate(p, "decay_gate.", x))
    a = weights_of(p, x.shape[0])
    w = a if retention == "elastic_net" else {name: MAPS[retention](z) for name, z in a.items()}
    rows = []
    for t in range(x.shape[1]):
        error = residual_norm(p, k[:, :, t], mlp(w, k[:, :, t])) - v[:, :, t]
        found = gradient(0.5 * error.square().sum(), w)
        a = {name: spread(keep[:, :, t], z) * z - spread(lr[:, :, t], z) * found[name] for name, z in a.items()}
        w = {name: MAPS[retention](z) for name, z in a.items()}
        a = {name: BACK.get(retention, lambda a, w: a)(a[name], w[name]) for name in a}
        rows.append(residual_norm(p, q[:, :, t], mlp(w, q[:, :, t])))
    return output(p, x, rows)


def mlp(w: Parameters, x: Tensor) -> Tensor:
    return mlp_predict(w | {"b1": torch.tensor(0.0), "b2": torch.tensor(0.0)}, x)


@pytest.mark.parametrize("retention", RETENTIONS)
def test_one_token_a_mini_batch_is_the_published_recurrence(retention: Any) -> None:
    torch.manual_seed(0)
    rule = MirrorDescent(1, retention=retention, q=3.0, mass=2.0, threshold=0.05)
    layer = TTTLayer(8, 2, Reconstruction(), MLP(bias=False), rule).double()
    randomize(layer)
    x = numbers(2, 9, 8).requires_grad_()

    def through(y: Tensor) -> Run:
        return Run(y.detach(), None, gradients(layer, x, (y * cotangent(y)).sum()))  # type: ignore[arg-type]

    expected = through(looped(dict(layer.named_parameters()), x, 2, retention))
    assert compare(through(layer(x)[0]), expected) < BOUND
    assert all(g.any() for g in expected.grads.values())


def test_without_a_map_it_is_gradient_descent_with_decay() -> None:
    x = numbers(2, 11, 8)
    for retention, settings in (("lq", {"q": 2.0}), ("elastic_net", {"threshold": 0.0})):
        rule = partial(MirrorDescent, 4, read="previous", retention=retention, **settings)  # type: ignore[arg-type]
        plain = partial(Momentum, 4, read="previous", momentum="none", decay="per_head")
        one, other = (run(Specimen(MLP, Reconstruction, r).make(), x, grads=True) for r in (rule, plain))
        assert compare(one, other) < BOUND


def after(retention: Any, **settings: Any) -> dict[str, Tensor]:
    layer = Specimen(
        MLP, Reconstruction, partial(MirrorDescent, 4, retention=retention, base_lr=2.0, **settings)
    ).make()
    start = layer.inner.start(1, torch.float64)["commit"]
    state = run(layer, numbers(2, 8, 8)).state
    return state.weights["commit"] | {f"{name} at the start": w for name, w in start.items()}


def test_weights_stay_where_the_retention_keeps_them() -> None:
    for name, w in after("softmax", mass=3.0).items():
        assert (w > 0).all() and torch.allclose(
            w.flatten(2).mean(-1) * w[0, 0].numel() ** 0.5, torch.tensor(3.0, dtype=w.dtype)
        ), name
    for name, w in after("softmax", simplex="output").items():
        axis = -2 if w.ndim == 4 else -1
        total = w.sum(axis) / w.shape[axis] ** 0.5
        torch.testing.assert_close(total, torch.ones_like(total), msg=name)
    for w in after("sigmoid").values():
        assert ((w > 0) & (w < 1)).all()
    kept = after("elastic_net", threshold=0.05)
    assert all((kept[name] == 0).any() and (kept[name] != 0).any() for name in ("w1", "w2"))


def test_weights_of_zero_can_be_kept() -> None:
    layer = TTTLayer(8, 2, Reconstruction(), MLP(), MirrorDescent(4)).double()  # biases start at zero
    grads = run(layer, numbers(2, 11, 8), grads=True).grads
    assert all(bool(g.isfinite().all()) for g in grads.values())


# -- what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: MirrorDescent(retention="l2"), "optimizer.retention"),  # type: ignore[arg-type]
        (lambda: MirrorDescent(q=1.5), "optimizer.q=1.5"),
        (lambda: MirrorDescent(mass=0.0), "optimizer.mass=0.0"),
        (lambda: MirrorDescent(threshold=-1.0), "optimizer.threshold=-1.0"),
        (lambda: MirrorDescent(simplex="row"), "optimizer.simplex"),  # type: ignore[arg-type]
        (lambda: MirrorDescent(decay_init=2.0), "optimizer.decay_init=2.0"),
        (lambda: MirrorDescent(read="inclusive"), "optimizer.read=previous"),
        (lambda: Reconstruction(loss="lp", loss_p=0.5), "task.loss_p=0.5"),
        (lambda: Reconstruction(loss="nobody"), "task.loss"),  # type: ignore[arg-type]
        (lambda: Reconstruction(huber_delta_from="per_head"), "task.loss=squared has none"),
        (
            lambda: metattt.build(
                "layer=attention", "task.loss=huber", "task.huber_delta_from=per_head", "dim=8", "num_heads=2"
            ),
            "set task.huber_delta_from=constant",
        ),
    ],
)
def test_refused(make: Callable[[], object], word: str) -> None:
    with pytest.raises(MetaTTTError) as caught:
        make()
    assert word in str(caught.value) and "\n" not in str(caught.value)
