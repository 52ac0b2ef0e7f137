"""Tokens of an open mini-batch, in C++ and in Triton's interpreter, against the equations in float64, wherever calls begin and
end. (In a layer and a model: `test_decode_on_gpu`.)"""

from __future__ import annotations

import copy
import pickle
from typing import Any, NamedTuple

import pytest
import torch
from mini_batches import WEIGHTS, Leaves, given_of, inputs, part, poisoned_memory, rearranged, written_out
from torch import Tensor

from metattt.inner.tokens import MiniBatches
from metattt.kernels.cpu import native_advance
from metattt.kernels.ttt_linear.native import NativeTTTLinear
from metattt.kernels.ttt_linear.on_gpu import TTTLinearOnGPU
from metattt.kernels.ttt_mlp.native import NativeTTTMLP
from metattt.kernels.ttt_mlp.on_gpu import TTTMLPOnGPU
from metattt.native import library as native

NATIVE: dict[str, Any] = {"linear": NativeTTTLinear(), "mlp": NativeTTTMLP()}
KERNELS = NATIVE | {"linear, triton": TTTLinearOnGPU(), "mlp, triton": TTTMLPOnGPU()}
BOUND = 1e-5
pytestmark = [
    pytest.mark.usefixtures("quick_interpreter"),
    pytest.mark.skipif(native.load(NATIVE["linear"].source, {"WIDTH": 16, "TOKENS": 16, "BIAS": 1}) is None, reason="no compiler"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="its tensors are on the CPU"),
]


def drawn(kind: str, d: int | None = None, b: int = 16, hidden: int | None = None, n: int = 1, **sizes: Any) -> Leaves:
    """What a kernel can take: Triton's TTT-MLP has four hidden units a feature, and no narrower heads."""
    d = d or (32 if "triton" in kind else 16)
    return inputs(kind.partition(",")[0], d, b, hidden=hidden or 4 * d, n=n, **sizes)


def given(kind: str, d: int | None = None, b: int = 16, **sizes: Any) -> MiniBatches:
    return given_of(drawn(kind, d, b, **sizes), b)


class Case(NamedTuple):
    """Calls one after the other."""

    kind: str
    start: int | tuple[int, ...]  # the place of the first token in its mini-batch; or one for each sequence
    counts: tuple[int, ...] = (1,)  # tokens of each call
    d: int | None = None
    hidden: int | None = None
    b: int = 16
    bias: bool = True
    tau: str = "per_head"
    odd: bool = False  # an update in float64, and all in memory of any strides


NATIVE_SIZES = (
    (16, 16, 16, True, "none"), (32, 48, 32, False, "shared"), (48, 80, 5, True, "per_head"), (64, 256, 16, True, "shared"),
    (96, 384, 16, False, "per_head"), (128, 64, 8, True, "shared"),
)  # fmt: skip
TRITON_SIZES = ((32, 128, 8, True, "none"), (32, 128, 16, False, "per_head"))
CASES = [
    *(
        Case(kind, start, (1,), *sizes)
        for kind in KERNELS
        for sizes in (NATIVE_SIZES if kind in NATIVE else TRITON_SIZES)
        for start in (0, 2, sizes[2] - 1)
    ),
    *(Case(kind, start) for kind in KERNELS for start in ((0, 15, 3), (15, 15, 15), (1, 2, 0), (0,))),
    *(Case(kind, 0, counts) for kind in NATIVE for counts in ((1,) * 32, (16, 16), (5, 11, 15, 1))),
    *(Case(kind, start, counts, b=8) for kind in KERNELS for start, counts in ((0, (3,)), (4, (4,)), ((7, 4), (1, 1)))),
    *(Case(kind, 13, (3,), odd=True) for kind in NATIVE),
]


