"""The slots of what the inner loop remembers: what an absent one stands for, and which are not shaped like a weight."""

from __future__ import annotations

import torch

import metattt
from metattt import memory
from metattt.layer import TTTLayer
from metattt.optimizers.block import BlockRule


def test_a_counter_is_a_number_for_each_head() -> None:
    """A state whose counters have the shape of their weight, as they once had, goes on to the same."""
    layer = metattt.build("layer=ttt_linear", "optimizer=adam", "dim=32", "num_heads=2").double()
    x = torch.randn(3, 40, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    _, state = layer(x[:, :20])
    age = state.weights["age"]
    assert {tuple(one.shape) for one in age.values()} == {(3, 2)} and all((one == 1).all() for one in age.values())
    like = state.weights["commit"]
    wide = {name: torch.full_like(like[name], 1.0) for name in age}
    before = state._replace(weights=state.weights | {"age": wide})
    torch.testing.assert_close(layer(x[:, 20:], before)[0], layer(x[:, 20:], state)[0], rtol=0, atol=0)


class Leaning(BlockRule):
    """Adds to every step what the first one was told to begin with."""

    own_slots = ("lean",)

    def begin(self, carry: memory.Memory) -> memory.Memory:
        return carry | {"lean": {name: torch.full_like(x, 0.01) for name, x in carry["commit"].items()}}

    def move(self, carry: memory.Memory, alpha: object, beta: object) -> memory.Memory:
        moved = {name: x + carry["update"][name] + carry["lean"][name] for name, x in carry["commit"].items()}
        return {"commit": moved, "lean": carry["lean"]}


def test_a_document_begins_with_what_the_rule_makes_of_the_start() -> None:
    torch.manual_seed(0)
    parts = metattt.build("layer=ttt_linear", "dim=32", "num_heads=2")
    task, learner = type(parts.task)(), type(parts.learner)()
    layer = TTTLayer(32, 2, task, learner, Leaning(4)).double()
    x = torch.randn(2, 24, 32, dtype=torch.float64)
    reset = torch.zeros(2, 24, dtype=torch.bool)
    reset[0, 10] = reset[1, 12] = True
    y = layer(x, reset=reset)[0]
    torch.testing.assert_close(y[:1, 10:], layer(x[:1, 10:])[0])
    torch.testing.assert_close(y[1:, 12:], layer(x[1:, 12:])[0])
