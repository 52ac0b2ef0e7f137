"""The outer loop without gradients: right in expectation, without a graph, and it learns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from metattt.checkpoints.files import find_checkpoint
from metattt.cli import main
from metattt.composition.compose import build
from metattt.errors import MetaTTTError
from metattt.layer import TTTLayer
from metattt.training.zeroth_order import RandomDirections, ZerothOrder, direction, shift, two_sided


def small_layer(seed: int) -> TTTLayer:
    """TTT-Linear of 133 parameters, away from the zeros and ones it starts with."""
    layer = build("layer=ttt_linear", "dim=4", "num_heads=1", "optimizer.mini_batch_size=4", "layer.gate=false")
    shift(list(layer.parameters()), seed, 0.3)
    return layer


def squared_error(layer: TTTLayer, x: Tensor, target: Tensor) -> Tensor:
    return (layer(x)[0] - target).square().mean()


def test_the_estimate_is_the_gradient_in_expectation() -> None:
    layer = small_layer(1).double()
    parameters = list(layer.parameters())
    x, target = torch.randn(2, 1, 4, 4, dtype=torch.float64).unbind()
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(squared_error(layer, x, target), parameters)])
    count = 800
    total, squares = torch.zeros_like(gradient), torch.zeros_like(gradient)
    with torch.no_grad():
        for seed in range(count):
            slope, _ = two_sided(lambda: squared_error(layer, x, target), parameters, seed, 1e-4)
            estimate = slope * torch.cat([z.flatten() for z in direction(parameters, seed)])
            total += estimate
            squares += estimate.square()
    mean = total / count
    error = ((squares / count - mean.square()) / count).sqrt()  # standard error of the mean, per parameter
    score = (mean - gradient) / error
    assert score.abs().max() < 5
    assert 0.7 < score.square().mean() < 1.4  # neither a bias nor an error that is too large to show one
    assert (gradient.abs() > 3 * error).sum() > 5  # the error is small enough to see the gradient


def test_one_slope_is_the_directional_derivative() -> None:
    layer = small_layer(1).double()
    parameters = list(layer.parameters())
    before = [p.detach().clone() for p in parameters]
    x, target = torch.randn(2, 1, 4, 4, dtype=torch.float64).unbind()
    gradient = torch.autograd.grad(squared_error(layer, x, target), parameters)
    expected = sum((g * z).sum() for g, z in zip(gradient, direction(parameters, 3), strict=True))
    with torch.no_grad():
        slope, loss = two_sided(lambda: squared_error(layer, x, target), parameters, 3, 1e-5)
    assert slope == pytest.approx(float(expected), rel=1e-6)
    assert loss == pytest.approx(squared_error(layer, x, target).item(), rel=1e-6)
    assert all(
        torch.allclose(p, kept, rtol=0, atol=1e-15) for p, kept in zip(parameters, before, strict=True)
    )  # put back


def test_a_small_layer_learns_without_any_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, teacher = small_layer(6), small_layer(5)
    x = torch.randn(4, 4, 4)
    with torch.no_grad():
        target = teacher(x)[0]
    optimizer = RandomDirections(layer.parameters(), lr=0.01)

    def loss() -> Tensor:
        value = squared_error(layer, x, target)
        assert value.grad_fn is None
        return value

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("the outer loss was differentiated")

    monkeypatch.setattr(Tensor, "backward", forbidden)
    losses = [optimizer.step(loss) for _ in range(600)]
    assert losses[-1] < 0.4 * losses[0]
    assert all(p.grad is None for p in layer.parameters()) and not optimizer.state


def test_both_points_see_the_same_noise_and_steps_repeat() -> None:
    finals = []
    for _ in range(2):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.ones(3))
        draws: list[float] = []

        def loss(weight: Tensor = weight, draws: list[float] = draws) -> Tensor:
            draws.append(torch.rand(()).item())
            return weight.square().sum()

        optimizer = RandomDirections([weight], lr=0.1, seed=7)
        for _ in range(3):
            optimizer.step(loss)
        assert draws[0::2] == draws[1::2] and len(set(draws)) == 3
        finals.append(weight.detach())
    assert torch.equal(*finals)


def test_a_loaded_optimizer_goes_on_with_its_own_directions() -> None:
    def run(steps: list[int]) -> Tensor:
        weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
        state = None
        for count in steps:
            optimizer = RandomDirections([weight], lr=0.1)
            if state is not None:
                optimizer.load_state_dict(state)
            for _ in range(count):
                optimizer.step(lambda: weight.square().sum())
            state = optimizer.state_dict()
        return weight.detach()

    assert torch.equal(run([5]), run([2, 3]))


@pytest.mark.parametrize("setting", [{"epsilon": 0.0}, {"directions": 0}, {"lr": 0.0}])
def test_refused_settings(setting: dict[str, float]) -> None:
    with pytest.raises(MetaTTTError, match=f"training.{next(iter(setting))}"):
        ZerothOrder(**setting)  # type: ignore[arg-type]


TINY = [
    "dim=8",
    "num_heads=1",
    "model.num_layers=1",
    "data.context_length=16",
    "data.batch_size=2",
    "trainer.max_steps=3",
]


def test_metattt_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    arguments = [
        "train",
        "training=zeroth_order",
        f"data.path={text}",
        f"output_dir={tmp_path / 'run'}",
        "trainer.accelerator=cpu",
        "trainer.log_every_n_steps=1",
        *TINY,
    ]
    assert main(arguments) == 0, capsys.readouterr().err
    assert find_checkpoint(tmp_path / "run").is_dir()
    assert main([*arguments, "trainer.accumulate_grad_batches=2", f"output_dir={tmp_path / 'other'}"]) == 2
    assert "trainer.accumulate_grad_batches=1" in capsys.readouterr().err
