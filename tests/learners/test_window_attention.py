"""A window over data: how large its state grows, and 16 bits; and grouped-query heads against heads that are copied.
(What it computes: `test_layer_table`, `test_drawn_compositions`.)"""

from __future__ import annotations

import pytest
import torch

import metattt
from metattt import MetaTTTError, TTTLayer
from metattt.learners import KernelEstimator
from metattt.optimizers import Append
from metattt.tasks import Reconstruction
from metattt.testing.specimen import Specimen, run

DIM, HEADS = 8, 4


def make(window: int | None, sinks: int = 0) -> TTTLayer:
    learner = lambda: KernelEstimator(window=window, sinks=sinks)  # noqa: E731
    return Specimen(learner, lambda: Reconstruction(rope="full"), Append, DIM, HEADS).make()


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
    endless = make(None)(torch.randn(2, 9, DIM, dtype=torch.float64))[1]
    for other, theirs in ((make(4, sinks), state), (make(None), state), (layer, endless)):
        for call in (other, other.read):
            with pytest.raises(MetaTTTError, match="the state is from another layer"):
                call(torch.randn(2, 1, DIM, dtype=torch.float64), theirs)


def test_autocast_keeps_positions() -> None:
    """Those beyond 256, too, of which bf16 has every second one."""
    layer = metattt.build("layer=window_attention", "learner.window=4", "learner.sinks=1", "dim=8", "num_heads=4")
    x = torch.randn(2, 613, 8)
    with torch.autocast("cpu", torch.bfloat16):
        found = run(layer, x, [605, 607]).y
    torch.testing.assert_close(found.float(), layer(x)[0], rtol=0, atol=1e-2)


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
    torch.testing.assert_close(run(grouped, x, [5, 6]).y, run(copied, x).y, rtol=0, atol=1e-10)
    assert layer == "delta_net" or 2 * grouped(x)[1].learner["k"].nbytes == copied(x)[1].learner["k"].nbytes


@pytest.mark.parametrize("kernel", ["exponential", "gaussian", "nearest"])
def test_a_query_that_sees_nothing_is_answered_with_zero(kernel: str) -> None:
    """Read beyond the window, and in a sequence of padding alone."""
    layer = metattt.build("layer=window_attention", "learner.window=4", f"learner.kernel={kernel}", "dim=8", "num_heads=4")
    y = layer.read(torch.randn(2, 5, 8), layer.learn(torch.randn(2, 6, 8), mask=torch.tensor([[True], [False]]).expand(2, 6)))
    assert y[0, :3].all() and not y[0, 3:].any() and not y[1].any()


@pytest.mark.parametrize("window", ["null", "4"])
def test_what_a_sequence_without_tokens_reads_is_the_learned_point_alone(window: str) -> None:
    layer = metattt.build("layer=attention", f"learner.window={window}", "learner.learn_init=true", "dim=8", "num_heads=4")
    x, mask = torch.randn(2, 5, 8), torch.tensor([[True], [False]]).expand(2, 5)
    y = layer.read(x, layer.learn(torch.randn(2, 5, 8), mask=mask))
    torch.testing.assert_close(y[1:], layer.read(x[1:], None))


@pytest.mark.parametrize(("normalize", "count", "dim"), [(True, 4096, 64), (False, 4096, 64), (False, 65_600, 4)])
def test_linear_attention_to_all_of_many_tokens_in_fp16(normalize: bool, count: int, dim: int) -> None:
    """The sum of the kernels of 4,096 tokens is beyond its range, as 64 times their number is, and the answer was 0; so
    is the number of 65,600."""
    settings = ("layer=linear_attention_elu_image", f"learner.normalize={normalize}", f"dim={dim}", "num_heads=1")
    layer, x = metattt.build(*settings), torch.randn(1, count, dim) + 2
    wanted = layer(x)[0]
    assert (layer.half()(x.half())[0].float() - wanted).norm() < 0.01 * wanted.norm()
