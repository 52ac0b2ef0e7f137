"""A run that diverges: what is not finite is noticed before the update, named, written down; stop, skip, roll back."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from processes_for_tests import two_processes
from torch import nn

from metattt.checkpoints.trained import read_checkpoint
from metattt.cli import main
from metattt.composition.compose import build, compose
from metattt.errors import MetaTTTError
from metattt.layer import TTTLayer
from metattt.training import divergence
from metattt.training.callbacks import LossCurve
from metattt.training.divergence import Divergence
from metattt.training.dump import Step, add_step, begin_dump, random_state, read_dump, set_random_state
from metattt.training.finite import block_of, listed, name_parameters, name_tokens, overflows
from metattt.training.snapshot import Snapshot
from metattt.training.text_module import LanguageModeling
from metattt.training.train import train

TINY = (
    "dim=16", "num_heads=2", "model.num_layers=2", "data.context_length=32", "data.batch_size=4", "trainer.accelerator=cpu",
    "training.lr=5e-3", "trainer.log_every_n_steps=1", "optimizer.mini_batch_size=8", "sample=false", "trainer.max_steps=6",
    "callbacks.checkpoint.every_steps=2", "callbacks.inner_health.every=0", "trainer.val_check_interval=6",
)  # fmt: skip
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for index in range(12):
        (folder / f"{index}.txt").write_text(f"document {index}\n" + "alpha beta gamma delta " * 12)
    return folder


@pytest.fixture
def settings(corpus: Path, tmp_path: Path) -> tuple[str, ...]:
    return (*TINY, f"data.path={corpus}", f"output_dir={tmp_path / 'run'}")


def spoil_loss(monkeypatch: pytest.MonkeyPatch, *steps: int, value: float = NAN, batch: int = 0) -> None:
    """The loss of a batch of these steps becomes `value` times itself, whatever the weights."""
    original = LanguageModeling.training_step

    def spoilt(self: LanguageModeling, ids: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = original(self, ids, batch_idx)
        here = batch_idx % self.trainer.accumulate_grad_batches == batch
        return loss * value if here and self.global_step + 1 in steps else loss

    monkeypatch.setattr(LanguageModeling, "training_step", spoilt)


def spoil_gradient(monkeypatch: pytest.MonkeyPatch, *steps: int, value: float = NAN) -> None:
    """A number in the gradient of layer 1, head 1."""

    def spoilt(self: LanguageModeling) -> None:
        if self.global_step + 1 in steps:
            self.model.blocks[1].layer.optimizer.lr_weight.grad[1, 3] = value  # type: ignore[union-attr,index]

    monkeypatch.setattr(LanguageModeling, "on_after_backward", spoilt)


def spoil_weights(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """A weight, after the update of a step."""
    original = LossCurve.on_train_batch_end

    def spoilt(self: Any, trainer: Any, module: Any, *rest: Any) -> None:
        original(self, trainer, module, *rest)
        if trainer.global_step == step:
            with torch.no_grad():
                module.model.blocks[0].ffn.up.weight[0, 0] = INF

    monkeypatch.setattr(LossCurve, "on_train_batch_end", spoilt)


@pytest.fixture
def history(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """The weights at the start and after every step, with Adam's second moment of one of them."""
    seen: list[dict[str, torch.Tensor]] = []
    original = LossCurve.on_train_batch_end

    def keep(trainer: Any, module: Any) -> None:
        weights = {name: p.detach().clone() for name, p in module.model.named_parameters()}
        weight = module.model.blocks[0].ffn.up.weight
        state = trainer.optimizers[0].state[weight]
        seen.append(weights | {"moment": state["exp_avg_sq"].clone() if state else torch.zeros_like(weight)})

    def kept(self: Any, trainer: Any, module: Any, *rest: Any) -> None:
        original(self, trainer, module, *rest)
        keep(trainer, module)

    monkeypatch.setattr(LossCurve, "on_train_batch_end", kept)
    monkeypatch.setattr(LossCurve, "on_train_start", lambda self, trainer, module: keep(trainer, module))
    return seen


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


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
    assert overflows([]) is None and overflows([torch.arange(3)]) is None


