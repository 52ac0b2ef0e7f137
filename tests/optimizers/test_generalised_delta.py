"""The generalised delta rule `W_t = Diag(a_t) W_{t−1} − η_t (b_tᵀ (p_t W') − k_tᵀ v_t)`, with n pairs a token, of tasks and
rules of one's own; decays of 0 among them. (Those of the package: `test_drawn_compositions`.)"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from refusals_for_tests import refusal
from torch import Tensor, nn

from metattt.layer import TTTLayer
from metattt.learners import MLP, KernelRidge, Linear
from metattt.optimizers import Append, Gates, GradientDescent, KeyStep, Momentum, Preconditioned
from metattt.state import Context, Tensors
from metattt.tasks import Reconstruction, Views, WindowViews
from metattt.testing import LAWS, Specimen

DIM, HEADS = 8, 2
LINEAR = {"residual": False, "norm": False, "bias": False}


class Generalised(Reconstruction):
    """Views with an erase view, another direction of erasing, and several pairs, each by a projection of its own."""

    def __init__(self, erase: bool = True, direction: bool = False, pairs: int = 0, loss: Any = "squared"):
        super().__init__(loss=loss)
        self.erase, self.direction, self.pairs = erase, direction, pairs

    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        super().build(dim, num_heads, head_dim)
        many = max(1, self.pairs)
        self.more = nn.ParameterDict(
            {name: nn.Parameter(0.5 * torch.randn(dim, many * dim)) for name in ("k", "v", "p", "b")}
        )

    def views(self, x: Tensor, state: Tensors, ctx: Context, **given: Any) -> tuple[Views, Tensors]:
        plain, state = super().views(x, state, ctx)

        def made(name: str) -> Tensor:
            view = (x @ self.more[name]).unflatten(-1, (max(1, self.pairs), self.num_heads, -1)).permute(0, 3, 1, 2, 4)
            return view if self.pairs else view.squeeze(3)

        p, b = made("p") if self.erase else None, made("b") if self.direction else None
        return Views(made("k"), made("v"), plain.q, p, b), state


class ByChannel(GradientDescent):
    """A decay for every input channel: of 1, of exactly 0, and between."""

    def __init__(self, gradient_at: Any = "decayed", read: Any = "inclusive", sharp: float = 1.0):
        super().__init__(1, "online", read, lr_scale="none")
        self.gradient_at, self.sharp = gradient_at, sharp

    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        super().build(dim, num_heads, head_dim)
        self.gate = nn.Parameter(torch.randn(dim, dim))

    def gates(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[Gates, Tensors]:
        gates, state = super().gates(x, state, ctx)
        with torch.autocast(x.device.type, enabled=False):
            logit = x @ self.gate * self.sharp
        decay = -F.relu(logit).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        decay = torch.where(decay < -3 * self.sharp, -torch.inf, decay)
        return gates._replace(decay=decay), state


def build(task: Any, rule: Any) -> TTTLayer:
    return TTTLayer(DIM, HEADS, task, Linear(**LINEAR), rule).double()


def online() -> GradientDescent:
    return GradientDescent(1, "online", lr_scale="none")


RULES = {
    "decayed": lambda: Momentum(1, "online", lr_scale="none", momentum="none", decay="per_head", gradient_at="decayed"),
    "channels": ByChannel,
    "channels before": lambda: ByChannel("previous"),
}
TASKS = {"direction": lambda: Generalised(direction=True), "pairs that erase": lambda: Generalised(direction=True, pairs=2)}


@pytest.mark.parametrize("law", ["forms", "splits", "causality", "masks", "packing", "round_trips", "derivatives"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("task", TASKS)
def test_laws(task: str, rule: str, law: str) -> None:
    spec = Specimen(lambda: Linear(**LINEAR), TASKS[task], RULES[rule], DIM, HEADS, {})
    assert LAWS[law].worst_error(spec) <= LAWS[law].bound


@pytest.mark.parametrize("rate", [1e-4, 0.999])
def test_long_decays_in_fp32(rate: float) -> None:
    """4,096 tokens in fp32 against fp64: what a decay of 1e-4 a token leaves is as exact as what none leaves."""

    class Fixed(ByChannel):
        def gates(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[Gates, Tensors]:
            gates, state = GradientDescent.gates(self, x, state, ctx)
            channels = torch.linspace(rate, 1, self.gate.shape[0] // self.num_heads, dtype=x.dtype).log()
            return gates._replace(decay=channels.expand(*gates.eta.shape, -1)), state

    layer = build(Reconstruction(normalize_qk=True), Fixed())
    x = torch.randn(1, 4096, DIM, dtype=torch.float64)
    with torch.no_grad():
        expected = layer(x)[0]
        found = layer.float()(x.float())[0]
    error = ((found - expected).norm() / expected.norm()).item()
    assert error < 2e-6, error


def test_refusals() -> None:
    """What cannot be computed is said when a layer is built, in one line, and never left out; wrong shapes, when tokens come."""
    plain, two = Linear(**LINEAR), {"erase": False, "pairs": 2}
    hooked = Linear(**LINEAR)
    hooked.register_forward_hook(lambda *call: None)
    for what, task, learner, rule in (
        ("need a linear learner", Generalised(), MLP(), online()),
        ("need a linear learner", Generalised(), plain, GradientDescent(4)),
        ("need a linear learner", Generalised(loss="huber"), Linear(**LINEAR), online()),
        ("no meaning for a bias", Generalised(), Linear(residual=False, norm=False), online()),
        ("a loss that erases", Generalised(loss="dot"), Linear(**LINEAR), online()),
        ("hooks, and erase views need its closed form", Generalised(), hooked, online()),
        ("hooks, and pairs of a token need its closed form", Generalised(**two), hooked, online()),
        ("one after the other", Generalised(**two), MLP(), online()),
        ("one after the other", Generalised(**two), Linear(**LINEAR), Momentum(1, "online")),
        ("no token steps", Generalised(**two), Linear(**LINEAR), GradientDescent(4, token_steps="shared")),
        ("no look-ahead", WindowViews(), Linear(**LINEAR), Momentum(1, "online", nesterov=True)),
        ("need a linear learner", Reconstruction(), MLP(), Preconditioned()),  # the rule's own erase view
        ("keeps its data", Generalised(), KernelRidge(), Append()),
        ("keeps its data", Generalised(**two), KernelRidge(), Append()),
    ):
        refusal(lambda parts=(task, learner, rule): TTTLayer(DIM, HEADS, *parts), what, lines=1)
    narrow = TTTLayer(DIM, HEADS, Narrow(), Linear(**LINEAR), online())
    refusal(lambda: narrow(torch.randn(1, 5, DIM)), "the view erase_key has shape", lines=1)


class Narrow(Reconstruction):
    """An erase view that does not fit."""

    def views(self, x: Tensor, state: Tensors, ctx: Context, **given: Any) -> tuple[Views, Tensors]:
        views, state = super().views(x, state, ctx)
        return views._replace(erase_key=views.k[..., :2]), state


def test_a_step_size_by_key_of_rates_of_every_pair() -> None:
    k, eta = torch.randn(1, 2, 3, 4, 5), torch.rand(1, 2, 3, 1)
    views, ctx = Views(k, k, k[:, :, :, 0]), Context(torch.arange(3).unsqueeze(0), None, None, 1)
    found = [KeyStep().prepare(views, Gates(one), k, {}, ctx)[1].eta for one in (eta.squeeze(-1), eta.expand(-1, -1, -1, 4))]
    assert torch.equal(*found)
