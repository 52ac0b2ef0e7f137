"""States as a user holds them: moved, saved, read by another process, reordered, of one layer and of a whole model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import metattt
from metattt.errors import MetaTTTError
from metattt.models import LanguageModel
from metattt.models.language_model import LanguageModelState
from metattt.state import State, tensors_of

NAMES = ["ttt_linear", "titans", "attention", "nested_transformer"]


def of_layer(name: str) -> tuple[Callable[[Tensor, Any], tuple[Tensor, State]], State, Tensor]:
    layer = metattt.build(f"layer={name}", "dim=16", "num_heads=2").eval()
    x = torch.randn(3, 7, 16)
    return layer, layer(x[:, :5])[1], x[:, 5:]


def of_model(name: str) -> tuple[Callable[[Tensor, Any], tuple[Tensor, Any]], LanguageModelState, Tensor]:
    model = LanguageModel(11, 16, 2, partial(metattt.build, f"layer={name}", "dim=16", "num_heads=2"))
    ids = torch.randint(11, (3, 7))
    return model.step, model.step(ids[:, :5])[1], ids[:, 5:]


MADE: dict[str, Callable[[str], Any]] = {"layer": of_layer, "model": of_model}
every_state = pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in MADE for name in NAMES])


@every_state
def test_moves_keep_integers_and_precision(kind: str, name: str) -> None:
    call, state, x = MADE[kind](name)
    before = [tensor.dtype for tensor in tensors_of(state)]
    for moved in (state.to("cpu"), state.to(device="cpu", copy=True), state.to(torch.float64).to(torch.float32)):
        assert [tensor.dtype for tensor in tensors_of(moved)] == before
        assert torch.equal(call(x, moved)[0], call(x, state)[0])
    for wide in (state.to("cpu", torch.float64), state.to(torch.ones(1).double())):
        wanted = [torch.float64 if dtype.is_floating_point else dtype for dtype in before]
        assert [tensor.dtype for tensor in tensors_of(wide)] == wanted and torch.int64 in wanted
    for narrow in (torch.bfloat16, torch.int64):
        with pytest.raises(MetaTTTError, match="float32 or wider"):
            state.to(narrow)


@every_state
def test_selected_sequences_go_on(kind: str, name: str) -> None:
    call, state, x = MADE[kind](name)
    index = torch.tensor([2, 0, 2])
    torch.testing.assert_close(call(x[index], state.select(index))[0], call(x, state)[0][index])


def test_the_state_of_a_model_of_other_layers() -> None:
    class Recurrent(torch.nn.GRU):
        def forward(self, x: Tensor, state: Any = None, mask: Any = None, reset: Any = None) -> Any:  # type: ignore[override]
            y, last = super().forward(x, None if state is None else state[0].transpose(0, 1).contiguous())
            return y, [last.transpose(0, 1)]

    model = LanguageModel(11, 16, 2, lambda: Recurrent(16, 16, batch_first=True), pre_conv=False)
    ids = torch.randint(11, (3, 7))
    _, state = model.step(ids[:, :5])
    index = torch.tensor([1, 2])
    torch.testing.assert_close(
        model.step(ids[index, 5:], state.select(index))[0], model.step(ids[:, 5:], state)[0][index]
    )
