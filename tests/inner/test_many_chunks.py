"""Online rules of a linear map, many chunks of tokens at once: equal to one chunk after another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from metattt.composition.compose import build
from metattt.testing.specimen import compare, randomize, run, state_distance

LAYERS: dict[str, tuple[str, ...]] = {
    "delta_net": (), "gated_delta_net": (), "gated_delta_product": (), "comba": (), "delta_gradient": (),
    "preconditioned_delta_net": (), "gated_delta_net dot": ("task.loss=dot",),
    "delta_net exclusive": ("optimizer.read=exclusive",), "gated_delta_net first_order": ("layer.outer=first_order",),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("cuts", "hidden"), [([], False), ([70, 71], False), ([100], True)])
def test_equal(name: str, cuts: list[int], hidden: bool) -> None:
    """Outputs, every gradient and the state, split, padded and packed; of a hundred tokens and more, in chunks of 8."""
    words = f"layer={name.split()[0]}", "dim=16", "num_heads=2", "seed=0", "layer.form=dual", "optimizer.compute_chunk=8"
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, 150, 16, generator=draw, dtype=torch.float64)
    given: dict[str, Any] = {}
    if hidden:
        given = {"mask": torch.rand(2, 150, generator=draw) < 0.8, "reset": torch.rand(2, 150, generator=draw) < 0.04}
    layer = build(*words, *LAYERS[name]).double()
    randomize(layer)
    assert layer.plan.by_chunks
    found = run(layer, x, cuts, grads=True, **given)
    layer.plan.by_chunks = False
    expected = run(layer, x, cuts, grads=True, **given)
    assert compare(found, expected) <= 1e-10 and state_distance(layer, found.state, expected.state) <= 1e-10
