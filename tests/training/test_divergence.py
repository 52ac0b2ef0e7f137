"""A run that diverges: what is not finite is noticed before the update and named; stop, or skip."""

from pathlib import Path
from typing import Any

import pytest
import torch
from processes_for_tests import two_processes
from refusals_for_tests import refusal
from runs_for_tests import TINY, after_step
from torch import nn

from metattt import MetaTTTError, TTTLayer
from metattt.checkpoints.trained import read_checkpoint
from metattt.cli import main
from metattt.composition.compose import build, compose
from metattt.training.callbacks import LossCurve
from metattt.training.divergence import diagnose, listed, not_finite, overflows
from metattt.training.text_module import LanguageModeling
from metattt.training.train import train

NAN, INF = float("nan"), float("inf")
SETTINGS = (
    "layer=ttt_linear", "dim=16", "model.num_layers=2", "data.context_length=32", "data.batch_size=4", "training.lr=5e-3",
    "optimizer.mini_batch_size=8", "trainer.max_steps=6", "callbacks.checkpoint.every_steps=2", "callbacks.inner_health.every=0",
    "trainer.val_check_interval=6",
)  # fmt: skip


@pytest.fixture
def settings(corpus: Path, tmp_path: Path) -> tuple[str, ...]:
    return (*TINY, *SETTINGS, f"data.path={corpus}", f"output_dir={tmp_path / 'run'}")


def spoil_loss(monkeypatch: pytest.MonkeyPatch, *steps: int, value: float = NAN, batch: int = 0) -> None:
    """The loss of a batch of these steps becomes `value` times itself, whatever the weights."""
    original = LanguageModeling.training_step

    def spoilt(self: LanguageModeling, ids: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = original(self, ids, batch_idx)
        here = batch_idx % self.trainer.accumulate_grad_batches == batch
        return loss * value if here and self.global_step + 1 in steps else loss

    monkeypatch.setattr(LanguageModeling, "training_step", spoilt)


@pytest.fixture
def history(monkeypatch: pytest.MonkeyPatch) -> list[list[torch.Tensor]]:
    """The weights at the start and after every batch, with Adam's second moments."""
    seen: list[list[torch.Tensor]] = []

    def keep(self: Any, trainer: Any, module: Any, *_: Any) -> None:
        moments = [state["exp_avg_sq"].clone() for state in trainer.optimizers[0].state.values()]
        seen.append([*(p.detach().clone() for p in module.model.parameters()), *moments])

    for moment in ("on_train_batch_end", "on_train_start"):  # where it does nothing itself
        monkeypatch.setattr(LossCurve, moment, keep)
    return seen


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def finite(run: Path) -> bool:
    content = read_checkpoint(run)
    states = content["optimizer_states"][0]["state"].values()
    tensors = [*content["state_dict"].values(), *(value for state in states for value in state.values())]
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


# -- what is looked at -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1.0, 2.0], 0), ([1.0, NAN], 1), ([INF, 0.0], 1), ([-INF, INF], 1), ([3e30, 0.0], 1), ([1e15, 1e-30], 0)],
)
def test_a_norm_tells_what_is_not_finite(values: list[float], expected: int) -> None:
    flag = overflows([torch.zeros(3), torch.tensor(values), torch.ones(2, 2)])
    assert flag is not None and flag.item() == expected
    assert overflows([]) is overflows([torch.arange(3)]) is None


def test_parameters_are_named_by_layer_and_head() -> None:
    model = nn.Module()
    model.embedding = nn.Embedding(3, 16)
    model.blocks = nn.ModuleList(nn.ModuleDict({"layer": build("ttt_linear", dim=16, num_heads=4)}) for _ in range(3))
    assert not_finite(model, gradients=False) == not_finite(model, gradients=True) == []
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    layer: Any = model.blocks[1]["layer"]
    layer.optimizer.lr_weight.grad[2:, 0] = NAN
    layer.learner.init["w1"].grad[0, 1, 1] = INF
    layer.out.weight.grad[3] = -INF
    model.embedding.weight.grad.fill_(1e30)
    found = not_finite(model, gradients=True)
    assert set(found[:-1]) == {
        "layer 1: blocks.1.layer.optimizer.lr_weight (heads 2–3)", "layer 1: blocks.1.layer.learner.init.w1 (head 0)",
        "layer 1: blocks.1.layer.out.weight",
    }  # fmt: skip
    assert found[-1] == "embedding.weight (too large to be squared)"  # the backward pass comes to the embedding last
    assert not_finite(model, gradients=False) == []
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1.5e19 / parameter.numel() ** 0.5)
    assert "the norm of all gradients, or" in diagnose(model, [], lost=False)[1]
    assert listed([7, 0, 2, 3, 4]) == "0, 2–4, 7" and listed([]) == ""


# -- what happens then -------------------------------------------------------------------------------------------------


