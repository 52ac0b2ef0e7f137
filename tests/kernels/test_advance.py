"""Tokens of an open mini-batch, in C++ and in Triton's interpreter, against the rule written out in float64, however a caller
cuts a sequence. (In a layer and a model: `test_decode_on_gpu`.)"""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mini_batches import given_of, inputs, like, part, poisoned_memory
from torch import Tensor

from metattt.inner.tokens import MiniBatches, Tokens
from metattt.kernels.cpu import native_advance
from metattt.kernels.ttt_linear.native import NativeTTTLinear
from metattt.kernels.ttt_linear.on_gpu import TTTLinearOnGPU
from metattt.kernels.ttt_mlp.native import NativeTTTMLP
from metattt.kernels.ttt_mlp.on_gpu import TTTMLPOnGPU
from metattt.native import library as native
from metattt.optimizers.base import Gates
from metattt.tasks.base import Views

NATIVE: dict[str, Any] = {"linear": NativeTTTLinear(), "mlp": NativeTTTMLP()}
KERNELS = NATIVE | {"linear, triton": TTTLinearOnGPU(), "mlp, triton": TTTMLPOnGPU()}
BOUND = 1e-5
Weights = dict[str, Tensor]
pytestmark = [
    pytest.mark.usefixtures("quick_interpreter"),
    pytest.mark.skipif(
        native.load(NATIVE["linear"].source, {"WIDTH": 16, "TOKENS": 16, "BIAS": 1}) is None, reason="no compiler"
    ),
    pytest.mark.skipif(torch.cuda.is_available(), reason="its tensors are on the CPU"),
]


def given(kind: str, d: int | None = None, b: int = 16, n: int = 1, hidden: int | None = None, **sizes: Any) -> MiniBatches:
    """What a kernel can take: Triton's TTT-MLP has four hidden units a feature, and no narrower heads."""
    d = d or (32 if "triton" in kind else 16)
    return given_of(inputs(kind.partition(",")[0], d, b, hidden=hidden or 4 * d, n=n, **sizes), b)


def predict(x: Tensor, w: Weights, scale: Tensor, shift: Tensor) -> Tensor:
    """x + LN(f(x)) for `[B, H, d]`."""

    def layer(x: Tensor, number: int) -> Tensor:
        z = (x.unsqueeze(-2) @ w[f"w{number}"]).squeeze(-2)
        return z + w[f"b{number}"] if f"b{number}" in w else z

    z = layer(x, 1)
    z = layer(F.gelu(z, approximate="tanh"), 2) if "w2" in w else z
    return x + F.layer_norm(z, z.shape[-1:], eps=1e-6) * scale + shift


