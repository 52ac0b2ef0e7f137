"""No sequence, or one without a real token: nothing in, nothing out, and the gradients of the others stay as they
are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import metattt
from metattt import MetaTTTError, TTTLayer
from metattt.catalog.known_layers import known_layers
from metattt.learners import Convolution, GlobalEstimator, Learner, ModuleLearner, SwiGLU
from metattt.optimizers import GradientDescent, InnerOptimizer
from metattt.tasks import DecodedReconstruction, NextToken, Reconstruction, Task


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
    "module": lambda: made(
        ModuleLearner(nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 8, bias=False)), residual=True, norm=True)
    ),
    "module with noise": lambda: made(
        ModuleLearner(nn.Linear(8, 8)), lambda: Reconstruction("shared_qk", corruption="noise")
    ),
    "decoded": lambda: made(SwiGLU(), DecodedReconstruction, lambda: GradientDescent(4, read="previous", steps=2)),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", LAYERS)
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


def test_no_sequences_are_left_of_some_at_different_places() -> None:
    layer, x = metattt.build("ttt_linear", dim=16, num_heads=2), torch.randn(2, 4, 16)
    state = layer.learn(x, mask=torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool()).select(torch.tensor([], dtype=torch.long))
    for reset in (None, torch.zeros(0, 4, dtype=torch.bool)):
        y, after = layer(x[:0], state, reset=reset)
        assert y.shape == (0, 4, 16) and after.pos.shape == (0,)
