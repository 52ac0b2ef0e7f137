"""Tokens of an open mini-batch through the Triton decode step, in a layer: on a card, or under Triton's interpreter."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from mini_batches import given_of, inputs
from models_for_tests import small_model
from operation_cases import DEVICE
from torch import Tensor

from metattt import State, TTTLayer
from metattt.generation import sampling
from metattt.generation.sampling import generate
from metattt.generation.static_step import PlainStep, static_state, step_in_place
from metattt.kernels.triton.on_gpu import OnGPU
from metattt.kernels.ttt_linear.native import NativeTTTLinear
from metattt.kernels.ttt_linear.on_gpu import TTTLinearOnGPU
from metattt.kernels.ttt_mlp.on_gpu import TTTMLPOnGPU
from metattt.learners import MLP, Linear
from metattt.models.language_model import LanguageModel
from metattt.nested import tensors_of
from metattt.optimizers.gradient_descent import GradientDescent
from metattt.tasks.reconstruction import Reconstruction
from metattt.testing.specimen import Specimen, distance, state_distance

pytestmark = pytest.mark.usefixtures("quick_interpreter")

KERNELS: dict[str, Any] = {"linear": (TTTLinearOnGPU, Linear), "mlp": (TTTMLPOnGPU, MLP)}
BOUND = 1e-5
SIZE = 8


def pair(name: str, steps: Any = "shared") -> tuple[TTTLayer, TTTLayer, OnGPU]:
    """A layer that decodes by the kernel, alone, and the same one by the dual form."""
    made, learner = KERNELS[name]
    task, rule = lambda: Reconstruction(rope="mini_batch"), lambda: GradientDescent(SIZE, token_steps=steps)
    spec = Specimen(learner, task, rule, 32, 1, longest_mini_batch=SIZE)
    layer, dual = (spec.make(dtype=torch.float32, form=form).to(DEVICE) for form in ("auto", "dual"))
    kernel = made()
    kernel.device = DEVICE
    layer.plan.kernels = [kernel]
    return layer, dual, kernel


def counted(kernel: OnGPU, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every call of `advance` from here on."""
    calls, advance = list[int](), kernel.advance
    monkeypatch.setattr(kernel, "advance", lambda given, *rest: calls.append(given.tokens.views.k.shape[2]) or advance(given, *rest))
    return calls


def tokens(length: int) -> Tensor:
    return torch.randn(2, length, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE)


def go_on(layer: TTTLayer, x: Tensor, state: State | None, cuts: list[int], donate_state: bool) -> tuple[Tensor, State]:
    ys = []
    for start, end in itertools.pairwise([0, *cuts, x.shape[1]]):
        with torch.no_grad():
            y, state = layer(x[:, start:end], state, donate_state=donate_state and state is not None)
        ys.append(y)
    assert state is not None
    return torch.cat(ys, 1), state


