"""A window over data: every query, however the sequence is cut, masked and packed, against attention over all data
with a mask that is written out; and grouped-query heads against heads that are copied."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import metattt
from metattt.catalog.layer_measures import examine
from metattt.errors import MetaTTTError
from metattt.layer import TTTLayer
from metattt.learners import KernelEstimator
from metattt.optimizers import Append
from metattt.tasks import Reconstruction
from metattt.testing.specimen import randomize

DIM, HEADS = 8, 4
EXACT = {"rtol": 0, "atol": 1e-10}


def make(window: int | None, sinks: int = 0, kernel: str = "exponential", kv_heads: int | None = None) -> TTTLayer:
    task = Reconstruction(rope="full", kv_heads=kv_heads)
    layer = TTTLayer(DIM, HEADS, task, KernelEstimator(kernel, neighbours=2, window=window, sinks=sinks), Append())  # type: ignore[arg-type]
    layer.double()
    randomize(layer)
    return layer


def documents(reset: Tensor | None, mask: Tensor, t: int, b: int) -> tuple[list[int], list[int]]:
    """For a row of tokens: the number of its document, and its position there; in plain Python."""
    number, place, numbers, places = 0, 0, [], []
    for s in range(t):
        if reset is not None and reset[b, s]:
            number, place = number + 1, 0
        numbers.append(number)
        places.append(place)
        place += bool(mask[b, s])
    return numbers, places


def reference(layer: TTTLayer, x: Tensor, mask: Tensor | None = None, reset: Tensor | None = None) -> Tensor:
    """Softmax over all keys at once, with everything that a query must not see at −∞."""
    task, learner = layer.task, layer.learner
    batch, count, _ = x.shape
    real = torch.ones(batch, count, dtype=torch.bool) if mask is None else mask
    split = lambda y: y.unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2)  # noqa: E731
    q, k, v = (split(F.linear(x, getattr(task, name).weight)) for name in ("q", "k", "v"))  # type: ignore[union-attr]
    rows = []
    for b in range(batch):
        numbers, places = documents(reset, real, count, b)
        seen = torch.zeros(count, count, dtype=torch.bool)
        for t in range(count):
            for s in range(t + 1):
                near = places[s] > places[t] - learner.window or places[s] < learner.sinks  # type: ignore[operator]
                seen[t, s] = bool(real[b, s]) and numbers[s] == numbers[t] and near
        angle = torch.tensor(places, dtype=x.dtype)[:, None] * 10000.0 ** (
            -torch.arange(0, DIM // HEADS, 2, dtype=x.dtype) / (DIM // HEADS)
        )
        turn = torch.polar(torch.ones_like(angle), angle)

        def turned(y: Tensor, turn: Tensor = turn) -> Tensor:
            pairs = torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous())
            return torch.view_as_real(pairs * turn).flatten(-2)

        keys, values = (y.repeat_interleave(HEADS // y.shape[0], 0) for y in (turned(k[b]), v[b]))
        scores = (turned(q[b]) @ keys.mT) / (DIM // HEADS) ** 0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0)
        rows.append((weights @ values).transpose(0, 1).flatten(1))
    y = torch.stack(rows)
    y = layer.out(layer.norm(y))  # type: ignore[misc]
    return y * real.unsqueeze(-1)


def flags(batch: int, count: int, kind: str) -> tuple[Tensor | None, Tensor | None]:
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(batch, count, generator=generator) < 0.7 if "mask" in kind else None
    reset = torch.rand(batch, count, generator=generator) < 0.12 if "reset" in kind else None
    if mask is not None:
        mask[0, 5:] = False  # a sequence that ends, and calls without a real token
        mask[1] = True
        if reset is not None:
            reset &= mask
    return mask, reset


def in_pieces(
    layer: TTTLayer, x: Tensor, cuts: list[int], mask: Tensor | None = None, reset: Tensor | None = None
) -> Tensor:
    state, rows = None, []
    for start, end in pairwise([0, *cuts, x.shape[1]]):
        some = [None if flag is None else flag[:, start:end] for flag in (mask, reset)]
        y, state = layer(x[:, start:end], state, mask=some[0], reset=some[1])
        rows.append(y)
    return torch.cat(rows, 1)


CUTS = {
    "one": [],
    "prefill, then tokens": list(range(7, 30)),
    "ragged": [1, 3, 4, 14, 15, 26],
    "tokens": list(range(1, 30)),
}


@pytest.mark.parametrize("kind", ["plain", "mask", "reset", "mask and reset"])
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize(
    ("window", "sinks", "kv_heads"), [(5, 0, None), (4, 2, 2), (1, 0, None), (3, 5, 1), (64, 3, None)]
)
def test_equals_masked_full_attention(window: int, sinks: int, kv_heads: int | None, cuts: str, kind: str) -> None:
    layer, x = make(window, sinks, kv_heads=kv_heads), torch.randn(3, 30, DIM, dtype=torch.float64)
    mask, reset = flags(3, 30, kind)
    found = in_pieces(layer, x, CUTS[cuts], mask, reset)
    torch.testing.assert_close(found, reference(layer, x, mask, reset), **EXACT)


@pytest.mark.parametrize(("window", "sinks"), [(4, 0), (4, 2)])
def test_gradients_of_masked_full_attention(window: int, sinks: int) -> None:
    layer, x = make(window, sinks), torch.randn(2, 18, DIM, dtype=torch.float64, requires_grad=True)
    mask, reset = flags(2, 18, "mask and reset")
    leaves = [x, *layer.parameters()]
    weight = torch.linspace(-1, 1, 18 * DIM * 2, dtype=x.dtype).cos().view(2, 18, DIM)
    for given in ((None, None), (mask, reset)):
        outputs = in_pieces(layer, x, [6, 7], *given), reference(layer, x, *given)
        found, wanted = (torch.autograd.grad((y * weight).sum(), leaves) for y in outputs)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, **EXACT)


@pytest.mark.parametrize("kernel", ["exponential", "gaussian", "nearest"])
def test_a_window_of_all_tokens_is_no_window(kernel: str) -> None:
    wide, whole = make(64, 0, kernel), make(None, 0, kernel)
    wide.load_state_dict(whole.state_dict())
    x = torch.randn(2, 30, DIM, dtype=torch.float64)
    torch.testing.assert_close(in_pieces(wide, x, [3, 17]), whole(x)[0], **EXACT)


@pytest.mark.parametrize("kernel", ["gaussian", "nearest"])
def test_other_kernels_see_a_window(kernel: str) -> None:
    """What lies before it changes nothing, what lies in it does."""
    layer, x = make(6, 0, kernel), torch.randn(2, 20, DIM, dtype=torch.float64)
    before, inside = x.clone(), x.clone()
    before[:, :14] = torch.randn(2, 14, DIM, dtype=torch.float64)
    inside[:, 14] += 1
    y = in_pieces(layer, x, [9])
    torch.testing.assert_close(in_pieces(layer, before, [9])[:, 19], y[:, 19], **EXACT)
    assert not torch.allclose(in_pieces(layer, inside, [9])[:, 19], y[:, 19])


@pytest.mark.parametrize("sinks", [0, 3])
def test_the_state_stops_growing_at_the_window(sinks: int) -> None:
    layer, state, sizes = make(6, sinks), None, []
    for _ in range(40):
        _, state = layer(torch.randn(2, 1, DIM, dtype=torch.float64), state)
        sizes.append(state.nbytes)
    assert len(set(sizes[5:])) == 1 and sizes[0] < sizes[5]
    assert state is not None and state.learner["k"].shape[2] == sinks + 5
    longer = layer(torch.randn(2, 40, DIM, dtype=torch.float64))[1]
    assert longer.nbytes == sizes[-1]


def test_grouped_heads_keep_fewer_keys() -> None:
    states = [make(None, kv_heads=g)(torch.randn(1, 16, DIM, dtype=torch.float64))[1] for g in (None, 2, 1)]
    sizes = [state.learner["k"].nbytes for state in states]
    assert sizes == [sizes[0], sizes[0] // 2, sizes[0] // 4]


@pytest.mark.parametrize("layer", ["ttt_linear", "delta_net", "nearest", "kernel_ridge", "attention"])
def test_grouped_heads_equal_copied_heads(layer: str) -> None:
    """Of every learner: as if the projections of k and v held each group's rows once for every head."""
    common = (f"layer={layer}", "dim=8", "num_heads=4", "task.views=separate")
    grouped, copied = metattt.build(*common, "task.kv_heads=2").double(), metattt.build(*common).double()
    values = grouped.state_dict()
    for name in ("task.k", "task.v", "task.conv_k", "task.conv_v"):
        if (name := f"{name}.weight") in values:
            values[name] = values[name].unflatten(0, (2, 2)).repeat_interleave(2, 0).flatten(0, 1)
    copied.load_state_dict(values)
    x = torch.randn(2, 21, 8, dtype=torch.float64)
    torch.testing.assert_close(in_pieces(grouped, x, [5, 6]), in_pieces(copied, x, []), **EXACT)