def test_stop_names_what_it_found(
    settings: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:

    def spoilt(self: Any) -> None:
        if self.global_step == 3:  # the next step's checkpoint is due
            self.model.blocks[1].layer.optimizer.lr_weight.grad[1, 3] = NAN

    monkeypatch.setattr(LanguageModeling, "on_after_backward", spoilt)
    assert main(["train", *settings]) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("step ")]
    assert error == [
        "error: step 4: the gradient is not finite: layer 1: blocks.1.layer.optimizer.lr_weight (head 1)",
        "       lower training.lr (now 0.005: training.lr=0.0017), or the inner one (now 1: optimizer.base_lr=0.25)",
    ]
    assert read_checkpoint(tmp_path / "run")["global_step"] == 2 and finite(tmp_path / "run")
    monkeypatch.undo()
    assert main(["train", *settings, "training.lr=1e30", "trainer.gradient_clip_val=null", "overwrite=true"]) == 2
    assert "step 2: the loss is nan; weights are not finite: all" in capsys.readouterr().err
    assert main(["train", *settings, "trainer.precision=16-true", "overwrite=true"]) == 2
    assert "6e-8 are 0, as Adam's eps; set trainer.precision=bf16-mixed" in capsys.readouterr().err


def test_a_skipped_step_leaves_weights_and_moments(
    settings: tuple[str, ...], tmp_path: Path, history: list[list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    spoil_loss(monkeypatch, 3, batch=1)
    accumulated = ("trainer.accumulate_grad_batches=2", "data.batch_size=2", "on_divergence=skip")
    assert main(["train", *settings, *accumulated]) == 0
    assert "step 3: the loss is nan" in (said := capsys.readouterr().err) and "Skipped (1 of the last 100" in said
    assert len(history) == 13  # before, and after each of two batches of six steps
    assert same(history[4], history[6]) and not same(history[6], history[8])
    content = read_checkpoint(tmp_path / "run")
    steps = {float(state["step"]) for state in content["optimizer_states"][0]["state"].values()}
    assert steps == {5.0} and content["global_step"] == 6 and finite(tmp_path / "run")
    assert [value for key, value in content["callbacks"].items() if "Divergence" in key] == [{"skipped": [3]}]


def test_a_validation_that_is_not_finite_is_said(
    settings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A training loss may be finite where validation texts are not: the run goes on, says what helps, and fails at last."""
    add = LanguageModeling.add_to_validation
    spoilt = lambda self, **figures: add(self, **{name: (NAN * total, count) for name, (total, count) in figures.items()})  # noqa: E731
    monkeypatch.setattr(LanguageModeling, "add_to_validation", spoilt)
    assert main(["train", *settings]) == 2 and read_checkpoint(tmp_path / "run")["global_step"] == 6
    said = capsys.readouterr().err
    assert "step 6: the validation loss is nan; lower training.lr" in said and "the last validation loss is nan: lower" in said
    assert main(["train", *settings, "resume=auto"]) == 2  # nor does it become a result when it is called again
    assert "complete at step 6" in (said := capsys.readouterr().err) and "Its last validation loss is nan" in said


def test_a_run_that_does_not_recover_stops(settings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_loss(monkeypatch, *range(1, 9), value=INF)
    with pytest.raises(MetaTTTError, match=r"step 2: .*\n1 of the last 100 steps were skipped already: lower"):
        train(compose(*settings, "on_divergence=skip", "callbacks.divergence.max_skipped=1"))


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_spoilt_weights_never_reach_a_checkpoint(
    settings: tuple[str, ...], policy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    after_step(monkeypatch, 4, lambda _, module: module.model.blocks[0].ffn.up.weight.data[0, 0].fill_(INF))
    refusal(lambda: train(compose(*settings, f"on_divergence={policy}")), "weights are not finite: layer 0: blocks.0.ffn.up.weight")
    assert read_checkpoint(tmp_path / "run")["global_step"] == 2 and finite(tmp_path / "run")


def test_layers_refuse_nan_again_after_a_run(settings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[TTTLayer, bool]] = []
    after_step(monkeypatch, 1, lambda _, module: made.extend((x, x.refuse_nan) for x in module.modules() if isinstance(x, TTTLayer)))
    spoil_loss(monkeypatch, 2)
    refusal(lambda: train(compose(*settings)), "step 2")
    assert made and all(layer.refuse_nan and not before for layer, before in made)


# -- several processes -------------------------------------------------------------------------------------------------


def spoil_the_second(rank: int) -> None:
    """The loss of step 3 is NaN in the second process alone."""
    if rank == 1:
        spoil_loss(pytest.MonkeyPatch(), 3)


@pytest.mark.parametrize(("strategy", "policy"), [("ddp", "stop"), ("fsdp", "skip")])
def test_processes_decide_alike(settings: tuple[str, ...], tmp_path: Path, strategy: str, policy: str) -> None:
    given = (*settings, f"trainer={strategy}", f"on_divergence={policy}")
    codes, output = two_processes(tmp_path, *given, first=spoil_the_second)
    assert codes == [2 * (policy == "stop")] * 2, output
    assert output.count("step 3: the loss of another process is not finite") == 1  # one says it for both
    assert ("Skipped (1" in output) == (policy == "skip")
    assert read_checkpoint(tmp_path / "run")["global_step"] == (2 if policy == "stop" else 6)
    assert finite(tmp_path / "run")
