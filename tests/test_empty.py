"""No sequence, or one without a real token: nothing in, nothing out, and the gradients of the others stay as they
are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import metattt
from metattt.catalog.known_layers import known_layers
from metattt.errors import MetaTTTError
from metattt.layer import TTTLayer
from metattt.learners import Convolution, GlobalEstimator, Learner, ModuleLearner, SwiGLU
from metattt.optimizers import GradientDescent, InnerOptimizer
from metattt.tasks import DecodedReconstruction, NextToken, Reconstruction, Task


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 8, bias=False))


def made(
    learner: Learner,
    task: Callable[[], Task] = Reconstruction,
    optimizer: Callable[[], InnerOptimizer] = lambda: GradientDescent(4),
) -> TTTLayer:
    return TTTLayer(16, 2, task(), learner, optimizer())


LAYERS: dict[str, Callable[[], TTTLayer]] = {
    **{name: (lambda name=name: metattt.build(f"layer={name}", "dim=16", "num_heads=2")) for name in known_layers()},
    "convolution": lambda: made(Convolution()),
    "swiglu, next token": lambda: made(SwiGLU(), NextToken),
    "module": lambda: made(ModuleLearner(Normed(), residual=True, norm=True)),
    "module with noise": lambda: made(
        ModuleLearner(nn.Linear(8, 8)), lambda: Reconstruction("shared_qk", corruption="noise")
    ),
    "decoded": lambda: made(SwiGLU(), DecodedReconstruction, lambda: GradientDescent(4, read="previous", steps=2)),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("masked", [False, True])
def test_an_empty_batch(name: str, masked: bool) -> None:
    layer = LAYERS[name]()
    x, flags = torch.randn(0, 9, 16, requires_grad=True), torch.ones(0, 9, dtype=torch.bool)
    y, state = layer(x, mask=flags if masked else None, reset=None if masked or not layer.causal else flags)
    y.sum().backward()
    assert y.shape == x.shape and x.grad is not None and state.pos.shape == (0,)
    assert all(not p.grad.any() for p in layer.parameters() if p.grad is not None)
    sizes: list[int] = []
    state.map(lambda tensor: sizes.append(tensor.shape[0]) or tensor)
    assert set(sizes) == {0}
    if isinstance(getattr(layer, "learner", None), GlobalEstimator):
        with pytest.raises(MetaTTTError, match="it takes no state"):
            layer(x, state)
    else:
        assert layer(x[:, :1], state)[0].shape == (0, 1, 16)


@pytest.mark.parametrize("name", LAYERS)
def test_a_row_without_tokens(name: str) -> None:
    layer = LAYERS[name]()
    x = torch.randn(3, 9, 16)
    mask = torch.ones(3, 9, dtype=torch.bool)
    mask[1] = False
    mask[2, :3] = False
    if name == "vittt":  # padding is no part of an image
        with pytest.raises(MetaTTTError, match="would let them see padding: make it causal, or give sequences of one"):
            layer(x, mask=mask)
        return

    def call(rows: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        torch.manual_seed(0)
        leaf = x[rows].clone().requires_grad_()
        y, _ = layer(leaf, mask=mask[rows])
        layer.zero_grad()
        y.square().sum().backward()
        assert leaf.grad is not None
        return y.detach(), leaf.grad, {n: p.grad.clone() for n, p in layer.named_parameters() if p.grad is not None}

    y, grad, parameters = call(torch.tensor([0, 1, 2]))
    assert not y[1].any() and not grad[1].any()
    if name == "module with noise":  # the numbers of a sequence depend on its place in the batch
        assert all(p.isfinite().all() for p in parameters.values())
        return
    others, other_grad, without = call(torch.tensor([0, 2]))
    torch.testing.assert_close(y[[0, 2]], others, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(grad[[0, 2]], other_grad, rtol=1e-3, atol=1e-5)
    for key, value in without.items():
        torch.testing.assert_close(parameters[key], value, rtol=1e-3, atol=1e-4)
