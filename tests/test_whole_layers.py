"""Layers that are no `TTTLayer`, mixers and two layers in the place of one: the laws that every layer obeys. (Those of a
`TTTLayer`: `metattt.testing`. What they compute: `mixers/test_mamba`, `test_combined`.)"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import metattt
from metattt.parallel.cuts import check_cut
from metattt.testing.foreign import Subject, examine
from metattt.testing.specimen import randomize

MIXERS = ("longhorn", "mamba", "mamba2_mixer")
SMALL = {
    "longhorn": ("layer.d_state=3", "layer.chunk_size=5"),
    "mamba": ("layer.d_state=3", "layer.chunk_size=5"),
    "mamba2_mixer": ("layer.d_state=5", "layer.chunk_size=5"),
    "lact_block": ("optimizer.mini_batch_size=4", "layer.first.learner.window=3"),
    "titans_mag": ("optimizer.mini_batch_size=4", "layer.first.learner.window=3"),
    "titans_mal": ("optimizer.mini_batch_size=4", "layer.second.learner.window=3"),
}
every_layer = pytest.mark.parametrize("name", SMALL)


def make(name: str) -> Any:
    layer = metattt.build(f"layer={name}", "dim=8", "num_heads=2", *SMALL[name]).double()
    randomize(layer)
    return layer


@every_layer
def test_laws(name: str) -> None:
    """Splits, padding and documents anywhere, states that stay, derivatives, types."""
    found = dict(examine(Subject(partial(make, name), 8)))
    assert not {title: law for title, law in found.items() if law.failed or law.error is None}
    check_cut(make(name), 8)


@every_layer
def test_autocast(name: str) -> None:
    """What is remembered stays wide. (Muon lifts what bf16 rounds away in small singular values: LaCT's outputs are its own.)"""
    layer = metattt.build(f"layer={name}", "dim=32", "num_heads=2")
    x = torch.randn(2, 100, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    expected = layer(x)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = layer(x)
        y.float().square().mean().backward()
    memory = {"titans_mal": "first", "titans_mag": "second", "lact_block": "second"}.get(name)
    kept = [state.learner["memory"]] if memory is None else getattr(state, memory).weights["commit"].values()
    assert {one.dtype for one in kept} == {torch.float32} and y.isfinite().all()
    assert x.grad is not None and bool(x.grad.isfinite().all())
    assert name == "lact_block" or ((y.float() - expected).norm() / expected.norm()).item() < 2e-2
