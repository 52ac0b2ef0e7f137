"""The gates of a rule that moves the weights of a pretrained model: constants, as nothing there trains gates."""

from __future__ import annotations

import torch
from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.nested import map_tensors
from metattt.optimizers.base import Gates
from metattt.optimizers.block import BlockRule
from metattt.state import Context


def constant_gates(rule: BlockRule, names: list[str], like: Tensor) -> Gates:
    """The gates of a rule for fast weights of these names, `[1, 1, 1]` each, of the type and on the device of `like`.

    Raises:
        MetaTTTError: a rule that moves its weights token by token, or whose gates depend on the tokens.
    """
    name = type(rule).__name__
    if not isinstance(rule, BlockRule):
        given = f"the class {rule.__name__}" if isinstance(rule, type) else f"a {name}"
        raise MetaTTTError(
            f"rule is {given}: give one that moves the weights once per mini-batch, such as Adam() (optimizer=adam)"
        )
    if rule.read != "previous" or rule.anchor != "minibatch":
        raise MetaTTTError(
            f"optimizer.read={rule.read} and optimizer.anchor={rule.anchor}: an adapter scores a mini-batch before it "
            "learns it, with read=previous and anchor=minibatch"
        )
    rule.setup(1, 1, 1, names)
    found: list[Gates] = []
    for value in (-3.0, 0.0, 3.0):
        x = torch.full((1, 1, 1), value, dtype=like.dtype)
        gates, _ = rule.gates(x, {}, Context(x, None, None, 1))
        assert isinstance(gates, Gates)
        found.append(map_tensors(lambda gate: gate.detach().to(like), gates))
    for field in Gates._fields:
        first, *others = (getattr(gates, field) for gates in found)
        if first is not None and (field == "weight_lr" or not all(torch.equal(first, other) for other in others)):
            raise MetaTTTError(
                f"{name} has gates that depend on the token ({field}), and an adapter has no gates to train: set lr, "
                "momentum and decay to constant or none"
            )
    return found[0]
