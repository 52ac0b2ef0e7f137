"""What a run tells other programs, and its figures of merit: the same numbers everywhere, also when it goes on."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from refusals_for_tests import refusal
from runs_for_tests import TINY, column, write_corpus

from metattt.cli import main
from metattt.composition.compose import compose
from metattt.composition.instantiate import instantiate_model
from metattt.measures.flops import count_flops, flops_per_window
from metattt.training import step_statistics
from metattt.training.resume import check_paths, resumed
from metattt.training.train import train

SETTINGS = (*TINY, "data.path=texts", "output_dir=run", "~callbacks.loss_curve", "trainer.val_check_interval=2")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_corpus(tmp_path / "texts")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def logged(name: str) -> dict[int, float]:
    return column(Path("run"), name)


def stop_and_go_on(*overrides: str) -> None:
    """Four steps, and four more."""
    assert main(["train", *SETTINGS, *overrides, "trainer.max_steps=4"]) == 0
    assert main(["train", "resume=run", "trainer.max_steps=8"]) == 0


def test_tensorboard(here: Path) -> None:
    """Every step once: also where steps are taken again after a kill, as they were and in float64 too, and after another run in the
    same folder; more steps have their own schedule, from the first one after resuming on."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def check() -> None:
        events = EventAccumulator("run/tensorboard")
        events.Reload()
        for name in ("train/loss", "validation/loss", "gradient_norm"):
            found = [(event.step, event.value) for event in events.Scalars(name)]
            assert dict(found) == pytest.approx(logged(name), rel=1e-6) and len(found) == len(logged(name))

    given = [*SETTINGS, "logger=tensorboard", "overwrite=true", "trainer.precision=64-true", "callbacks.checkpoint.every_steps=4"]
    assert main(["train", *given, "trainer.max_steps=8"]) == 0
    expected = logged("train/loss")
    shutil.rmtree("run/checkpoints/step-00000008")
    assert main(["train", "resume=run"]) == 0 and logged("train/loss") == expected and max(expected) == 8
    check()
    rates = logged("lr")
    stop_and_go_on("logger=tensorboard", "seed=1", "overwrite=true")
    assert logged("lr")[5] == rates[5]
    check()


def test_a_logger_named_again_keeps_its_settings(here: Path) -> None:
    """`logger=wandb logger.wandb.id=mine` changes the id of the run that is resumed, and nothing else."""
    saved = compose(*SETTINGS, "logger=wandb", "logger.wandb.offline=true", "logger.wandb.project=p")
    cfg, _ = resumed(compose("resume=run", "logger=wandb", "logger.wandb.id=mine"), saved)
    assert (cfg.logger.wandb.offline, cfg.logger.wandb.project, cfg.logger.wandb.id) == (True, "p", "mine")
    refusal(lambda: check_paths(compose(*SETTINGS, "logger.csv.path=../log.csv"), ()), "add ++logger.csv.path=../log.csv")


def test_wandb_offline_and_mlflow(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert compose("logger=mlflow").logger.mlflow.tracking_uri == "sqlite:///mlflow.db"  # MLflow refuses folders
    stop_and_go_on("logger=wandb", "logger.wandb.offline=true", "logger.wandb.id=mine")
    assert len(list(Path("run/wandb").glob("offline-run-*-mine/*.wandb"))) == 2  # two lives of one run
    from mlflow.tracking import MlflowClient

    where = f"sqlite:///{here}/runs.db"
    own = ("logger=mlflow", f"logger.mlflow.tracking_uri={where}", "logger.mlflow.experiment_name=trial")
    assert main(["train", *SETTINGS, *own, "trainer.max_steps=4", "overwrite=true"]) == 0
    client = MlflowClient(where)
    (run,) = client.search_runs([client.get_experiment_by_name("trial").experiment_id])
    found = {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "train/loss")}
    assert found == pytest.approx(logged("train/loss"), rel=1e-6) and max(found) == 4
    assert run.data.params["dim"] == "8" and run.info.run_name == "linear_attention" and run.info.status == "FINISHED"