def alike(dual: TTTLayer, found: tuple[Tensor, State], expected: tuple[Tensor, State]) -> None:
    assert distance(found[0], expected[0]) <= BOUND
    assert state_distance(dual, found[1], expected[1]) <= BOUND
    assert found[1].weights.keys() == expected[1].weights.keys() and found[1].phase == expected[1].phase


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("prefill", "donate_state"), [(1, True), (7, False), (8, True)])
def test_token_by_token(name: str, prefill: int, donate_state: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a prompt of any length, through a commit at least; the state after it is the dual form's."""
    layer, dual, kernel = pair(name)
    calls, x = counted(kernel, monkeypatch), tokens(prefill + 10)
    cuts = list(range(prefill, prefill + 10))
    alike(dual, go_on(layer, x, None, cuts, donate_state), go_on(dual, x, None, cuts, False))
    assert calls == ([prefill % SIZE] if prefill % SIZE else []) + [1] * 10


@pytest.mark.parametrize("by", ["native", "triton"])
def test_a_rule_that_carries_weights_in_place_of_an_update(by: str) -> None:
    """Without token steps the state of an open mini-batch is W_t, which no kernel reads: one that took it for the last
    commit gave wrong answers, and one that left its update there a state that the layer refused."""
    layer, dual, kernel = pair("linear", steps="none")
    if by == "native":
        layer.plan.kernels = [NativeTTTLinear(), *layer.plan.kernels]
    else:
        assert kernel.reason_not_decoded(given_of(inputs("linear", 32, tau="none", n=1))) is None  # it has no need of them
    x = tokens(12)
    expected = go_on(dual, x, None, [], False)
    with_graph = layer(x[:, :3])[1]
    alike(dual, go_on(layer, x, None, [5, 6], True), expected)
    rest, state = go_on(layer, x[:, 3:], with_graph.detach(), [1, 2], False)
    alike(dual, (torch.cat([expected[0][:, :3], rest], 1), state), expected)


@pytest.mark.parametrize(("name", "donate_state"), [("linear", False), ("mlp", True)])
def test_sequences_at_places_of_their_own(name: str, donate_state: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of 11 and 7 tokens: one is in its second mini-batch, the other about to complete its first."""
    layer, dual, kernel = pair(name)
    x, mask = tokens(21), torch.ones(2, 11, dtype=torch.bool, device=DEVICE)
    mask[1, 7:] = False
    after = []
    for each in (layer, dual):
        with torch.no_grad():
            after.append(each(x[:, :11], mask=mask)[1])
    calls = counted(kernel, monkeypatch)
    assert after[0].phase is None
    cuts = list(range(1, 10))
    alike(dual, go_on(layer, x[:, 11:], after[0], cuts, donate_state), go_on(dual, x[:, 11:], after[1], cuts, False))
    assert calls == [1] * 10


# -- a whole model: what a CUDA graph holds, without a graph -----------------------------------------------------------

STATIC = (
    "ttt_linear", "ttt_linear optimizer.token_steps=none", "ttt_mlp", "titans", "gated_delta_net", "mamba2", "mamba2_mixer",
    "rwkv7", "linear_attention", "mesa_net", "lact",
)  # fmt: skip


def model_of(layer: str, *overrides: str) -> LanguageModel:
    name, *rest = layer.split()
    sizes = ("dim=32", "num_heads=2", "model.num_layers=2", "model.vocab_size=40", *rest, *overrides)
    return small_model(f"layer={name}", *sizes, noise=0.05, dtype=torch.float32)


def addresses(state: Any) -> list[int]:
    return [x.data_ptr() for x in tensors_of(state)]


@pytest.mark.parametrize(("layer", "prompt"), [*((layer, 5) for layer in STATIC), ("titans", 16)])
def test_a_static_state_goes_on_as_any_other(layer: str, prompt: int) -> None:
    """Token by token, over the ends of mini-batches: the same logits from a state that stays at its addresses, while the
    state that it was made from stays as it is."""
    model = model_of(layer)
    ids = torch.randint(40, (3, prompt + 21))
    with torch.inference_mode():
        _, state = model.step(ids[:, :prompt])
        kept = state.map(torch.clone)
        static, token = static_state(model, state)
        places = addresses(static)
        assert len(set(places)) == len(places) and not set(places) & set(addresses(state))
        plain = PlainStep(model, state.map(torch.clone))
        for column in ids[:, prompt:].unbind(1):
            token.copy_(column)
            assert distance(step_in_place(model, token, static), plain(column)) <= BOUND
        assert addresses(static) == places
    assert all(torch.equal(x, old) for x, old in zip(tensors_of(state), tensors_of(kept), strict=True))


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"seed": 3, "stop": (1, 2, 5, 9, 17)}, {"seed": 4, "top_k": 7}])
def test_generation_from_a_static_state_ahead_of_the_host(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step is launched before the host knows the token: the same tokens, as many of them, and the same end."""
    model, ids = model_of("ttt_linear"), torch.randint(40, (3, 21))
    mask = torch.ones(3, 21, dtype=torch.bool)
    mask[1, :6] = False
    expected = torch.stack(list(generate(model, ids, 40, mask=mask, **settings)))
    steps: list[Tensor] = []

    def replayed(model: LanguageModel, state: Any, *_: Any) -> Any:
        """What a graph does, call by call."""
        static, token = static_state(model, state)
        return lambda drawn: steps.append(drawn) or step_in_place(model, token.copy_(drawn), static)

    monkeypatch.setattr(sampling, "_runs_ahead", lambda device: True)
    monkeypatch.setattr(sampling, "one_token_step", replayed)
    found = torch.stack(list(generate(model, ids, 40, mask=mask, **settings)))
    assert torch.equal(found, expected)
    assert len(steps) == min(len(found), 39)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no card")
@pytest.mark.parametrize("layer", ["ttt_linear", "ttt_mlp", "gated_delta_net", "attention"])
def test_a_cuda_graph_generates_the_same(layer: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(layer, "dim=64").cuda()
    ids = torch.randint(40, (3, 21), device="cuda")
    with caplog.at_level("DEBUG", "metattt"):
        found = torch.stack(list(generate(model, ids, 40, temperature=0)))
    said = "every token is a call of the model" if layer == "attention" else "the one-token step is a CUDA graph"
    assert said in caplog.text
    monkeypatch.setattr(sampling, "one_token_step", lambda model, state, *_: PlainStep(model, state))
    assert torch.equal(found, torch.stack(list(generate(model, ids, 40, temperature=0))))