def close(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == torch.float32 and found.shape == expected.shape
    error, size = (found.double() - expected).norm(), expected.norm()
    assert error <= BOUND * size, float(error / size)


def reached(x: Leaves, begins: list[int], end: int, b: int) -> tuple[list[Tensor], Leaves, Leaves]:
    """In float64, of sequences that begin at columns of their own: the outputs of each, W_a and M at the end."""
    of_tokens, apart = ("k", "v", "q", "eta"), []
    for row, begin in enumerate(begins):
        own = {name: t[row, None] if name in (*WEIGHTS, *of_tokens) else t for name, t in x.items()}
        own |= {name: own[name][:, :, begin:end] for name in of_tokens}
        apart.append(written_out({name: t.double() for name, t in own.items()}, b))
    ys, weights, updates = zip(*apart, strict=True)
    w, m = ({name: torch.cat([one[name] for one in each]) for name in each[0]} for each in (weights, updates))
    return list(ys), w, m


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_equals_the_equations(case: Case, own: bool) -> None:
    """Where memory that nobody has written is NaN. What is not given up stays as it is."""
    kernel, starts = KERNELS[case.kind], case.start if isinstance(case.start, tuple) else (case.start,) * 2
    end = max(starts)  # all sequences have their next token in one column, and begin in others
    begins = [end - start for start in starts]
    phase = case.start if isinstance(case.start, int) else torch.tensor(starts)
    x = drawn(case.kind, case.d, case.b, case.hidden, end + sum(case.counts), batch=len(starts), bias=case.bias, tau=case.tau)
    x = rearranged(x) if case.odd else x
    m = reached(x, begins, end, case.b)[2]
    weights = given_of(x, case.b).weights
    update: Any = {name: t.mT.contiguous().mT if case.odd else t.float() for name, t in m.items()} if end else None
    for count in case.counts:
        now = part(given_of(x, case.b), end, end + count, weights)
        assert kernel.reason_not_decoded(now) is None
        given_up, update_given_up = copy.deepcopy((now, update))
        with poisoned_memory():
            y, after, moved = kernel.advance(given_up, update_given_up, phase, own)
        end += count
        ys, w, m = reached(x, begins, end, case.b)
        close(y, torch.cat([one[:, :, -count:] for one in ys]))
        assert (moved is None) == (isinstance(phase, int) and phase + count == case.b)
        for name in weights:
            close(after[name], w[name])
            if moved is not None:
                close(moved[name], m[name])
        if own and isinstance(phase, Tensor):  # recorded steps read the same memory again
            assert all(after[name] is given_up.weights[name] for name in after)
        else:  # other states of the mini-batch hold the same
            assert all(torch.equal(given_up.weights[name], value) for name, value in weights.items())
        if update_given_up is not None and not own:
            assert all(torch.equal(update_given_up[name], value) for name, value in update.items())
        elif update_given_up is not None and moved is not None and not case.odd:
            assert all(moved[name] is update_given_up[name] for name in moved)
        weights, update, phase = after, moved, (phase + count) % case.b


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("name", ["k", "v", "q", "eta"])
def test_nan_is_not_lost(kind: str, name: str) -> None:
    """It reaches all that depends on it, and no other head or sequence."""
    x = given(kind)
    getattr(x.tokens.gates if name == "eta" else x.tokens.views, name)[0, 1] = float("nan")
    y, _, m = KERNELS[kind].advance(x, None, 0, False)
    assert m is not None
    assert y[0, 1].isnan().all() and not y[0, 0].isnan().any() and not y[1].isnan().any()
    assert m["w1"][0, 1].isnan().any() == (name != "q")
    assert not m["w1"][0, 0].isnan().any() and not m["w1"][1].isnan().any()


@pytest.mark.parametrize("kind", NATIVE)
def test_threads_give_the_same_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = given(kind, n=4, batch=5)
    expected = KERNELS[kind].advance(x, None, 0, False)
    monkeypatch.setattr(native_advance, "SMALLEST_SHARE", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    found = KERNELS[kind].advance(x, None, 0, False)
    assert torch.equal(found[0], expected[0]) and found[2] is not None and expected[2] is not None
    assert all(torch.equal(found[2][name], m) for name, m in expected[2].items())


@pytest.mark.parametrize("kind", NATIVE)
def test_no_sequences(kind: str) -> None:
    y, weights, update = KERNELS[kind].advance(given(kind, batch=0), None, 0, True)
    assert y.shape == (0, 2, 1, 16) and weights["w1"].shape[0] == 0 and update is not None


@pytest.mark.parametrize("kind", NATIVE)
def test_what_was_loaded_is_no_part_of_the_kernel(kind: str) -> None:
    """A layer is copied, pickled and sent to other processes together with its kernels, also after it has decoded."""
    x = given(kind)
    expected = KERNELS[kind].advance(x, None, 0, False)[0]
    for other in (copy.deepcopy(KERNELS[kind]), pickle.loads(pickle.dumps(KERNELS[kind]))):
        assert torch.equal(other.advance(x, None, 0, False)[0], expected)


@pytest.mark.parametrize("kind", KERNELS)
def test_what_is_not_accepted(kind: str) -> None:
    kernel, x = KERNELS[kind], given(kind)
    gated = x._replace(tokens=x.tokens.with_gates(alpha=x.tokens.gates.eta))
    doubled = x._replace(weights={name: w.double() for name, w in x.weights.items()})
    refused: list[tuple[MiniBatches, str]] = [(gated, "gate"), (doubled, "fp32"), (given(kind, 24), "24")]
    if "triton" in kind:
        refused.append((x._replace(tokens=x.tokens.with_views(k=x.tokens.views.k.double())), "float64"))
    else:
        refused.append((x._replace(tokens=x.tokens.with_views(k=x.tokens.views.k.bfloat16())), "fp32"))
    if "mlp" in kind:
        refused.append((given(kind, hidden=40), "40"))
    for one, why in refused:
        assert why in str(kernel.reason_not_decoded(one))
        whole = one.tokens.views.k.shape[-1] == 24 or why in ("gate", "40")  # said of whole mini-batches, too
        assert not whole or why in str(kernel.reason_rejected(one))
    assert kernel.reason_rejected(given(kind, b=5, n=5)) is not None
    assert kernel.reason_not_decoded(given(kind, b=5)) is None
