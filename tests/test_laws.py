"""Forms agree for a learner that uses every primitive, and rules with every gate, some of them 0 or 1: outputs, every gradient
and the state, however calls cut the sequence. (Parts of the package are compared with the oracle: `test_drawn_compositions`;
weights that are used twice: `learners/test_adapter`.)"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from metattt.learners import MLP, FastWeights, Learner, Linear, Weight
from metattt.optimizers import Gates, GradientDescent, InnerOptimizer
from metattt.state import Context, Tensors
from metattt.tasks import Reconstruction
from metattt.testing.specimen import Specimen, compare, run, state_distance

BOUND = 1e-9  # relative, float64


class Primitives(Learner):
    """Every primitive with positions inside a token: an embedding, a convolution, a scale, biases and a slow matrix."""

    def weights(self, d_in: int, d_out: int) -> dict[str, Weight]:
        return {
            "table": Weight((5, d_in)),
            "conv": Weight((3, 2, 2), std=0.3),
            "conv_bias": Weight((2,)),
            "s": Weight((2,), value=1.0),
            "w": Weight((d_in, d_out), std=0.3),
            "b": Weight((d_out,)),
            "slow": Weight((d_out, d_out), std=0.3, fast=False),
            "slow_bias": Weight((d_out,), fast=False),
        }

    def forward(self, w: FastWeights, x: Tensor) -> Tensor:
        x = x + w.embedding((x.detach().sum(-1) * 3).long() % 5, "table")
        grid = x.unflatten(-1, (-1, 2))  # [B, H, T, d/2, 2]: positions inside a token
        grid = grid + w.scale(torch.tanh(w.conv1d(grid, "conv", "conv_bias")), "s")
        return w.linear(w.bias(w.linear(grid.flatten(-2), "w"), "b"), "slow", "slow_bias")


class GatedRule(InnerOptimizer):
    """Every gate of the algebra from the token itself: decay α, momentum β and write gate κ, some of them exactly 0 or
    1."""

    def __init__(self, gates: str, exact: bool, **rule: Any):
        super().__init__(**rule)
        self.names, self.exact = gates, exact

    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        self.maps = nn.ModuleDict({name: nn.Linear(dim, num_heads) for name in "e" + self.names})

    def gates(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[Gates, Tensors]:
        value = {name: torch.sigmoid(linear(x)).mT for name, linear in self.maps.items()}
        if self.exact:  # by the token's contents, so that splits and padding agree
            kind = (x.detach()[..., 0] * 4).long().remainder(4).unsqueeze(1)
            for shift, name in enumerate(self.names):
                g = torch.where((kind + shift) % 4 == 0, 0.0, value[name])
                value[name] = torch.where((kind + shift) % 4 == 1, 1.0, g)
        return Gates(0.1 * value["e"], value.get("a"), value.get("b"), value.get("k")), state


LEARNERS = (Linear, Primitives)


def random_rule(r: random.Random) -> dict[str, Any]:
    """The settings that every linear rule has, in combinations that are allowed."""
    b = r.choice([1, 2, 3, 5, 16])
    anchor = r.choice(["minibatch", "minibatch", "online", "batch"])
    read = r.choice(["inclusive", "inclusive", "inclusive", "exclusive", "previous", "block", "final"])
    several = (anchor == "minibatch" and read in ("previous", "block", "final")) or (
        b == 1 and read == "inclusive" and anchor == "minibatch"
    )
    steps, chunk = r.choice([1, 2, 3]) if several else 1, r.choice([None, None, 1, 2, 3])
    return {"mini_batch_size": b, "anchor": anchor, "read": read, "steps": steps, "compute_chunk": chunk}


def random_specimen(seed: int) -> Specimen:
    """The same layer on every call: each part is drawn by a generator of its own."""
    learner, r = LEARNERS[seed % 4 // 2], random.Random(seed)
    wrapped = {"residual": r.random() < 0.5, "norm": r.random() < 0.5, "learn_init": r.random() < 0.7}
    gates, exact, rule = r.choice(["a", "b", "k", "ab", "abk", "bk"]), r.random() < 0.5, random_rule(r)
    group_size, views = r.choice([None, 0, 1, 2]), r.choice(["separate", "shared_qk"])
    return Specimen(
        lambda: learner(**wrapped),
        lambda: Reconstruction(views),
        lambda: GatedRule(gates, exact, **rule),
        dim=2 * r.choice([4, 6]),
        options={"group_size": group_size},
        longest_mini_batch=16,
    )


@pytest.mark.parametrize("seed", range(64))
def test_forms_agree_on_a_random_layer(seed: int) -> None:
    spec, r = random_specimen(seed), random.Random(seed)
    x = torch.randn(2, r.randint(3, 20), spec.dim, dtype=torch.float64)
    cuts = sorted(r.sample(range(1, x.shape[1]), r.randint(0, 2)))  # carried state, at any offset
    primal = run(spec.make(form="primal"), x, cuts, grads=True)
    assert primal.y.isfinite().all()
    forms = spec.forms()
    assert forms[:2] == ["primal", "dual"]
    for form in forms[1:]:
        layer = spec.make(form=form)
        other = run(layer, x, cuts, grads=True)
        assert compare(other, primal) <= BOUND, layer.optimizer
        assert state_distance(layer, other.state, primal.state) <= BOUND, layer.optimizer


@pytest.mark.parametrize(("form", "group_size", "settings"), [
    ("primal", None, {"token_steps": "shared"}), ("dual", None, {"token_steps": "shared"}), ("dual", 0, {}),
    ("dual", 0, {"anchor": "online"}), ("summed", None, {"read": "previous", "steps": 2}),
])  # fmt: skip
def test_first_and_second_derivatives(form: str, group_size: int | None, settings: dict[str, Any]) -> None:
    """Of every form, through recomputed groups and stored ones, by finite differences."""
    spec = Specimen(
        lambda: MLP(expansion=1.0), Reconstruction, lambda: GradientDescent(2, **settings), dim=4, num_heads=1
    )
    layer, x = spec.make(form=form, group_size=group_size), torch.randn(1, 5, 4, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in layer.named_parameters()]
    values = [p.detach().clone().requires_grad_() for p in layer.parameters()]

    def outputs(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))[0]

    assert torch.autograd.gradcheck(outputs, (x, *values), fast_mode=True)
    assert torch.autograd.gradgradcheck(outputs, (x, *values), fast_mode=True)
