"""Mini-batches that are not the plain case: cut by the end of a call, longer than any memory, of learners to whom padding
would show. (What they compute: `test_drawn_compositions`.)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from metattt import MetaTTTError, TTTLayer
from metattt.learners import (
    ChebyshevRidge,
    Convolution,
    FastWeights,
    GlobalEstimator,
    KernelEstimator,
    KernelRidge,
    Learner,
    Linear,
    LogLinear,
    RecurrentRidge,
    Weight,
)
from metattt.memory import Memory
from metattt.optimizers import Append, BlockRule, Gates, GradientDescent, InnerOptimizer, StepSize, WholeSequence
from metattt.state import Context, Tensors
from metattt.tasks import Reconstruction

DIM, HEADS, T = 6, 2, 11
LENGTHS = (11, 6, 3, 8)


class Mixing(Learner):
    """Every token sees the mean of its mini-batch, later tokens included."""

    mixes_tokens = True

    def weights(self, d_in: int, d_out: int) -> dict[str, Weight]:
        return {"W": Weight((d_in, d_out), std=0.5)}

    def forward(self, w: FastWeights, x: Tensor) -> Tensor:
        return w.linear(x.mean(-2, keepdim=True).expand_as(x), "W")


def plain() -> Linear:
    return Linear(bias=False, norm=False, residual=False)


def made(learner: Learner, optimizer: InnerOptimizer) -> TTTLayer:
    return TTTLayer(DIM, HEADS, Reconstruction(), learner, optimizer).double()


def tokens(batch: int = len(LENGTHS)) -> Tensor:
    return torch.randn(batch, T, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class WideKeys(Reconstruction):
    """Keys and queries with two channels more, which are 0."""

    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        super().build(dim, num_heads, head_dim)
        self.input_dim = head_dim + 2

    def views(self, x: Tensor, state: Any, ctx: Any) -> Any:  # type: ignore[override]
        views, state = super().views(x, state, ctx)
        return views._replace(k=nn.functional.pad(views.k, (0, 2)), q=nn.functional.pad(views.q, (0, 2))), state


KEEPERS: dict[str, Callable[[], Learner]] = {
    "attention": lambda: KernelEstimator(bandwidth=1.0),
    "all tokens": lambda: GlobalEstimator(bandwidth=1.0),
    "kernel ridge": lambda: KernelRidge(bandwidth=1.0),
    "recurrent ridge": RecurrentRidge,
    "recurrent ridge, exact": lambda: RecurrentRidge(solver="exact"),
    "ridge of the keys": ChebyshevRidge,
    "log-linear": LogLinear,
    "log-linear, delta": lambda: LogLinear("delta"),
}


@pytest.mark.parametrize("name", KEEPERS)
def test_labels_of_learners_that_keep_data_need_not_be_as_wide_as_keys(name: str) -> None:
    def layer(task: Reconstruction) -> TTTLayer:
        torch.manual_seed(0)
        return TTTLayer(DIM, HEADS, task, KEEPERS[name](), Append()).double()

    (narrow, wide), x = (layer(task) for task in (Reconstruction(), WideKeys())), tokens(2)
    first, state = wide(x[:, :6])
    y = torch.cat([first, wide(x[:, 6:], state)[0]], 1) if wide.learner.streams else wide(x)[0]
    torch.testing.assert_close(y, narrow(x)[0], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("learner", "steps"), [(plain, 1), (plain, 2), (lambda: Convolution("tokens"), 1)], ids=["plain", "steps", "mixing"]
)
def test_a_call_that_cuts_mini_batches_of_a_block_read_is_said_once(
    learner: Callable[[], Learner], steps: int, recwarn: pytest.WarningsRecorder
) -> None:
    def layer(read: Any = "block") -> TTTLayer:
        return made(learner(), GradientDescent(4, read=read, steps=steps))

    x, one, reset = tokens(), layer(), torch.zeros(4, 8, dtype=torch.bool)
    reset[:, 4] = True
    one(x[:, :8])
    layer("previous")(x)
    layer()(x[:, :8], reset=reset)  # documents of 4 tokens
    every = made(learner(), GradientDescent(1, read="block", steps=steps))
    every(x[:, :1], every(x[:, :3], reset=reset[:, 2:5])[1], reset=reset[:, 4:5])  # a token cannot be cut
    assert not recwarn.list
    for _ in range(2):
        one(x)
    (said,) = recwarn.list
    assert "optimizer.mini_batch_size=4" in str(said.message) and "T=11" in str(said.message)
    layer()(x[:, :8], reset=reset.roll(1, 1))
    layer()(x[:, 3:7], one(x[:, :3])[1])
    assert [f"T={count}" in str(said.message) for count, said in zip((11, 8, 4), recwarn.list, strict=True)] == [True] * 3


@pytest.mark.parametrize("rule", [GradientDescent(4, read="block"), GradientDescent(4, read="final"), WholeSequence()], ids=repr)
def test_padding_is_refused_where_tokens_look_at_later_ones(rule: InnerOptimizer) -> None:
    layer, x = made(Mixing(), rule), tokens()
    layer(x[:, :8])
    with pytest.raises(MetaTTTError, match="would let them see padding: make it causal"):
        layer(x, mask=torch.arange(T) < torch.tensor(LENGTHS).unsqueeze(1))


class OfLongCalls(StepSize):
    """α in calls of more than 4 tokens alone."""

    def gates(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[Gates, Tensors]:
        gates, state = super().gates(x, state, ctx)
        return (gates._replace(alpha=torch.full_like(gates.eta, 0.9)) if x.shape[1] > 4 else gates), state


class Tokenwise(OfLongCalls, GradientDescent):
    pass


class Pooled(OfLongCalls, BlockRule):
    def move(self, memory: Memory, alpha: Tensor | None, beta: Tensor | None) -> Memory:
        return {"commit": {name: w + memory["update"][name] for name, w in memory["commit"].items()}}


@pytest.mark.parametrize("cuts", [(3, 11), (5, 8)])
def test_gates_of_an_open_mini_batch_do_not_come_and_go(cuts: tuple[int, int]) -> None:
    """Where they are stored as tokens, for learners that mix these, and where their mean is taken."""
    for learner, rule in ((Convolution("tokens"), Tokenwise(4, read="previous")), (plain(), Pooled(4))):
        layer, x = made(learner, rule), tokens()
        with pytest.raises(MetaTTTError, match=r"give (the same views and gates|them) in every call"):
            layer(x[:, cuts[0] : cuts[1]], layer(x[:, : cuts[0]])[1])


def test_a_size_that_is_set_inside_of_a_mini_batch_that_is_stored_as_tokens() -> None:
    x = tokens()
    layer = made(Convolution("tokens"), GradientDescent(8, read="previous"))
    first, state = layer(x[:, :9])
    layer.optimizer.mini_batch_size = 4
    mixed = torch.cat([first, layer(x[:, 9:], state)[0]], 1)
    layer.optimizer.mini_batch_size = 8
    torch.testing.assert_close(mixed, layer(x)[0])  # no mini-batch ends after token 8


def test_a_mini_batch_may_be_longer_than_memory_holds() -> None:
    longest = 2**31 - 1
    cases: list[dict[str, Any]] = [{"max_norm": 0.5}, {"max_norm": 0.5, "read": "exclusive"}, {}]
    for settings in cases:
        layers = []
        for b in (T, longest):
            torch.manual_seed(0)
            task = Reconstruction("shared_qk", rope="mini_batch")
            layers.append(TTTLayer(4, 1, task, plain(), GradientDescent(b, **settings)).double())
        x = tokens(2)[..., :4]
        with torch.no_grad():
            y, state = layers[1](x[:, :10])
            y = torch.cat([y, layers[1](x[:, 10:], state)[0]], 1)  # one token alone is decoded
            torch.testing.assert_close(y, layers[0](x)[0], rtol=1e-9, atol=1e-11)