def test_parts_of_lightning_write_to_the_folder_of_the_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saving = "+callbacks.mine._target_=lightning.pytorch.callbacks.ModelCheckpoint"
    assert main(["train", *SETTINGS, "trainer.max_steps=2", "trainer.profiler=simple", saving]) == 0
    assert "profile     run/fit-profile.txt" in capsys.readouterr().out
    assert "run_training_batch" in Path("run/fit-profile.txt").read_text() and [*Path("run").rglob("*.ckpt")]


def test_figures_of_merit(here: Path) -> None:
    assert train(compose(*SETTINGS, "trainer.max_steps=6", "trainer.accumulate_grad_batches=2")) == 0
    rate, tflops = logged("tokens_per_second"), logged("model_tflops_per_second")
    per_token = 3 * flops_per_window(empty("layer=linear_attention", "model.ffn_dim=16"), 16) / 16
    assert min(tflops) == 2 and max(tflops) == 6
    for step, value in tflops.items():
        assert value == pytest.approx(rate[step] * per_token / 1e12, rel=1e-5)
    memory = logged("peak_memory_gib")
    assert len(memory) == 6 and all(0.05 < value < 100 for value in memory.values())


def empty(*overrides: str) -> Any:
    with torch.device("meta"):
        cfg = compose("dim=8", "num_heads=2", "model.num_layers=1", *overrides, job="language_model")
        return instantiate_model(cfg)


def test_a_tokenizer_that_loses_spaces_has_no_bits_per_byte(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "<s>": 1, "</s>": 2, "alpha": 3, "beta": 4}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save("words.json")
    assert main(["prepare", "source=texts", "tokenizer=words.json", "target=shards", "workers=1", "validation_fraction=0.3"]) == 0
    own = [word for word in TINY if "max_bytes" not in word]
    assert main(["train", *own, "data=shards", "data.path=shards", "output_dir=run", "trainer.max_steps=2"]) == 0
    assert "nats per token" in capsys.readouterr().out
    assert logged("validation/loss") and not logged("validation/bits_per_byte") and Path("run/loss_curve.png").is_file()


def test_operations_of_a_window() -> None:
    """The backbone by hand; of the layers, that an inner loop costs what its MLP costs, and that alike blocks are alike."""
    cfg = compose("dim=8", "num_heads=2", job="language_model")
    length, ffn, vocabulary = 64, 32, cfg.model.vocab_size
    sizes = ("model.ffn_dim=32", "model.pre_conv=false")
    backbone = 2 * length * (3 * 8 * ffn + 8 * vocabulary)
    attention = flops_per_window(empty("layer=attention", "layer.output_norm=false", *sizes), length) - backbone
    projections, scores = 4 * 2 * length * 8 * 8, 2 * 2 * length * length * 8
    assert attention == projections + scores
    one, three = (flops_per_window(empty("layer=ttt_mlp", f"model.num_layers={n}", *sizes), length) for n in (1, 3))
    assert three - one == pytest.approx(2 * (one - 2 * length * 8 * vocabulary))
    linear = flops_per_window(empty("layer=ttt_linear", *sizes), length)
    assert linear < one and flops_per_window(empty("layer=ttt_mlp", *sizes), 2 * length) == pytest.approx(2 * one)


def test_operations_of_steps_that_go_back_through_the_layers() -> None:
    model = ("model=ttt_e2e", "layer=window_attention", "learner.window=8", "model.mini_batch_size=8", "model.vocab_size=32")
    ids = torch.zeros(1, 24, dtype=torch.long, device="meta")
    for suffix in (1, 2):
        settings = (*model, "model.num_layers=2", f"model.suffix={suffix}")
        assert flops_per_window(empty(*settings), 24) == count_flops(empty(*settings), ids)


def test_a_model_of_ones_own_may_have_a_prefix() -> None:
    model = empty("layer=ttt_linear")
    model.prefix = "of its run"
    assert flops_per_window(model, 24) == flops_per_window(empty("layer=ttt_linear"), 24)


def test_a_layer_that_cannot_be_counted_ends_nothing() -> None:
    broken = SimpleNamespace(empty=Mock(side_effect=NotImplementedError))
    assert step_statistics._flops(SimpleNamespace(build=broken, device=torch.device("cpu")), 16) == 0.0
    assert broken.empty.called