def written_out(x: MiniBatches, update: Weights | None, phases: Tensor) -> tuple[Tensor, Weights, Weights]:
    """What `advance` computes, in float64 with autograd: y, W_a and M after the tokens; `phases` `[B]` of the first."""
    k, v, q, eta = (t.double() for t in x.tokens.tensors if t is not None)
    scale, shift = (x.slow[name].double() for name in ("norm_scale", "norm_bias"))
    w = {name: value.double() for name, value in x.weights.items()}
    m = {name: torch.zeros_like(value) if update is None else update[name].double() for name, value in w.items()}
    ys = []
    for t in range(k.shape[2]):
        leaves = {name: value.detach().requires_grad_() for name, value in w.items()}
        loss = 0.5 * (predict(k[:, :, t], leaves, scale, shift) - v[:, :, t]).square().sum()
        gradients = dict(zip(w, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        tau = torch.ones(1, x.size) if x.tau is None else x.tau
        tau = tau.double()[:, phases + t].mT.expand(eta.shape[:2])  # [B, H]

        def spread(a: Tensor, like: Tensor) -> Tensor:
            return a.view(*a.shape, *(1,) * (like.ndim - a.ndim))

        m = {name: m[name] - spread(eta[:, :, t], g) * g for name, g in gradients.items()}
        now = {name: w[name] + spread(tau, m[name]) * m[name] for name in w}
        ys.append(predict(q[:, :, t], now, scale, shift))
        ends = phases + t == x.size - 1
        w = {name: torch.where(spread(ends, w[name]), now[name], w[name]) for name in w}
        m = {name: torch.where(spread(ends, m[name]), 0, m[name]) for name in m}
    return torch.stack(ys, 2), w, m


def close(found: Tensor, expected: Tensor, bound: float = BOUND) -> None:
    assert found.dtype == torch.float32 and found.shape == expected.shape
    error, size = (found.double() - expected).norm(), expected.norm()
    assert error <= bound * size, float(error / size)


def check(kind: str, x: MiniBatches, phase: int | Tensor, update: Weights | None, own: bool) -> None:
    """Against float64; what is not given up stays as it is."""
    kernel, batch = KERNELS[kind], x.tokens.k.shape[0]
    assert kernel.reason_not_decoded(x) is None
    y, w, m = written_out(x, update, phase if isinstance(phase, Tensor) else torch.full((batch,), phase))
    passed = copy.deepcopy((x, update))
    found, after, moved = kernel.advance(*passed, phase, own)
    close(found, y)
    for name in x.weights:
        close(after[name], w[name])
        if moved is not None:
            close(moved[name], m[name])
    assert (moved is None) == (not isinstance(phase, Tensor) and phase + x.tokens.k.shape[2] == x.size)
    if own and isinstance(phase, Tensor):  # recorded steps read the same memory again
        assert all(after[name] is passed[0].weights[name] for name in after)
    else:  # other states of the mini-batch hold the same
        assert all(torch.equal(passed[0].weights[name], value) for name, value in x.weights.items())
    if own:
        assert moved is None or update is None or all(moved[name] is passed[1][name] for name in moved)
    else:
        assert update is None or all(torch.equal(passed[1][name], value) for name, value in update.items())


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    ("kind", "d", "hidden", "b", "bias", "tau"),
    [
        *(
            (kind, *sizes)
            for kind in NATIVE
            for sizes in (
                (16, 16, 16, True, "none"), (32, 48, 32, False, "shared"), (48, 80, 5, True, "per_head"), (64, 256, 16, True, "shared"),
                (96, 384, 16, False, "per_head"), (128, 64, 8, True, "shared"),
            )
        ),
        *((f"{kind}, triton", 32, 128, *sizes) for kind in NATIVE for sizes in ((8, True, "none"), (16, False, "per_head"))),
    ],
)  # fmt: skip
def test_one_token(kind: str, d: int, hidden: int, b: int, bias: bool, tau: str, own: bool) -> None:
    x = given(kind, d, b, bias=bias, tau=tau, hidden=hidden)
    for phase, update in ((0, None), (2, like(x.weights)), (b - 1, like(x.weights))):
        check(kind, x, phase, update, own)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("phases", [[0, 15, 3], [15, 15, 15], [1, 2, 0]])
@pytest.mark.parametrize("kind", KERNELS)
def test_every_sequence_at_a_place_of_its_own(kind: str, phases: list[int], own: bool) -> None:
    x = given(kind, batch=3, tau="per_head")
    update = like(x.weights)
    for place, value in enumerate(phases):
        for m in update.values():
            m[place] *= value > 0
    check(kind, x, torch.tensor(phases), update, own)
    if 0 in phases:
        check(kind, x._replace(tokens=x.tokens.map(lambda t: t[:1]), weights={n: w[:1] for n, w in x.weights.items()}),
              torch.tensor([0]), None, own)  # fmt: skip


@pytest.mark.parametrize("cut", [[1] * 32, [16, 16], [5, 11, 15, 1]])
@pytest.mark.parametrize("kind", NATIVE)
def test_cut_anywhere_it_is_the_scan_of_whole_mini_batches(kind: str, cut: list[int]) -> None:
    x = given(kind, n=32, tau="per_head")
    expected, last = KERNELS[kind].scan(x, lambda _: pytest.fail("the reference was taken"))
    kept = copy.deepcopy(x.weights)
    for own in (False, True):
        weights, update, ys, place = copy.deepcopy(x.weights) if own else x.weights, None, [], 0
        for n in cut:
            y, weights, update = KERNELS[kind].advance(part(x, place, place + n, weights), update, place % 16, own)
            ys.append(y)
            place += n
        close(torch.cat(ys, 2), expected.double())
        assert update is None
        for name, w in weights.items():
            close(w, last[name].double())
    assert all(torch.equal(x.weights[name], w) for name, w in kept.items())


@pytest.mark.parametrize("kind", NATIVE)
def test_any_strides(kind: str) -> None:
    x = given(kind, n=3, tau="per_head")
    t = x.tokens
    views = Views(
        t.k.mT.contiguous().mT,  # rows are not contiguous
        t.v[:1].expand(2, -1, -1, -1),
        torch.cat([t.q, t.q], -1)[..., 16:],  # rows with gaps
    )
    tokens = Tokens(views, Gates(t.gates.eta[..., :1].expand(-1, -1, 3)))
    weights = {name: w[:1].expand_as(w) for name, w in x.weights.items()}
    update = {name: w.transpose(-1, -2).contiguous().transpose(-1, -2) for name, w in x.weights.items()}
    slow = {name: w.T.contiguous().T for name, w in x.slow.items()}
    assert x.tau is not None
    odd = x._replace(tokens=tokens, weights=weights, slow=slow, tau=torch.stack([x.tau, x.tau], -1)[..., 0])
    before = copy.deepcopy(weights)
    y, w, _ = written_out(odd, update, torch.tensor([13, 13]))
    for own in (False, True):
        found, after, _ = KERNELS[kind].advance(odd, update, 13, own)
        close(found, y)
        for name, value in after.items():
            close(value, w[name])
            assert torch.equal(weights[name], before[name])  # where memory is shared, even what is given up is copied


@pytest.mark.parametrize("kind", KERNELS)
def test_nothing_is_read_that_was_not_written(kind: str) -> None:
    x = given(kind, b=8, n=4)
    update = like(x.weights)
    calls = (x, update, 4), (part(x, 0, 3), None, 2), (part(x, 0, 1), update, torch.tensor([7, 4]))
    for (made, m, phase), own in itertools.product(calls, (False, True)):
        with poisoned_memory():
            found = KERNELS[kind].advance(*copy.deepcopy((made, m)), phase, own)
        assert not any(t.isnan().any() for t in (found[0], *found[1].values(), *(found[2] or {}).values()))


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("name", ["k", "v", "q", "eta"])
def test_nan_is_not_lost(kind: str, name: str) -> None:
    """It reaches all that depends on it, and no other head or sequence."""
    x = given(kind)
    getattr(x.tokens.gates if name == "eta" else x.tokens, name)[0, 1] = float("nan")
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


def test_a_state_of_another_type_is_not_misread() -> None:
    """The kernel is handed addresses: an update that somebody has widened is read as what it is."""
    x = given("linear", n=4)
    first, weights, update = NATIVE["linear"].advance(part(x, 0, 2), None, 0, False)
    assert update is not None
    expected = NATIVE["linear"].advance(part(x, 2, 4, weights), update, 2, False)[0]
    wide = {name: value.double() for name, value in update.items()}
    assert torch.equal(NATIVE["linear"].advance(part(x, 2, 4, weights), wide, 2, False)[0], expected)
    assert first.isfinite().all()
