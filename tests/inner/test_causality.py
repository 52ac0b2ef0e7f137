"""A model that predicts the next token must not see it: every way to such a layer is refused before training, in a
line."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals_for_tests import refusal
from torch import Tensor, nn

from metattt import TTTLayer, load_model
from metattt.catalog.known_layers import known_layers
from metattt.checkpoints.folder import write_checkpoint
from metattt.checkpoints.record import RECORD, make_record
from metattt.composition.compose import build, compose
from metattt.composition.instantiate import instantiate_model
from metattt.generation.sampling import generate
from metattt.inner.causality import declared, found_out
from metattt.learners import Linear
from metattt.models.language_model import LanguageModel
from metattt.optimizers import Gates, GradientDescent
from metattt.state import Context, Tensors
from metattt.tasks import Reconstruction

ACAUSAL = {
    "layer=mttt_mlp": "optimizer.read=final (WholeSequence)",
    "layer=self_attention": "the learner GlobalEstimator",
    "layer=linear_attention_image": "layer=attention",
    "optimizer.read=block": "set optimizer.read=inclusive",
    "optimizer=block_momentum optimizer.read=block": "set optimizer.read=previous",
}
TINY = ("dim=16", "num_heads=2", "model.num_layers=2", "model.vocab_size=257")


@pytest.mark.parametrize("choice", ACAUSAL)
def test_the_command_line_refuses_to_train_it(choice: str, tmp_path: Path, told: Callable[..., str]) -> None:
    (tmp_path / "a.txt").write_text("the quick brown fox " * 200)
    output, where = tmp_path / "run", f"data.path={tmp_path / 'a.txt'}"
    text = (where, "data.context_length=16", f"output_dir={output}", "trainer.accelerator=cpu")
    error = told("train", "dim=16", "num_heads=2", "model.num_layers=1", *choice.split(), *text)
    assert "must not see it" in error and ACAUSAL[choice] in error
    assert not (output / "metrics.csv").exists()


def test_a_checkpoint_of_one_is_refused_by_every_command(tmp_path: Path, told: Callable[..., str]) -> None:
    choice = "layer=mttt_mlp"
    cfg = compose(*TINY, choice, f"data.path={tmp_path / 'a.txt'}", "data.context_length=16")
    (tmp_path / "a.txt").write_text("the quick brown fox " * 200)
    model = LanguageModel(257, 16, 2, lambda: build(choice, "dim=16", "num_heads=2"), causal=False)
    content = {RECORD: make_record(cfg), "global_step": 1}
    weights = {f"model.{name}": x for name, x in model.state_dict().items()}
    write_checkpoint(tmp_path / "checkpoints" / "step-00000001", content | {"state_dict": weights})
    refusal(partial(load_model, tmp_path), "must not see it")
    for command in (
        ["eval", f"checkpoint={tmp_path}", "device=cpu"],
        ["generate", f"checkpoint={tmp_path}", "prompt=a", "device=cpu"],
        ["train", f"init_from={tmp_path}", *TINY, choice, f"data.path={tmp_path / 'a.txt'}", f"output_dir={tmp_path / 'run'}"],
    ):
        assert "must not see it" in told(*command)


@pytest.mark.parametrize("name", known_layers())
def test_what_a_known_layer_declares_is_what_it_does(name: str) -> None:
    layer = build(f"layer={name}", "dim=16", "num_heads=2")
    assert found_out(layer, 16) is (not layer.causal)
    assert (declared(layer) is None) is layer.causal


class Foresight(GradientDescent):
    """Says nothing, and takes its step sizes from all tokens of the call."""

    def gates(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[Gates, Tensors]:
        gates, state = super().gates(x, state, ctx)
        return gates._replace(eta=gates.eta + x.mean((1, 2), keepdim=True).sigmoid()), state


class Module(nn.Module):
    """Any layer: a function of the tokens between a linear map and one that is zero at the start."""

    def __init__(self, mix: Callable[[Tensor], Tensor], zero: bool = False):
        super().__init__()
        self.mix, self.inward, self.out = mix, nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))
        if zero:
            nn.init.zeros_(self.out.weight)
            nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor, state: Any, mask: Any = None, reset: Any = None) -> tuple[Tensor, Any]:
        self.calls += 1
        return self.out(self.mix(self.inward(x))), state


def model(layer: Callable[[], nn.Module], **options: Any) -> LanguageModel:
    return LanguageModel(12, 8, 2, layer, **options)


@pytest.mark.parametrize(
    "layer",
    [
        lambda: TTTLayer(8, 2, Reconstruction(), Linear(), Foresight(4)),
        lambda: TTTLayer(8, 2, Reconstruction(), Linear(), Foresight(16)),
        lambda: Module(lambda x: x + x.mean(1, keepdim=True)),
        lambda: Module(lambda x: x.flip(1)),
        lambda: Module(lambda x: x + x.roll(-1, 1)),  # the next token alone
        lambda: Module(lambda x: x.mean(1, keepdim=True).expand_as(x), zero=True),
        lambda: Module(lambda x: x / x.abs().amax((1, 2), keepdim=True)),  # a scale for the whole call
    ],
)
def test_a_layer_that_does_not_declare_it_is_found_out(layer: Callable[[], nn.Module]) -> None:
    refusal(partial(model, layer), "does not declare causal = False")
    model(layer, causal=False)


def test_the_check_leaves_no_trace() -> None:
    states = []
    for causal in (True, False):
        torch.manual_seed(0)
        random.seed(0)
        made = model(lambda: Module(lambda x: torch.dropout(x.cumsum(1) * random.random(), 0.5, True)), causal=causal)
        states.append((dict(made.state_dict()), torch.get_rng_state(), made.training, random.random()))
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)
    assert made.blocks[0].layer.calls == 0


def test_a_layer_that_cannot_run_here_is_left_to_its_own_message() -> None:
    def picky(x: Tensor) -> Tensor:
        raise RuntimeError("this kernel takes CUDA tensors only")

    made = model(lambda: Module(picky))
    with pytest.raises(RuntimeError, match="CUDA tensors only"):
        made(torch.zeros(1, 4, dtype=torch.long))


def test_on_the_meta_device_what_is_declared_counts() -> None:
    with torch.device("meta"):
        made = instantiate_model(compose(*TINY, "layer=ttt_mlp"))
        assert made.embedding.weight.is_meta
        refusal(lambda: instantiate_model(compose(*TINY, "layer=mttt_mlp")), "optimizer=minibatch")
        lies = model(lambda: Module(lambda x: x.flip(1)))
    lies.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in lies.parameters():
            parameter.normal_()
    refusal(lies.check_causal, "does not declare")


def test_a_model_made_for_masked_tokens_predicts_no_next_token() -> None:
    made = model(lambda: Module(lambda x: x + x.mean(1, keepdim=True)), causal=False)
    ids = torch.zeros(1, 4, dtype=torch.long)
    assert made(ids).shape == (1, 4, 12)
    calls = lambda: made.cross_entropy(ids, ids), lambda: made.step(ids), lambda: next(generate(made, ids, 1))
    for call in (*calls, made.check_causal):
        refusal(call, "causal=true")


def test_a_layer_exchanged_after_construction_is_found_before_training(tmp_path: Path) -> None:
    from metattt.training.recipes import AdamW
    from metattt.training.text_module import LanguageModeling

    made = model(lambda: Module(lambda x: x.cumsum(1)))
    module = LanguageModeling(made, AdamW(), torch.ones(12), {})
    module.on_fit_start()
    made.blocks[1].layer = Module(lambda x: x.flip(1))
    refusal(module.on_fit_start, "must not see it")