def test_the_table_of_layers_finds_a_constant_state_and_cost() -> None:
    known = examine("window_attention", 16, 2)
    assert known.cost_growth == 0 and known.causal
    assert known.state_bytes is not None and known.state_bytes[1:] == (0, 0)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["learner.window=0"], "learner.window=0 is not allowed: it must be at least 1, or null for all tokens"),
        (["learner.sinks=-1"], "learner.sinks=-1 is not allowed: it must be at least 0"),
        (["learner.window=null", "learner.sinks=2"], "learner.sinks=2 has no meaning without a window"),
        (["task.kv_heads=3"], "task.kv_heads=3 does not divide num_heads=4: choose from 1, 2, 4"),
        (["task.kv_heads=0"], "task.kv_heads=0 is not allowed: it must be at least 1"),
        (["task.kv_heads=2", "task.views=shared_qk"], "task.kv_heads=2 needs keys of their own"),
        (["learner.window=abc"], "expected an integer or null"),
    ],
)
def test_what_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(MetaTTTError) as error:
        metattt.build("layer=window_attention", "dim=8", "num_heads=4", *overrides)
    assert message in str(error.value) and str(error.value).count("\n") <= 1


def test_a_state_of_another_window_is_refused() -> None:
    x = torch.randn(2, 12, DIM, dtype=torch.float64)
    wide, narrow, full = make(8), make(4), make(None)
    for layer, state in ((narrow, wide(x)[1]), (narrow, full(x)[1]), (full, narrow(x)[1])):
        with pytest.raises(MetaTTTError, match="the state is from another layer"):
            layer(x, state)


def test_autocast_keeps_positions() -> None:
    layer = metattt.build("layer=window_attention", "learner.window=4", "learner.sinks=1", "dim=8", "num_heads=4")
    x = torch.randn(2, 13, 8)
    with torch.autocast("cpu", torch.bfloat16):
        found = in_pieces(layer, x, [6, 7])
    torch.testing.assert_close(found.float(), layer(x)[0], rtol=0.05, atol=0.05)
