"""A model that predicts the next token must not see it: every way to such a layer is refused before training, in a
line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from metattt.catalog.known_layers import known_layers
from metattt.checkpoints.folder import write_checkpoint
from metattt.checkpoints.record import RECORD, make_record
from metattt.checkpoints.trained import load_model
from metattt.cli import main
from metattt.composition.compose import build, compose
from metattt.errors import MetaTTTError
from metattt.generation.sampling import generate
from metattt.inner.causality import Causality, declared, found_out
from metattt.layer import TTTLayer
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
def test_the_command_line_refuses_to_train_it(choice: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("the quick brown fox " * 200)
    output, where = tmp_path / "run", f"data.path={tmp_path / 'a.txt'}"
    text = (where, "data.context_length=16", f"output_dir={output}", "trainer.accelerator=cpu")
    assert main(["train", "dim=16", "num_heads=2", "model.num_layers=1", *choice.split(), *text]) == 2
    error = capsys.readouterr().err.strip()
    assert "must not see it" in error and ACAUSAL[choice] in error and error.count("\n") <= 1
    assert not (output / "metrics.csv").exists()


def test_a_checkpoint_of_one_is_refused(tmp_path: Path) -> None:
    choice = "layer=mttt_mlp"
    cfg = compose(*TINY, choice, "data.context_length=16")
    model = LanguageModel(257, 16, 2, lambda: build(choice, "dim=16", "num_heads=2"), causal=False)
    content = {RECORD: make_record(cfg), "global_step": 1}
    weights = {f"model.{name}": x for name, x in model.state_dict().items()}
    write_checkpoint(tmp_path / "checkpoints" / "step-00000001", content | {"state_dict": weights})
    with pytest.raises(MetaTTTError, match="must not see it"):
        load_model(tmp_path)


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
    with pytest.raises(MetaTTTError, match="does not declare causal = False"):
        model(layer)
    model(layer, causal=False)


def test_an_attribute_that_differs_is_another_layer() -> None:
    class Switch(Module):
        def __init__(self, future: bool):
            super().__init__(lambda x: x + x.mean(1, keepdim=True) if self.future else x.cumsum(1))
            self.future = future

    checked = Causality()
    checked.check(Switch(False), 8)
    with pytest.raises(MetaTTTError):
        checked.check(Switch(True), 8)


def test_a_layer_that_cannot_run_here_is_left_to_its_own_message() -> None:
    def picky(x: Tensor) -> Tensor:
        raise RuntimeError("this kernel takes CUDA tensors only")

    made = model(lambda: Module(picky))
    with pytest.raises(RuntimeError, match="CUDA tensors only"):
        made(torch.zeros(1, 4, dtype=torch.long))


def test_a_model_made_for_masked_tokens_predicts_no_next_token() -> None:
    made = model(lambda: Module(lambda x: x + x.mean(1, keepdim=True)), causal=False)
    ids = torch.zeros(1, 4, dtype=torch.long)
    assert made(ids).shape == (1, 4, 12)
    for call in (
        lambda: made.cross_entropy(ids, ids),
        lambda: made.step(ids),
        lambda: next(generate(made, ids, 1)),
        made.check_causal,
    ):
        with pytest.raises(MetaTTTError, match="causal=true"):
            call()
