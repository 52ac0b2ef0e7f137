"""The recorded step of one token: bit by bit what the model computes, or not taken."""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models_for_tests import small_model
from torch import Tensor, nn

from metattt.generation import sampling, static_step
from metattt.generation.recorder import NotStatic
from metattt.generation.static_step import WORTH, PlainStep, RecordedStep, one_token_step, static_state
from metattt.models.language_model import LanguageModel, LanguageModelState
from metattt.modules import TRACED
from metattt.testing.specimen import randomize

VOCAB = 11
ALIKE = (
    ("layer=ttt_linear",),
    ("layer=ttt_linear", "model=mamba_backbone", "optimizer.mini_batch_size=1"),
    ("layer=ttt_mlp", "model=mamba_backbone", "dim=64"),
    ("layer=gated_delta_net",),
    ("layer=gated_delta_product",),
    ("layer=kda",),
    ("layer=omega_net",),
    ("layer=mamba2_mixer",),
    ("layer=ttt_linear", "layer.form=dual"),
    ("layer=linear_attention",),
    ("layer=custom", "model.num_layers=1"),
)


def model_of(*overrides: str) -> LanguageModel:
    sizes = ("dim=32", "num_heads=2", "model.num_layers=2", f"model.vocab_size={VOCAB}")
    given = {one.partition("=")[0]: one for one in (*sizes, "model=language_model", *overrides)}
    model = small_model(*given.values(), dtype=torch.float32)
    for block in model.blocks:
        randomize(block.layer)  # type: ignore[arg-type]
    return model


def after(model: LanguageModel, lengths: tuple[int, ...] = (21, 37, 5)) -> LanguageModelState:
    """The state of sequences of several lengths."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    with torch.inference_mode():
        return model.step(torch.randint(VOCAB, mask.shape), None, mask)[1]


@pytest.mark.parametrize("overrides", ALIKE, ids=lambda given: "-".join(given))
def test_a_recorded_step_is_the_model(overrides: tuple[str, ...]) -> None:
    model = model_of(*overrides)
    with torch.inference_mode():
        state = after(model)
        recorded, plain = RecordedStep(model, state, TRACED), PlainStep(model, static_state(model, state)[0])
        for token in torch.randint(VOCAB, (40, 3)):
            assert torch.equal(recorded(token), plain(token))
        model.head.weight.mul_(2)  # a parameter that changes where it is
        assert torch.equal(recorded(token), plain(token))
        found = model.step(token[:, None], recorded.state)[0]
        assert torch.equal(found, model.step(token[:, None], plain.state)[0])


class Odd(nn.Module):
    """A layer of somebody's own, with one habit that a recording does not see."""

    def __init__(self, habit: Callable[[Tensor], Tensor]):
        super().__init__()
        self.habit, self.causal = habit, True

    def forward(self, x: Tensor, state: Any = None, **flags: Any) -> tuple[Tensor, Tensor]:
        return self.habit(x), x[:, -1]


HABITS: dict[str, Callable[[Tensor], Tensor]] = {
    "halved if large": lambda x: x / 2 if x.abs().sum() > 1e9 else x,
    "beside torch": lambda x: torch.from_numpy(x.detach().numpy() * 2),
    "through a transform": lambda x: torch.func.vmap(torch.sin)(x),
    "drawn by a generator": lambda x: x + torch.rand(x.shape, generator=torch.Generator().manual_seed(0)),
}


@pytest.mark.parametrize("habit", HABITS)
def test_what_a_recording_cannot_hold_is_computed_by_the_model(habit: str) -> None:
    model = LanguageModel(VOCAB, 16, 2, lambda: Odd(HABITS[habit])).eval()
    with torch.inference_mode():
        state = after(model, (6, 6))
        with pytest.raises(NotStatic):
            RecordedStep(model, state)
        assert isinstance(one_token_step(model, state, WORTH["cpu"]), PlainStep)


def test_what_python_counts_is_found_by_a_second_token() -> None:
    count = itertools.count(1)
    model = LanguageModel(VOCAB, 16, 1, lambda: Odd(lambda x: x * next(count) if x.shape[1] == 1 else x)).eval()
    with torch.inference_mode(), pytest.raises(NotStatic, match="no function of torch"):
        RecordedStep(model, after(model, (6, 6)))


class Before(Odd):
    """What the token before was, kept in a queue: torch finds tensors there, and what maps a state does not."""

    def forward(self, x: Tensor, state: Any = None, **flags: Any) -> tuple[Tensor, Any]:
        before = torch.zeros_like(x[:, :1]) if state is None else state[0]
        return torch.cat([before, x[:, :-1]], 1), deque([x[:, -1:]])


def test_a_state_with_tensors_where_they_are_not_looked_for_is_not_recorded() -> None:
    model = LanguageModel(VOCAB, 16, 1, lambda: Before(torch.sin)).eval()
    with torch.inference_mode(), pytest.raises(NotStatic, match="outside of tuples, lists and dictionaries"):
        RecordedStep(model, after(model, (6, 6)))


def test_hooks_are_called_for_every_token_on_every_device() -> None:
    model = model_of("layer=custom")
    model.blocks[0].register_forward_hook(lambda *_: None)
    with torch.inference_mode(), pytest.raises(NotStatic, match="has hooks"):
        static_state(model, after(model))  # what a CUDA graph starts with, too


GROWS = r"the state's .*layers.* before a token and .* after it"  # a cache of keys
UNLIKE = {"attention": GROWS, "titans_mag": GROWS, "titans": ".", "hook": "has hooks", "compiler": "is invalid"}


@pytest.mark.parametrize("change", UNLIKE)
def test_compile_true_says_when_steps_are_not_alike(change: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(f"layer={'custom' if change in ('hook', 'compiler') else change}")
    if change == "hook":
        model.blocks[0].register_forward_hook(lambda *_: None)
    monkeypatch.setattr(torch, "compile", lambda *_, **__: lambda *_: torch.ones(2).view(3))  # fails when it is called
    with torch.inference_mode(), caplog.at_level("WARNING", "metattt"):
        made = type(one_token_step(model, after(model), WORTH["cpu"], compiled=True))
    assert made is (RecordedStep if change == "compiler" else PlainStep) and re.search(f"is not compiled: .*{UNLIKE[change]}", caplog.text)


def test_long_texts_are_recorded_and_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = model_of("layer=ttt_linear"), torch.randint(VOCAB, (2, 7))

    def drawn() -> list[list[int]]:
        return [token.tolist() for token in sampling.generate(model, ids, 50, seed=1)]

    with torch.inference_mode():
        made = [type(one_token_step(model, after(model), count)) for count in (WORTH["cpu"] - 1, WORTH["cpu"])]
    assert made == [PlainStep, RecordedStep]
    recorded = drawn()
    monkeypatch.setitem(static_step.WORTH, "cpu", 1000)
    assert drawn() == recorded


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["ttt_linear", "gated_delta_net"])
def test_a_compiled_step(layer: str) -> None:
    model = model_of(f"layer={layer}")
    with torch.inference_mode():
        state = after(model)
        compiled, plain = RecordedStep(model, state, compiled=True), PlainStep(model, state.map(torch.clone))
        for token in torch.randint(VOCAB, (20, 3)):
            torch.testing.assert_close(compiled(token), plain(token), atol=1e-5, rtol=1e-5)
