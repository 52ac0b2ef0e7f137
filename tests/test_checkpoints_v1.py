"""Checkpoints of version 1 (`tests/checkpoints_v1`): they evaluate, generate, convert, resume and start runs as when
they were written."""

import csv
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from metattt.checkpoints.convert import convert
from metattt.checkpoints.trained import load_model, open_trained, read_checkpoint
from metattt.checkpoints.version1 import NAMES
from metattt.composition.compose import compose, load_components
from metattt.errors import MetaTTTError
from metattt.evaluation.evaluate import evaluate
from metattt.generation.generate import generate
from metattt.registry import REGISTERED
from metattt.training.train import train

HERE = Path(__file__).parent / "checkpoints_v1"
FIGURES: dict[str, dict[str, Any]] = json.loads((HERE / "figures.json").read_text())
CLOSE = 1e-6  # bit for bit on the machine that wrote them; another one may round otherwise


@pytest.mark.parametrize("name", [name for name in FIGURES if name != "images"])
def test_eval_gives_the_same_figures(name: str, tmp_path: Path) -> None:
    text = (f"data.path={HERE / 'text'}", "data.context_length=24", "split=all", "device=cpu", f"output_dir={tmp_path}")
    found = evaluate(compose(f"checkpoint={HERE / name}", *text, job="eval"))[name]
    assert math.isclose(found.loss, FIGURES[name]["loss"], rel_tol=CLOSE)
    assert math.isclose(found.bits_per_byte, FIGURES[name]["bits_per_byte"], rel_tol=CLOSE)


@pytest.mark.parametrize("name", ["linear", "sharded", "converted"])
def test_generation_is_the_same(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    generate(
        compose(
            f"checkpoint={HERE / name}", "prompt=The clerk", "max_new_tokens=24", "seed=1", "device=cpu", job="generate"
        )
    )
    assert capsys.readouterr().out == FIGURES[name]["generated"]


@pytest.mark.parametrize("name", ["linear", "module", "nested", "sharded", "images"])
def test_a_resumed_run_logs_the_same_losses(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(HERE / name, tmp_path / name)
    steps = max(map(int, FIGURES[name]["resumed"]))
    moved = [] if name == "images" else [f"data.path={HERE / 'text'}"]
    assert train(compose(f"resume={tmp_path / name}", f"trainer.max_steps={steps}", *moved)) == 0
    assert ("data    taken for the run's own" in capsys.readouterr().out) == bool(moved)
    with (tmp_path / name / "metrics.csv").open(newline="") as file:
        losses = {row["step"]: float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]}
    assert losses == pytest.approx(FIGURES[name]["resumed"], rel=CLOSE)
    record = read_checkpoint(tmp_path / name)["metattt"]
    assert record["version"] == 3 and record["config"]["layer"]["_component_"] == "layer=ttt_layer"
    assert '"_target_": "metattt' not in json.dumps(record)


def test_convert_and_init_from_take_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(
        compose(
            f"source={HERE / 'linear'}", f"target={tmp_path / 'published'}", "direction=to_published", job="convert"
        )
    )
    convert(compose(f"source={tmp_path / 'published'}", f"target={tmp_path / 'ours'}", job="convert"))
    before, after = (load_file(folder / "model.safetensors") for folder in (HERE / "converted", tmp_path / "ours"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    convert(
        compose(f"source={HERE / 'converted'}", f"target={tmp_path / 'again'}", "direction=to_published", job="convert")
    )
    alike = (
        "dim=8",
        "num_heads=2",
        "model.num_layers=1",
        "model.ffn_dim=16",
        "model.tie_embeddings=true",
        "trainer.accelerator=cpu",
    )
    data = (f"data.path={HERE / 'text'}", "data.context_length=24", "data.batch_size=4", "optimizer.mini_batch_size=8")
    alike += ("optimizer.token_step_map=relu",)  # as all checkpoints of these versions
    for name in ("linear", "converted", "sharded"):
        start = (f"init_from={HERE / name}", "training.lr=1e-12", "training.min_lr=1e-12", "trainer.max_steps=1")
        assert train(compose(*alike, *data, *start, f"output_dir={tmp_path / name}")) == 0
        assert "but here with" not in capsys.readouterr().out
        new, old = load_model(tmp_path / name)[0].state_dict(), load_model(HERE / name)[0].state_dict()
        torch.testing.assert_close(new, old, rtol=1e-5, atol=1e-8)


def test_the_table_names_what_is_registered() -> None:
    load_components(
        (
            "metattt.learners",
            "metattt.tasks",
            "metattt.optimizers",
            "metattt.models",
            "metattt.data",
            "metattt.training",
        )
    )
    named = {tuple(name.split("=")) for name in NAMES.values()}
    assert named - {("callback", "stop_on_interrupt")} <= REGISTERED.keys()  # which resume replaces


def test_a_class_that_is_gone_is_named(tmp_path: Path) -> None:
    content = read_checkpoint(HERE / "linear")
    content["metattt"] = torch.load(HERE / "linear" / "last.ckpt", weights_only=True)["metattt"]
    content["metattt"]["config"]["learner"]["_target_"] = "metattt.learners.old.Forgotten"
    torch.save(content, tmp_path / "last.ckpt")
    with pytest.raises(MetaTTTError, match=r"'metattt\.learners\.old\.Forgotten', which is no registered component"):
        open_trained(tmp_path)
    with pytest.raises(MetaTTTError, match=r"metattt\.learners\.old\.Forgotten` cannot be imported"):
        load_model(tmp_path, trust=["metattt.learners.old"])
