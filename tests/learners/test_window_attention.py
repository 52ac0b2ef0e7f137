"""A window over data: every query, however the sequence is cut, masked and packed, against attention over all data
with a mask that is written out; and grouped-query heads against heads that are copied."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

import metattt
from metattt.errors import MetaTTTError
from metattt.layer import TTTLayer
from metattt.learners import KernelEstimator
from metattt.optimizers import Append
from metattt.tasks import Reconstruction
from metattt.testing.specimen import randomize

DIM, HEADS = 8, 4


def make(window: int | None, sinks: int = 0, kernel: str = "exponential", kv_heads: int | None = None) -> TTTLayer:
    task = Reconstruction(rope="full", kv_heads=kv_heads)
    layer = TTTLayer(DIM, HEADS, task, KernelEstimator(kernel, neighbours=2, window=window, sinks=sinks), Append())  # type: ignore[arg-type]
    layer.double()
    randomize(layer)
    return layer


def in_pieces(
    layer: TTTLayer, x: Tensor, cuts: list[int], mask: Tensor | None = None, reset: Tensor | None = None
) -> Tensor:
    state, rows = None, []
    for start, end in pairwise([0, *cuts, x.shape[1]]):
        some = [None if flag is None else flag[:, start:end] for flag in (mask, reset)]
        y, state = layer(x[:, start:end], state, mask=some[0], reset=some[1])
        rows.append(y)
    return torch.cat(rows, 1)


@pytest.mark.parametrize("sinks", [0, 3])
def test_the_state_stops_growing_at_the_window(sinks: int) -> None:
    """And a state of another window is refused."""
    layer, state, sizes = make(6, sinks), None, []
    for _ in range(40):
        _, state = layer(torch.randn(2, 1, DIM, dtype=torch.float64), state)
        sizes.append(state.nbytes)
    assert len(set(sizes[5:])) == 1 and sizes[0] < sizes[5]
    assert state is not None and state.learner["k"].shape[2] == sinks + 5
    longer = layer(torch.randn(2, 40, DIM, dtype=torch.float64))[1]
    assert longer.nbytes == sizes[-1]
    for other in (make(4, sinks), make(None)):
        with pytest.raises(MetaTTTError, match="the state is from another layer"):
            other(torch.randn(2, 1, DIM, dtype=torch.float64), state)


@pytest.mark.parametrize("layer", ["delta_net", "nearest", "attention"])
def test_grouped_heads_equal_copied_heads(layer: str) -> None:
    """As if the projections of k and v held each group's rows once for every head."""
    common = (f"layer={layer}", "dim=8", "num_heads=4", "task.views=separate")
    grouped, copied = metattt.build(*common, "task.kv_heads=2").double(), metattt.build(*common).double()
    values = grouped.state_dict()
    for name in ("task.k", "task.v", "task.conv_k", "task.conv_v"):
        if (name := f"{name}.weight") in values:
            values[name] = values[name].unflatten(0, (2, 2)).repeat_interleave(2, 0).flatten(0, 1)
    copied.load_state_dict(values)
    x = torch.randn(2, 21, 8, dtype=torch.float64)
    torch.testing.assert_close(in_pieces(grouped, x, [5, 6]), in_pieces(copied, x, []), rtol=0, atol=1e-10)
    assert layer == "delta_net" or 2 * grouped(x)[1].learner["k"].nbytes == copied(x)[1].learner["k"].nbytes
