"""The examples run, at a small size; the notebook as it is."""

from __future__ import annotations

import importlib
import runpy
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import safetensors
import torch
from documents_for_tests import script
from hf_for_tests import llama, write_made
from refusals_for_tests import refusal
from runs_for_tests import Killed, log, steps, write_corpus
from torch.optim.swa_utils import AveragedModel

from metattt.checkpoints.trained import read_checkpoint
from metattt.data.text import TextData

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def load(name: str) -> ModuleType:
    return script(EXAMPLES / f"{name}.py")


def test_forecast(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    forecast = load("forecast")
    counts = [sum(p.numel() for p in forecast.Forecaster(name).parameters()) for name in forecast.WIDTHS]
    assert max(counts) < 1.02 * min(counts), "equal parameters"
    monkeypatch.setattr(forecast, "RATES", (1e-2,))
    found = forecast.main(steps=40)
    assert list(found) == ["the last value", "TTT-Linear", "attention", "GRU"]
    assert found["TTT-Linear"][0] < 0.8 * found["the last value"][0]
    assert len(capsys.readouterr().out.splitlines()) == 5


class TestErasing(load("erase_view").TestEraseTheLast):  # type: ignore[misc]
    """The conformance test of an example, as its reader runs it."""


def test_erasing(capsys: pytest.CaptureFixture[str]) -> None:
    assert load("erase_view").main() != 1
    assert "chunks" in capsys.readouterr().out


def test_a_layer_in_a_model_of_timm() -> None:
    found = load("timm_vit").main(steps=60)
    assert found["MTTT-Linear in every second block"] > 0.3, "chance is 0.1"


def test_a_layer_in_a_model_of_transformers() -> None:
    pytest.importorskip("transformers")
    found = load("transformers_llama").main(steps=20)
    assert found["TTT-Linear in two of three"] < 4.2, "a guess is ln 256 = 5.5"


def test_attached_layers_are_trained_alone_and_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that dies and is started again ends with the weights and the log of one that did not, bit for bit."""
    base = llama(vocab_size=257, max_position_embeddings=32)
    base.save_pretrained(tmp_path / "base")
    example, corpus = load("attach_lightning"), str(write_corpus(tmp_path / "texts"))

    def run(folder: str) -> Any:
        data = TextData(corpus, context_length=16, batch_size=2, validation_max_bytes=600)
        return example.main(str(tmp_path / "base"), tmp_path / folder, data, "bytes", steps=6, every=3)

    def dies(self: Any, trainer: Any, *rest: Any) -> None:
        if trainer.global_step == 5:
            raise Killed

    whole = run("whole")
    with monkeypatch.context() as patch:
        patch.setattr(example.divergence.Divergence, "on_train_batch_end", dies)
        with pytest.raises(Killed):
            run("again")
    assert steps(tmp_path / "again") == [3]
    again = run("again")
    assert log(tmp_path / "again") == log(tmp_path / "whole") != []

    new, held = dict(whole.named_parameters()), base.state_dict()
    for one in (whole, again):
        now = one.model.state_dict()
        assert now.keys() == held.keys() | new.keys() and all(torch.equal(now[name], held[name]) for name in held)
    assert all(torch.equal(value, new[name]) for name, value in again.named_parameters())
    assert all(new[name] != 0 for name in new if name.endswith(".scale"))  # all begin at 0
    written = read_checkpoint(tmp_path / "again")["state_dict"]
    assert {name.removeprefix("model.") for name in written} == new.keys(), "no pretrained weights"
    with safetensors.safe_open(tmp_path / "again" / "layers.safetensors", "pt") as file:
        assert set(file.keys()) == new.keys()
    module = example.tuning_module.PartTuning(again.model, example.recipes.AdamW(lr=1e-3), {})
    averages = AveragedModel(module)  # as Lightning's EMAWeightAveraging keeps and restores it
    assert averages.state_dict().keys() == {"n_averaged", *(f"module.{name}" for name in written)}
    averages.load_state_dict(averages.state_dict())
    written.pop(f"model.{min(new)}")
    refusal(lambda: module.load_state_dict(written), "the checkpoint is of other trained parameters")


def test_the_notebook(tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    file = shutil.copy(EXAMPLES / "ten_minutes.ipynb", tmp_path)
    notebook = nbformat.read(file, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "it is kept without outputs"
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert "worst difference" in printed and "Waves" in printed and (tmp_path / "runs" / "waves" / "loss_curve.png").is_file()


def test_a_kind_of_data_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES / "own_data")
    found = importlib.import_module("parity").main(2, str(tmp_path / "run"), "data.length=16", "trainer.accelerator=cpu")
    assert found["run"].accuracy.shape == (8,) and found["run"].sequences == 256


def test_a_document_is_read_once_and_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_made(tmp_path / "model", "layer=ttt_mlp")
    (tmp_path / "notes.txt").write_text("The key is under the third stone. " * 3)
    model, memory = str(tmp_path / "model"), str(tmp_path / "memory.safetensors")
    for words in (["read", model, str(tmp_path / "notes.txt"), memory], ["answer", model, memory, "Where is it? ", "And then? "]):
        monkeypatch.setattr("sys.argv", ["remember.py", *words])
        runpy.run_path(str(EXAMPLES / "remember.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "103 tokens" in said and said.count("Where is it? ") == said.count("And then? ") == 1
