"""Mamba-2 by flash-linear-attention's kernels: taken where they are there and agree, and nowhere else.

The kernels run on GPUs alone (`test_on_gpu.py`). Here a recurrence with their signature stands for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from metattt.mixers import Mamba2, by_fla
from metattt.mixers.duality import duality

CALLS: list[int] = []


def simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`h_t = exp(g_t) h_{t−1} + k_tᵀ v_t`, `o_t = scale q_t h_t`: layouts and defaults of fla's `chunk_simple_gla`."""
    CALLS.append(q.shape[1])
    assert q.dtype == k.dtype == v.dtype and q.shape == k.shape and g.dtype == torch.float32
    batch, length, heads, width = q.shape
    h = torch.zeros(batch, heads, width, v.shape[-1]) if initial_state is None else initial_state
    assert h.shape == (batch, heads, width, v.shape[-1]) and h.is_contiguous()
    rows = []
    for t in range(length):
        h = g[:, t, :, None, None].exp() * h + k[:, t].float().unsqueeze(-1) * v[:, t].float().unsqueeze(-2)
        rows.append((width**-0.5 if scale is None else scale) * (q[:, t].float().unsqueeze(-2) @ h).squeeze(-2))
    return torch.stack(rows, 1).to(v.dtype), h if output_final_state else None


@pytest.fixture(autouse=True)
def on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_fla, "DEVICES", ("cpu",))
    use(monkeypatch, simple_gla)


def use(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any] | None) -> None:
    monkeypatch.setattr(by_fla, "kernel", lambda: function)
    monkeypatch.setattr(by_fla, "_AGREES", {})
    CALLS.clear()


def layer() -> Mamba2:
    torch.manual_seed(0)
    return Mamba2(16, 4, d_state=8, ngroups=2, expand=2)


def both(monkeypatch: pytest.MonkeyPatch, length: int = 40, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, the memory and gradients of two calls under autocast, with the kernels and without."""
    found = []
    for function in (simple_gla, None):
        use(monkeypatch, function)
        mixer, x = layer(), torch.randn(2, length, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y, state = mixer(x, **options)
            later, _ = mixer(x, state)
        grads = torch.autograd.grad((y.float().square().sum() + later.float().sum()), [x, *mixer.parameters()])
        found.append([y, later, state.learner["memory"], *grads])
    return found[0], found[1]


@pytest.mark.parametrize("padded", [False, True])
def test_a_layer_in_16_bits_takes_them(padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding leaves the memory alone."""
    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[0, 25:] = not padded
    ours, plain = both(monkeypatch, mask=mask)
    assert not CALLS  # the second one had none
    for one, other in zip(ours, plain, strict=True):
        assert (one - other).abs().max() <= 0.03 * other.abs().max()
    use(monkeypatch, simple_gla)
    with torch.autocast("cpu", torch.bfloat16):
        layer()(torch.randn(1, 40, 16))
    assert CALLS == [80, 40]  # once to see whether they agree, and the call


RESET = torch.zeros(2, 40, dtype=torch.bool)
RESET[0, 7] = True


@pytest.mark.parametrize(
    ("length", "cast", "device", "options"),
    [(1, True, "cpu", {}), (15, True, "cpu", {}), (40, False, "cpu", {}), (40, True, "cuda", {}), (40, True, "cpu", {"reset": RESET})],
    ids=["a token", "few tokens", "full precision", "another device", "documents"],
)
def test_where_they_are_not_taken(
    length: int, cast: bool, device: str, options: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_fla, "DEVICES", (device,))
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        layer()(torch.randn(2, length, 16), **options)
    assert not CALLS


def scaled(*given: Any, scale: float, **options: Any) -> Any:
    return simple_gla(*given, **options)


def reversed_state(*given: Any, **options: Any) -> Any:
    y, h = simple_gla(*given, **options)
    return y, None if h is None else h.flip(2)


def without_gradient(q: Tensor, *given: Any, **options: Any) -> Any:
    return simple_gla(q.detach(), *given, **options)


def broken(*given: Any, **options: Any) -> Any:
    raise RuntimeError("0 active drivers")


def test_the_first_call_may_be_in_inference_mode() -> None:
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        layer()(torch.randn(1, 40, 16))
    assert list(by_fla._AGREES.values()) == [True]


@pytest.mark.parametrize("function", [scaled, reversed_state, without_gradient, broken])
def test_what_does_not_agree_is_not_taken(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another scale, another layout, a gradient that is not there, one that does not run: told apart by what it gives."""
    x = torch.randn(1, 40, 16)
    with torch.autocast("cpu", torch.bfloat16):
        use(monkeypatch, None)
        expected = layer()(x)[0]
        use(monkeypatch, function)
        assert torch.equal(layer()(x)[0], expected)
    assert list(by_fla._AGREES.values()) == [False]


def test_second_derivatives_are_those_of_the_reference() -> None:
    """The kernels have none, and would leave them out in silence."""
    given = [torch.randn(1, 20, 2, 4), -torch.rand(1, 20, 2), torch.randn(1, 20, 1, 3), torch.randn(1, 20, 1, 3)]
    given = [x.bfloat16().float().requires_grad_() for x in (*given, torch.zeros(1, 2, 4, 3))]
    found = []
    for matmul_dtype in (torch.bfloat16, None):
        y, _ = duality(*given[:5], None, 16, 0, matmul_dtype)
        first = torch.autograd.grad(y.square().sum(), given, create_graph=True)
        found.append(torch.autograd.grad(sum(x.square().sum() for x in first), given))
    assert CALLS == [80, 20]
    for one, other in zip(*found, strict=True):
        assert other.any() and (one - other).abs().max() <= 0.05 * other.abs().max()
