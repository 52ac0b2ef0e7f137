"""Inner loops that learn nothing, and gates that have died: seen, named, and said once."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from oracle import Document
from refusals_for_tests import refusal
from runs_for_tests import write_corpus

from metattt.composition.compose import build, compose
from metattt.measures import inner_health
from metattt.measures.inner_health import Health, layer_health
from metattt.measures.inner_steps import read_in_pieces
from metattt.models import LanguageModel
from metattt.training.inner_health import InnerHealth, complaints
from metattt.training.train import train

SIZES = ("dim=16", "num_heads=2", "optimizer.mini_batch_size=4")


def kinds(layer: Any, x: torch.Tensor) -> list[str]:
    return [kind for kind, _ in complaints(layer_health(layer, x), layer)]


BY_TOKEN = ["delta_net", "gated_delta_net", "mamba2", "retnet", "linear_attention"]
BY_TOKEN += ["kda", "rwkv7", "gla", "delta_product", "omega_net", "preconditioned_delta_net"]


@pytest.mark.parametrize("layer", ["ttt_linear", "ttt_mlp", "lact", "atlas", *BY_TOKEN])
def test_layers_as_they_come_are_well(layer: str) -> None:
    sizes = SIZES[:2] if layer in BY_TOKEN else SIZES
    found = kinds(build(f"layer={layer}", *sizes).eval(), torch.randn(3, 40, 16))
    assert [kind for kind in found if kind != "worse"] == []  # noise has nothing that one token teaches about another


def test_losses_are_those_of_the_weights_before_and_after_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the oracle, which goes from token to token."""
    monkeypatch.setattr(inner_health, "TOKENS", 40)
    layer = build("layer=ttt_linear", *SIZES, "seed=0").double().eval()
    with torch.no_grad():
        layer.optimizer.lr_weight.mul_(20)
    x, losses = torch.randn(3, 8, 16, dtype=torch.float64), []
    found = layer_health(layer, x)
    for row in x:
        document = Document(layer, dict(layer.named_parameters()), row, [], 0)
        memory = document.begin()
        for t in range(8):
            first, (pair,) = t - t % 4, document.tokens.pairs[t]
            then = document.token(memory, t, first)
            weights = (document.w0, document.newest(memory), document.newest(then))
            losses.append(torch.stack([document.loss(w, first, t, pair) for w in weights]).detach())
            memory = document.commit(then) if t % 4 == 3 else then
    start, before, after = torch.stack(losses).unflatten(0, (3, 2, 4)).permute(3, 0, 1, 4, 2)  # [3, 2, H, place]
    for name, mean in (("before", before), ("after", after)):
        torch.testing.assert_close(getattr(found, name), mean.mean((0, 1)))
    for name, larger in (("rising", after > before), ("worse", before > start)):
        assert torch.equal(getattr(found, name), larger.double().mean((0, 1)))


def test_weights_after_sequences_of_different_lengths() -> None:
    layer, x, mask = build("ttt_mlp", dim=16, num_heads=2), torch.randn(2, 9, 16), torch.ones(2, 9, dtype=torch.bool)
    mask[1, :3] = False
    with torch.no_grad():
        states = (layer(x, mask=mask)[1], layer(x[1:, 3:])[1])
        (_, _, *padded), (_, _, *alone) = (next(read_in_pieces(layer, x[:, :4][-len(s.pos):], s, [4])) for s in states)
    for a, b in zip(padded, alone, strict=True):
        torch.testing.assert_close({name: w[1:] for name, w in a.items()}, b)


def test_steps_that_are_too_long_are_seen() -> None:
    layer = build("layer=delta_net", *SIZES[:2], "optimizer.base_lr=10").eval()
    x = torch.randn(3, 40, 16)
    (line,) = [line for kind, line in complaints(layer_health(layer, x), layer) if kind == "rising"]
    assert "every head learns nothing" in line and "optimizer.base_lr=2.5 (now 10)" in line
    assert kinds(build("layer=ttt_linear", *SIZES, "optimizer.base_lr=-1").eval(), x)[:1] == ["rising"]


@pytest.mark.parametrize("layer", ["ttt_mlp", "titans", "nested_transformer", "mdn"])
def test_one_head_is_named(layer: str) -> None:
    made = build(f"layer={layer}", *SIZES, "optimizer.base_lr=1").eval()
    rule: Any = made.optimizer
    step, gate = ("η κ", rule.write_gate) if layer == "mdn" else ("η", SimpleNamespace(bias=rule.lr_bias, weight=rule.lr_weight))
    with torch.no_grad():
        gate.bias[0], gate.weight[0] = -200.0, 0.0
    found = dict(complaints(layer_health(made, torch.randn(2, 16, 16)), made))
    assert found["eta"].startswith(f"head 0 learns nothing: {step} is at most")


def test_dead_gates_are_named_with_their_places() -> None:
    layer = build("layer=ttt_linear", *SIZES, "optimizer.token_steps=per_head", "optimizer.token_step_map=relu").eval()
    with torch.no_grad():
        layer.optimizer.token_step_offset[1, 2:] = -5.0  # type: ignore[index,operator]
    x = torch.randn(2, 16, 16)
    found = dict(complaints(layer_health(layer, x), layer))
    assert found["tau"].startswith("head 1 learns nothing at places 3–4 of 4 in the mini-batch: the token step τ is 0")
    layer = build("layer=ttt_linear", *SIZES, "optimizer.base_lr=0").eval()
    assert "optimizer.base_lr=1 (now 0)" in dict(complaints(layer_health(layer, x), layer))["eta"]
    for rule in ("momentum", "block_momentum"):
        layer = build("layer=ttt_linear", *SIZES, f"optimizer={rule}", "optimizer.decay=per_head").eval()
        assert "alpha" not in kinds(layer, x)
        with torch.no_grad():
            layer.optimizer.decay_gate.bias[1] = -3.0  # type: ignore[union-attr,index,operator]
        found = dict(complaints(layer_health(layer, x), layer))
        assert found["alpha"].startswith("head 1 forgets: α is at most 0.0") and "optimizer.decay_init=0.99" in found["alpha"]


