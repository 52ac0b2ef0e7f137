"""Rules and learners that were asked for, where keys are extreme, and heads of another width. (What they compute:
`test_layer_table`, `test_drawn_compositions`.)"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import metattt
from metattt.testing.specimen import gradients, randomize, run


def make(name: str, *more: str) -> Any:
    layer: Any = metattt.build(f"layer={name}", "dim=12", "num_heads=3", "seed=0", *more).double()
    randomize(layer)
    return layer


@pytest.mark.parametrize("words", [
    "kda", "gla", "pkda", "gated_oja", "gka", "rwkv7", "ttt_linear task=lact", "ttt_linear layer.output_norm=head_rms layer.gate=true",
])  # fmt: skip
@pytest.mark.parametrize("of_heads", [1, 3, 6])
def test_heads_of_another_width(words: str, of_heads: int) -> None:
    """Two heads of 12, four or two features, beside a model of twelve; learners that keep data have one form."""
    forms = ("auto", "auto" if words in ("gated_oja", "gka") else "primal")
    layer, other = (make(*words.split(), f"layer.of_heads={of_heads}", f"layer.form={form}", "num_heads=2") for form in forms)
    x = torch.randn(2, 21, 12, dtype=torch.float64)
    torch.testing.assert_close(run(layer, x, [8]).y, run(other, x).y, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", [
    ("efla", "task.short_conv=null", "task.feature_map=identity"),
    ("gka", "learner.chunk=2"),  # ‖H‖ has no derivative at 0, and no ridge is left
], ids=lambda case: case[0])  # fmt: skip
@pytest.mark.parametrize("scale", [0, 1e-157])  # its square has no reciprocal
def test_keys_of_zeros(scale: float, case: tuple[str, ...]) -> None:
    """They teach nothing, answers are 0, and derivatives are finite."""
    layer = make(*case)
    x = torch.cat([scale * torch.randn(1, 5, 12).double(), torch.randn(1, 3, 12)], 1).requires_grad_()
    y, _ = layer(x)
    assert case[0] == "efla" or scale or not y[:, :5].any()
    assert all(g.isfinite().all() for g in gradients(layer, x, y.sum()).values())
