"""The way of a call through the code is short: how many functions and files of ours one forward pass meets."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import metattt
from metattt.layer import TTTLayer
from metattt.learners.module.adapter import ModuleLearner
from metattt.optimizers.gradient_descent import GradientDescent
from metattt.tasks.reconstruction import Reconstruction

ROOT = str(Path(metattt.__file__).parent)


def met(layer: nn.Module) -> Counter[tuple[str, str]]:
    """Calls by file and function in a forward pass of 64 tokens, with derivatives to come."""
    x, calls = torch.randn(1, 64, 64), Counter[tuple[str, str]]()
    layer(x)  # what is found out once

    def follow(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT):
            calls[code.co_filename.removeprefix(ROOT), code.co_qualname] += 1

    sys.setprofile(follow)
    try:
        layer(x)
    finally:
        sys.setprofile(None)
    return calls


def module_of_ones_own() -> TTTLayer:
    module = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    return TTTLayer(64, 4, Reconstruction(), ModuleLearner(module), GradientDescent())


def known(name: str, *overrides: str) -> nn.Module:
    return metattt.build(f"layer={name}", "dim=64", "num_heads=4", *overrides)


@pytest.mark.parametrize(("way", "functions", "files", "calls"), [
    ("fused", 72, 16, 91),
    ("dual", 101, 19, 393),
    ("module", 100, 23, 791),
    ("solved", 70, 18, 105),
    ("online", 72, 19, 102),
    ("titans", 95, 23, 197),
])  # fmt: skip
def test_one_forward_pass(way: str, functions: int, files: int, calls: int) -> None:
    """At most so many; a comprehension is a function and a call of its own before Python 3.12."""
    layer = {
        "fused": lambda: known("ttt_linear"),
        "dual": lambda: known("ttt_linear", "layer.form=dual"),
        "module": module_of_ones_own,
        "solved": lambda: known("gated_delta_net", "layer.form=dual"),
        "online": lambda: known("gated_delta_net"),
        "titans": lambda: known("titans"),
    }[way]()
    found = met(layer)
    assert layer.form == ("fused" if way in ("fused", "online") else "dual")
    assert len({file for file, _ in found}) <= files, found
    assert len(found) <= functions and found.total() <= calls, found