def test_parameters_are_named_by_layer_and_head() -> None:
    model = nn.Module()
    model.embedding = nn.Embedding(3, 16)
    model.blocks = nn.ModuleList(
        nn.ModuleDict({"layer": build("layer=ttt_linear", "dim=16", "num_heads=4")}) for _ in range(3)
    )
    assert name_parameters(model, gradients=False) == name_parameters(model, gradients=True) == []
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    layer: Any = model.blocks[1]["layer"]
    layer.optimizer.lr_weight.grad[2:, 0] = NAN
    layer.learner.init["w1"].grad[0, 1, 1] = INF
    layer.out.weight.grad[3] = -INF
    model.embedding.weight.grad.fill_(1e30)
    found = name_parameters(model, gradients=True)
    assert [one.layer for one in found] == [1, 1, 1, None]  # the backward pass comes to the embedding last
    assert {one.name: one.heads for one in found} == {
        "blocks.1.layer.optimizer.lr_weight": (2, 3),
        "blocks.1.layer.learner.init.w1": (0,),
        "blocks.1.layer.out.weight": (),
        "embedding.weight": (),
    }
    assert "blocks.1.layer.optimizer.lr_weight (heads 2–3)" in map(str, found)
    assert str(found[-1]) == "embedding.weight (too large to be squared)"
    assert name_parameters(model, gradients=False) == []


def test_places_are_named() -> None:
    assert [block_of(name) for name in ("blocks.12.layer.x", "model.blocks.0", "head.weight")] == [12, 0, None]
    assert listed([7, 0, 2, 3, 4]) == "0, 2–4, 7" and listed([]) == ""
    losses = torch.zeros(5, 4)
    assert name_tokens(losses) is None
    losses[1, 2:] = NAN
    assert name_tokens(losses) == "window 1 from token 3 on, of 5 windows of 4 tokens"
    losses[:, 3] = INF
    assert name_tokens(losses).endswith("window 2 from token 4 on and in 2 more, of 5 windows of 4 tokens")  # type: ignore[union-attr]
    assert name_tokens(losses * NAN) == "every token of 5 windows of 4 tokens"
    assert name_tokens(torch.tensor([0, NAN, NAN, 1])) == "images 1–2 of 4"


# -- what happens then -------------------------------------------------------------------------------------------------


def test_stop_names_what_it_found_and_the_step_can_be_computed_again(
    settings: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil_gradient(monkeypatch, 4)  # a checkpoint's step
    assert main(["train", *settings]) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("step ")]
    run, dump = tmp_path / "run", tmp_path / "run" / "divergence-step-4"
    named = "the gradient is not finite: layer 1: blocks.1.layer.optimizer.lr_weight (head 1)"
    assert error == [
        f"error: step 4: {named}. To look at it: metattt train replay={dump}",
        "lower training.lr (now 0.005: training.lr=0.0017), or the inner one (now 1: optimizer.base_lr=0.25)",
    ]
    assert read_checkpoint(run)["global_step"] == 2 and finite(run)
    assert {file.name for file in dump.iterdir()} == {"record.json", "model.safetensors", "step-0.safetensors"}
    assert not list(run.glob(".*"))
    with (run / "metrics.csv").open(newline="") as file:
        logged = [row["train/loss"] for row in csv.DictReader(file)]
    assert main(["train", f"replay={dump}"]) == 0
    shown = capsys.readouterr().out
    record = json.loads((dump / "record.json").read_text())
    assert record["step"] == 4 and record["run"]["config"]["dim"] == 16 and len(logged) == 3
    loss = next(line for line in shown.splitlines() if line.startswith("loss"))
    monkeypatch.undo()  # the same step of a run that nothing disturbs
    assert main(["train", *settings[:-1], f"output_dir={tmp_path / 'clean'}"]) == 0
    with (tmp_path / "clean" / "metrics.csv").open(newline="") as file:
        clean = [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]
    assert loss == f"loss    {clean[3]:.6g} of batch 0, [4, 33]"
    assert f"found   {named}" in shown and "forward finite" in shown and "tokens  finite" in shown
    assert "inner loops on the first batch" in shown


