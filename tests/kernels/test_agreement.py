"""A Triton operation is compared with its equations on the device, before it is used there. The interpreter stands for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from operation_cases import DEVICE, OPERATIONS
from torch import Tensor

from metattt.kernels.triton import agreement, on_gpu
from metattt.kernels.triton.agreement import disagreement
from metattt.kernels.ttt_linear import op as linear

pytestmark = pytest.mark.usefixtures("quick_interpreter")


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_FOUND", {})
    monkeypatch.setattr(agreement, "MINI_BATCHES", 3)


def asked(name: str, dtype: torch.dtype = torch.float16, heads: int = 2, biased: bool = True, derivatives: bool = True) -> str | None:
    return disagreement(name, torch.device(DEVICE), dtype, 32, 8, heads, biased, biased, derivatives)


@pytest.mark.parametrize(("name", "dtype", "biased"), [("ttt_linear", torch.float16, True), ("ttt_mlp", torch.float32, False)])
def test_what_agrees_is_used(name: str, dtype: torch.dtype, biased: bool) -> None:
    with torch.inference_mode(), torch.autocast(DEVICE, torch.bfloat16):  # of the call that asks first
        assert name in OPERATIONS and asked(name, dtype, biased=biased) is None


def last_tokens(o: Tensor) -> Tensor:
    return torch.cat([o[:, :-8], 2 * o[:, -8:]], 1)


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o: Tensor) -> Tensor:
        return o.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:  # type: ignore[override]
        return torch.cat([cotangent[:, :8], cotangent[:, 8:] / 2], 1)


@pytest.mark.parametrize(
    ("wrong", "told"), [(last_tokens, "100% off"), (lambda o: o * float("nan"), "output is not finite"), (Halved.apply, "its gradient of")]
)
def test_what_does_not_agree_is_refused(
    wrong: Callable[[Tensor], Tensor], told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Outputs or gradients of one mini-batch alone: said once, and found out once for what is compiled alike."""
    run, calls = linear.ttt_linear, []

    def planted(**given: Any) -> tuple[Tensor, None]:
        calls.append(given)
        return wrong(run(**given)[0]), None

    monkeypatch.setattr(linear, "ttt_linear", planted)
    with caplog.at_level("WARNING", "metattt"):
        found = [asked("ttt_linear"), asked("ttt_linear"), asked("ttt_linear", heads=3)]
    assert all(said is not None and told in said for said in found) and found[0] == found[1] and len(calls) == 2
    assert (asked("ttt_linear", derivatives=False) is None) == told.startswith("its gradient")
    assert len(caplog.records) >= 2 and "the dual form computes instead" in caplog.text


def test_a_compiled_layer_asks_while_it_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(agreement, "_errors", lambda *key: seen.append(key) or {"output": 0.0})

    def choose(x: Tensor) -> Tensor:
        told = on_gpu.disagreement("ttt_linear", x.device, x.dtype, x.shape[-1], 8, 1, True, False, True)
        return x + 1 if told is None else x

    x = torch.ones(2, 32, device=DEVICE)
    assert torch.equal(torch.compile(choose, fullgraph=True, backend="eager")(x), x + 1)
    assert seen == [("ttt_linear", x.device, torch.float32, 32, 8, 1, True, False, True)]