@pytest.mark.parametrize("name", ["gated_delta_net", "mamba2", "kda"])
def test_rates_of_decay_that_are_drawn_are_no_fault_but_dead_ones_are(name: str) -> None:
    layer, x = build(f"layer={name}", "dim=16", "num_heads=2").eval(), torch.randn(2, 16, 16)
    gate: Any = getattr(layer.optimizer, "decay_gate", layer.optimizer)
    with torch.no_grad():
        (gate.up if name == "kda" else gate.weight).zero_()
        gate.bias.fill_(math.log(math.expm1(0.09)))  # Δ and A near the most that are drawn: α = 0.24
        gate.log_rate.fill_(math.log(16))
    assert "alpha" not in kinds(layer, x)
    with torch.no_grad():
        gate.log_rate[1] = 9.0
    found = dict(complaints(layer_health(layer, x), layer))["alpha"]
    assert found.startswith("head 1 forgets") and "decay_init" not in found  # which such a gate has no use for


def test_nan_is_no_progress() -> None:
    layer = build("layer=ttt_linear", *SIZES).eval()
    with torch.no_grad():
        layer.learner.init["w1"][1] = float("nan")
    assert layer_health(layer, torch.randn(2, 16, 16)).rising.mean(1)[1] == 1


def test_short_sequences_and_image_layers() -> None:
    assert "rising" not in kinds(build("layer=ttt_linear", *SIZES).eval(), torch.randn(2, 3, 16))
    layer = build("layer=mttt_linear", "dim=16", "num_heads=2").eval()
    found = layer_health(layer, torch.randn(2, 9, 16))
    assert found.before.shape == found.rising.shape == (2, 1) and not found.rising.any()


@pytest.mark.parametrize("layer", ["titans", "lact"])
def test_a_mini_batch_that_no_query_outlives_is_named(layer: str) -> None:
    """Such a layer trains on as if all were well, and cannot recall one token."""
    built = build(f"layer={layer}", *SIZES[:2], "optimizer.mini_batch_size=8").eval()
    longer = torch.randn(2, 9, 16)
    assert "unread" not in kinds(built, longer)
    other = torch.cat((torch.randn(2, 1, 16), longer[:, 1:]), 1)
    same = (built(longer)[0] == built(other)[0]).all(2).all(0)
    assert same[4:7].all() and not same[8]  # what is said is so: beyond the taps of convolutions, token 9 is the first to see token 1
    for length in (8, 5):
        found = layer_health(built, longer[:, :length])
        line = next(line for kind, line in complaints(found, built) if kind == "unread")
        assert f"the {length} tokens" in line and f"optimizer.mini_batch_size={length // 4} (now 8)" in line
    short = build(f"layer={layer}", *SIZES[:2], "optimizer.mini_batch_size=2").eval()
    assert "unread" not in kinds(short, longer[:, :5])


def test_a_run_says_it_once(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    look = create_autospec(InnerHealth.look, side_effect=InnerHealth.look)
    monkeypatch.setattr(InnerHealth, "look", look)
    given = (
        *SIZES, "model.num_layers=2", "data.context_length=32", "data.batch_size=4", "trainer.accelerator=cpu", "sample=false",
        f"data.path={write_corpus(tmp_path / 'text')}", f"output_dir={tmp_path / 'run'}", "trainer.max_steps=4", "optimizer.base_lr=0",
    )  # fmt: skip
    assert train(compose(*given)) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "learns nothing" in line]
    assert look.call_count == 4 and len(lines) == 2, lines
    assert lines[0].startswith("step 1: layer 0, every head learns nothing: η is at most 0")
    assert lines[1].startswith("step 1: layer 1, ")
    assert train(compose(f"resume={tmp_path / 'run'}", "trainer.max_steps=5")) == 0
    assert "learns nothing" not in capsys.readouterr().err
    for wrong in ("callbacks.inner_health.every=-1", "callbacks.inner_health.windows=0"):
        refusal(lambda wrong=wrong: train(compose(*given[:-2], wrong, "overwrite=true")), wrong)


def test_harm_is_said_when_it_is_seen_twice() -> None:
    model = LanguageModel(257, 16, 1, lambda: build("layer=ttt_mlp", *SIZES, "optimizer.base_lr=1e6"))
    zeros, ones = torch.zeros(2, 4), torch.ones(2, 4)
    ill = Health(ones, zeros, zeros, torch.stack((zeros[0], ones[0])), ones[:, 0], None, None, 2)
    module, watch = SimpleNamespace(model=model), InnerHealth()
    looks = [list(watch._news({0: health}, module)) for health in (ill, ill._replace(worse=zeros), ill, ill, ill)]
    assert [len(lines) for lines in looks] == [0, 0, 0, 1, 0]
    assert looks[3][0].startswith("layer 0, head 1 learns nothing: the inner loss of 100% of the tokens is larger with what")
    assert "optimizer.base_lr=2.5e+05 (now 1e+06)" in looks[3][0]


def test_models_without_inner_loops_have_nothing_to_say() -> None:
    model = LanguageModel(257, 8, 1, torch.nn.Identity)
    assert inner_health.inner_health(model, lambda: pytest.fail("it runs for nothing")) == {}