def test_replay_finds_the_first_module(
    settings: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *settings, "training.lr=1e30", "trainer.gradient_clip_val=null"]) == 2
    error = capsys.readouterr().err
    assert "step 2: the loss is nan (every token of 4 windows of 32 tokens); weights are not finite: all" in error
    assert main(["train", f"replay={tmp_path / 'run' / 'divergence-step-2'}"]) == 0
    shown = capsys.readouterr().out
    assert "forward not finite: blocks.0." in shown and "loss    nan of batch 0" in shown


def test_a_skipped_step_leaves_weights_and_moments(
    settings: tuple[str, ...],
    tmp_path: Path,
    history: list[dict[str, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spoil_loss(monkeypatch, 3, batch=1)
    accumulated = ("trainer.accumulate_grad_batches=2", "data.batch_size=2", "on_divergence=skip")
    assert main(["train", *settings, *accumulated]) == 0
    assert "step 3: the loss is nan" in (said := capsys.readouterr().err) and "Skipped (1 of the last 100" in said
    assert len(history) == 13  # before, and after each of two batches of six steps
    assert same(history[4], history[6]) and not same(history[6], history[8])
    steps = {
        float(state["step"]) for state in read_checkpoint(tmp_path / "run")["optimizer_states"][0]["state"].values()
    }
    assert steps == {5.0} and read_checkpoint(tmp_path / "run")["global_step"] == 6 and finite(tmp_path / "run")
    kept = [value for key, value in read_checkpoint(tmp_path / "run")["callbacks"].items() if "Divergence" in key]
    assert kept == [{"rollbacks": 0, "skipped": [3], "dumped": 1}]
    _, _, (step,) = read_dump(tmp_path / "run" / "divergence-step-3")
    assert [list(batch.shape) for batch in step.batches] == [[2, 33], [2, 33]]  # type: ignore[union-attr]


def test_a_rollback_takes_the_weights_of_the_last_checkpoint(
    settings: tuple[str, ...],
    tmp_path: Path,
    history: list[dict[str, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spoil_gradient(monkeypatch, 1, 4, value=INF)
    assert main(["train", *settings, "on_divergence=rollback"]) == 0
    said = capsys.readouterr().err
    assert "the weights of step 0 (rollback 1 of 3)" in said and "the weights of step 2 (rollback 2 of 3)" in said
    assert same(history[0], history[1])
    assert same(history[4], history[2]) and not same(history[3], history[2]) and not same(history[5], history[4])
    assert read_checkpoint(tmp_path / "run")["global_step"] == 6 and finite(tmp_path / "run")
    assert main(["train", f"resume={tmp_path / 'run'}", "trainer.max_steps=7", "on_divergence=stop"]) == 0


@pytest.mark.parametrize(
    ("policy", "limit", "ending"),
    [
        (
            "skip",
            "callbacks.divergence.max_skipped=1",
            "step 2: .*\n1 of the last 100 steps were skipped already: lower",
        ),
        ("rollback", "callbacks.divergence.max_rollbacks=2", "step 3: .*\n2 rollbacks did not help: lower training.lr"),
    ],
)
def test_a_run_that_does_not_recover_stops(
    settings: tuple[str, ...], policy: str, limit: str, ending: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spoil_loss(monkeypatch, *range(1, 9), value=INF)
    with pytest.raises(MetaTTTError, match=ending):
        train(compose(*settings, f"on_divergence={policy}", limit, "callbacks.divergence.dumps=1"))
    assert [one.name for one in (tmp_path / "run").glob("divergence*")] == ["divergence-step-1"]


@pytest.mark.parametrize("policy", ["stop", "skip", "rollback"])
def test_spoilt_weights_never_reach_a_checkpoint(
    settings: tuple[str, ...], policy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spoil_weights(monkeypatch, 4)
    run = compose(*settings, f"on_divergence={policy}")
    if policy == "rollback":
        assert train(run) == 0
    else:
        with pytest.raises(MetaTTTError, match=r"weights are not finite: layer 0: blocks\.0\.ffn\.up\.weight"):
            train(run)
    assert read_checkpoint(tmp_path / "run")["global_step"] == (6 if policy == "rollback" else 2)
    assert finite(tmp_path / "run")


def test_spoilt_weights_are_noticed_before_validation(
    settings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spoil_weights(monkeypatch, 6)
    with pytest.raises(MetaTTTError, match=r"weights are not finite.*\n.*on_divergence=rollback"):
        train(compose(*settings, "on_divergence=skip", "callbacks.checkpoint.every_steps=5"))
    assert read_checkpoint(tmp_path / "run")["global_step"] == 5


def test_a_disk_that_is_full_hides_nothing(
    settings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    spoil_loss(monkeypatch, 1)
    monkeypatch.setattr(divergence, "begin_dump", full)
    assert main(["train", *settings]) == 2
    assert "step 1: the loss is nan (not written down: [Errno 28] No space left" in capsys.readouterr().err


def test_layers_refuse_nan_again_after_a_run(settings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[TTTLayer] = []
    original = Divergence.on_fit_start

    def noted(self: Any, trainer: Any, module: Any) -> None:
        original(self, trainer, module)
        made.extend(one for one in module.modules() if isinstance(one, TTTLayer))
        assert not any(layer.refuse_nan for layer in made)

    monkeypatch.setattr(Divergence, "on_fit_start", noted)
    spoil_loss(monkeypatch, 1)
    with pytest.raises(MetaTTTError, match="step 1"):
        train(compose(*settings))
    assert made and all(layer.refuse_nan for layer in made)


def test_steps_from_forward_passes_are_dropped_by_themselves(
    settings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil_loss(monkeypatch, 2, value=INF)
    rest = [one for one in settings if not one.startswith("training")]
    given = [
        "training=zeroth_order",
        "on_divergence=skip",
        "trainer.max_steps=3",
        "callbacks.checkpoint.every_steps=1",
    ]
    assert main(["train", *rest, *given]) == 0
    assert "step 2: the loss is inf" in (said := capsys.readouterr().err) and "step 1: " not in said
    assert "step 3: " not in said


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("on_divergence=ignore", "on_divergence=ignore` is not allowed: choose one of stop, rollback, skip"),
        ("callbacks.divergence.dumps=-1", "callbacks.divergence.dumps=-1 is not allowed"),
    ],
)
def test_settings_are_checked(
    settings: tuple[str, ...], given: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *settings, given]) == 2
    assert expected in capsys.readouterr().err


def test_images_are_computed_again_as_they_were_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("timm")
    from metattt.training.image_module import ImageClassification

    def spoilt(self: Any) -> None:
        if self.global_step == 1:
            self.model.blocks[0].norm1.weight.grad[0] = NAN

    monkeypatch.setattr(ImageClassification, "on_after_backward", spoilt)
    given = [
        "experiment=digits_pixel", "dim=16", "num_heads=2", "model.depth=1", "data.batch_size=4", "trainer.max_steps=2",
        "training.mixup=0.5",
        "trainer.log_every_n_steps=1", f"output_dir={tmp_path / 'run'}", "callbacks.inner_health.every=0", "on_divergence=skip",
        "trainer.accelerator=cpu",
    ]  # fmt: skip
    code = main(["train", *given])
    output = capsys.readouterr()
    assert code == 0, output.err
    assert "step 2: the gradient is not finite: layer 0: blocks.0.norm1.weight" in output.err
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        logged = [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]
    assert main(["train", f"replay={tmp_path / 'run' / 'divergence-step-2'}"]) == 0
    assert f"loss    {logged[1]:.6g} of batch 0" in capsys.readouterr().out


# -- on disk, in memory ------------------------------------------------------------------------------------------------


def test_random_numbers_go_on_from_where_they_were() -> None:
    import numpy as np

    state = random_state(torch.device("cpu"))
    drawn = torch.rand(3), np.random.standard_normal(3)
    set_random_state(state, torch.device("cpu"))
    assert torch.equal(torch.rand(3), drawn[0]) and (np.random.standard_normal(3) == drawn[1]).all()
    half = random_state(torch.device("cpu"))  # NumPy keeps the second of two normal numbers
    later = np.random.standard_normal()
    set_random_state(half, torch.device("cpu"))
    assert np.random.standard_normal() == later


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    folder = tmp_path / "divergence-step-3"
    begin_dump(folder, {"processes": 1, "run": {}, "step": 3}, {"weight": torch.ones(2)})
    images = (torch.rand(2, 1, 4, 4), torch.tensor([1, 2]))
    add_step(folder, 0, Step([images, images], random_state(torch.device("cpu"))))
    return folder


def test_a_dump_is_read_as_it_was_written(dump: Path) -> None:
    record, weights, (step,) = read_dump(dump)
    assert record["step"] == 3 and torch.equal(weights["weight"], torch.ones(2))
    assert len(step.batches) == 2 and step.batches[0][1].tolist() == [1, 2]


@pytest.mark.parametrize("file", ["record.json", "model.safetensors", "step-0.safetensors"])
@pytest.mark.parametrize("damage", ["cut", "empty", "absent", "junk", "nested"])
def test_a_damaged_dump_is_one_line(dump: Path, file: str, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    content = (dump / file).read_bytes()
    (dump / file).unlink()
    if damage != "absent":
        damaged = {"cut": content[: len(content) // 2], "empty": b"", "junk": b"\x80\x04junk", "nested": b"[" * 100_000}
        (dump / file).write_bytes(damaged[damage])
    assert main(["train", f"replay={dump}"]) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1 and str(dump) in error[0]


@pytest.mark.parametrize(
    "content",
    [
        '{"version": 1}',
        '{"version": 1, "processes": -1}',
        '{"version": 99}',
        "[]",
        '{"version": 1, "processes": 1e400}',
    ],
)
def test_a_record_of_another_kind_is_one_line(dump: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    (dump / "record.json").write_text(content)
    assert main(["train", f"replay={dump}"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_snapshot_goes_back_to_before_the_first_step_too() -> None:
    module = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    start = [p.detach().clone() for p in module.parameters()]

    def step() -> None:
        module(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()

    fresh = Snapshot(module, [optimizer], 0)
    step()
    later = Snapshot(module, [optimizer], 1)
    values = [p.detach().clone() for p in module.parameters()]
    moments = {p: {key: value.clone() for key, value in state.items()} for p, state in optimizer.state.items()}
    step()
    optimizer.param_groups[0]["lr"] = 0.5
    later.restore()
    assert all(torch.equal(p, value) for p, value in zip(module.parameters(), values, strict=True))
    assert all(
        torch.equal(optimizer.state[p][key], value) for p, state in moments.items() for key, value in state.items()
    )
    fresh.restore()
    assert all(torch.equal(p, value) for p, value in zip(module.parameters(), start, strict=True))
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.5
    step()


# -- several processes -------------------------------------------------------------------------------------------------


def spoil_the_second(rank: int) -> None:
    """The loss of step 3 is NaN in the second process alone."""
    if rank == 1:
        spoil_loss(pytest.MonkeyPatch(), 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "policy"), [("ddp", "stop"), ("ddp", "rollback"), ("fsdp", "skip"), ("fsdp", "rollback")]
)
def test_processes_decide_alike(settings: tuple[str, ...], tmp_path: Path, strategy: str, policy: str) -> None:
    given = (*settings, f"trainer={strategy}", f"on_divergence={policy}")
    codes, output = two_processes(tmp_path, *given, first=spoil_the_second)
    assert codes == [2 * (policy == "stop")] * 2, output
    assert output.count("step 3: process 1: the loss is nan") == 1
    assert ("rollback 1 of 3" in output) == (policy == "rollback") and ("Skipped (1" in output) == (policy == "skip")
    assert read_checkpoint(tmp_path / "run")["global_step"] == (2 if policy == "stop" else 6) and finite(
        tmp_path / "run"
    )
    assert main(["train", f"replay={tmp_path / 'run' / 'divergence-step-3'}"]) == 0
