"""A task of a third party, in twenty lines: classify the (soft) signs of a token from a half of its features."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metattt import TTTLayer
from metattt.learners import Linear
from metattt.optimizers import GradientDescent
from metattt.state import Context, Tensors
from metattt.tasks import Task, Views
from metattt.testing import TaskConformance


class SignOfTheToken(Task):
    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        self.num_heads = num_heads
        self.k, self.v, self.q = (nn.Linear(dim, dim, bias=False) for _ in range(3))

    def views(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[Views, Tensors]:
        half = x * (torch.arange(x.shape[-1], device=x.device) % 2)
        views = (
            view.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for view in (self.k(half), self.v(x), self.q(x))
        )
        return Views(*views), {}

    def loss(self, prediction: Tensor, v: Tensor) -> Tensor:
        return F.softplus(-prediction * v.tanh()).sum(-1)


class TestSignOfTheToken(TaskConformance):
    make = staticmethod(lambda: SignOfTheToken())


def test_it_trains_the_hidden_state() -> None:
    torch.manual_seed(0)
    layer = TTTLayer(16, 2, SignOfTheToken(), Linear(), GradientDescent(mini_batch_size=4))
    y, state = layer(torch.randn(2, 9, 16))
    assert y.shape == (2, 9, 16)
    assert not torch.equal(state.weights["commit"]["w1"][0], layer.learner.init["w1"])
