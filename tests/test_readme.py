"""What the README shows in Python runs, and its three parts of one's own keep every law."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import torch

from metattt import TTTLayer
from metattt.testing import LearnerConformance, OptimizerConformance, TaskConformance

README = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")


@cache
def shown() -> dict[str, Any]:
    """The names that the README's blocks of Python define, each block after the one before it."""
    names: dict[str, Any] = {"__name__": "readme"}
    blocks = re.findall(r"^```python\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 6
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    return names


def test_every_block_runs() -> None:
    names = shown()
    assert names["y"].shape == (2, 7, 64)
    layer = names["layer"]
    assert isinstance(layer, TTTLayer) and type(layer.task) is names["HalfToken"]
    y, _ = layer(torch.randn(2, 19, 64))
    y.square().mean().backward()
    assert y.shape == (2, 19, 64) and y.isfinite().all() and layer.optimizer.keep.grad.abs().sum() > 0
    assert issubclass(names["TestGaussian"], LearnerConformance)


class TestGaussian(LearnerConformance):
    make = staticmethod(lambda: shown()["TestGaussian"].make())


class TestForgetting(OptimizerConformance):
    make = staticmethod(lambda: shown()["Forgetting"](mini_batch_size=4))


class TestHalfToken(TaskConformance):
    make = staticmethod(lambda: shown()["HalfToken"]())


def test_examples_are_short() -> None:
    for name in ("Gaussian", "Forgetting", "HalfToken"):
        block = next(
            block for block in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL) if f"class {name}(" in block
        )
        assert len(block.splitlines()) <= 22
