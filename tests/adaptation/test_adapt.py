"""`metattt adapt`: tables, files and errors, for a run of ours and for a model of Transformers."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hf_for_tests import llama
from runs_for_tests import TINY, rows, write_corpus

from metattt.adaptation.adapt import adapt
from metattt.adaptation.adapter import Adapter, Score
from metattt.cli import main
from metattt.composition.compose import compose

FEW = ("optimizer.mini_batch_size=32", "optimizer.base_lr=0.03", "batch_size=2")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on words, and texts of others."""
    folder = tmp_path_factory.mktemp("adapt")
    write_corpus(folder / "corpus")
    words = [f"data.path={folder / 'corpus'}", f"output_dir={folder / 'run'}", "trainer.max_steps=2"]
    assert main(["train", *TINY, *words]) == 0
    (folder / "texts").mkdir()
    for number, line in enumerate(("to be or not to be. ", "abc abc abd. ", "one two three. ")):
        (folder / "texts" / f"{number}.txt").write_text(line * (12 + 6 * number))
    return folder


def test_a_run_adapts_to_texts(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"checkpoint={run / 'run'}", f"data.path={run / 'texts'}", *FEW, f"output_dir={tmp_path}", "audit=3"]
    assert main(["adapt", *words, "fast=all"]) == 0
    out = capsys.readouterr().out
    assert "3 documents" in out and "no prediction saw its token" in out and "bits per byte by position" in out
    found = rows(tmp_path / "adapt.csv")
    size = sum(len((run / "texts" / f"{n}.txt").read_bytes()) for n in range(3))
    for name in ("as it is", "adapted"):  # every byte is predicted: a separator comes before each document
        assert sum(int(row["bytes"]) for row in found if row["model"] == name) == size
    assert (tmp_path / "adapt.png").stat().st_size > 5_000

    alone = adapt(compose(*words, "fast=all", "batch_size=1", "audit=0", job="adapt"))
    again = adapt(compose(*words, "fast=all", "audit=0", job="adapt"))
    assert alone["adapted"].bits_per_byte == pytest.approx(again["adapted"].bits_per_byte, rel=1e-5)
    assert again["adapted"].bits_per_byte < 0.9 * again["as it is"].bits_per_byte
    carried = adapt(compose(*words, "fast=all", "audit=0", "reset=false", "data.max_tokens=100", job="adapt"))
    assert carried["adapted"].tokens == 3 * 99


def test_learning_the_rest_of_a_document_takes_time_that_is_told(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Adapter.next_documents

    def slow(self: Adapter) -> None:
        time.sleep(0.2)
        plain(self)

    monkeypatch.setattr(Adapter, "next_documents", slow)
    words = [f"checkpoint={run / 'run'}", f"data.path={run / 'texts'}", f"output_dir={run / 'times'}", "reset=false"]
    found = adapt(compose(*words, *FEW, "audit=0", "data.max_tokens=9", job="adapt"))
    assert found["adapted"].seconds > 0.6


@pytest.mark.parametrize("audit", [1, 2])
def test_few_changes_show_a_text_that_was_learned_first(run: Path, audit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Adapter.read

    def learned_first(self: Adapter, ids: Any, logits: bool = False) -> Score:
        self.learn(ids)
        assert self.state is not None
        weights, self.state = self.state.weights, None
        self.state = self._begun(len(self.fast.token_ids(ids)[1]))._replace(weights=weights)
        return read(self, ids, logits)

    monkeypatch.setattr(Adapter, "read", learned_first)
    words = [f"checkpoint={run / 'run'}", f"data.path={run / 'texts'}", *FEW, f"audit={audit}", "data.max_tokens=97"]
    with pytest.raises(RuntimeError, match="depends on a token that it should not see"):
        adapt(compose(*words, job="adapt"))


@pytest.mark.parametrize(("override", "said"), [
    ("reset=false", "1 documents are equal to an earlier one"),
    ("optimizer.mini_batch_size=76", "no document is longer than optimizer.mini_batch_size=76"),
])  # fmt: skip
def test_texts_that_show_nothing_are_told(run: Path, override: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts").mkdir()
    for name in ("a", "b"):
        (tmp_path / "texts" / f"{name}.txt").write_text("the same text. " * 5)
    words = [f"checkpoint={run / 'run'}", f"data.path={tmp_path / 'texts'}", f"output_dir={tmp_path}"]
    assert main(["adapt", *words, *FEW, override]) == 0
    assert said in capsys.readouterr().out


def test_a_model_of_transformers_adapts_to_texts(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama(vocab_size=257, max_position_embeddings=128).save_pretrained(tmp_path / "llama")
    words = [f"checkpoint={tmp_path / 'llama'}", f"data.path={run / 'texts'}", *FEW, f"output_dir={tmp_path}"]
    assert main(["adapt", *words, "fast=mlp", "tokenizer=bytes", "audit=2"]) == 0
    out = capsys.readouterr().out
    assert "no prediction saw its token" in out and re.search(r"the model sees \d+ tokens before a mini-batch", out)
    assert main(["adapt", *words, "context=100"]) == 2
    assert "128 positions of the model: lower context" in capsys.readouterr().err
    assert main(["export", f"source={tmp_path / 'llama'}", f"target={tmp_path / 'exported'}"]) == 2
    assert "holds a model of type llama: only adapt and attach take it" in capsys.readouterr().err


def test_a_mistyped_folder_is_named(run: Path, told: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    said = told("adapt", "checkpoint=no_folder/llama", f"data.path={run / 'texts'}")
    assert "checkpoint=no_folder/llama is no folder here" in said and "traceback" not in said


@pytest.mark.parametrize(("override", "message"), [
    ("optimizer=momentum", "once per mini-batch"), ("optimizer=append", "`metattt adapt` sets"),
    ("fast=heads", "fast=heads names no parameter"),
    ("audit=-1", "audit=-1"), ("batch_size=0", "batch_size=0"), ("data.max_tokens=1", "data.max_tokens=1"),
    ("fast_weights=lora", "fast"),
    ("data.path=???", "no texts are given: add data.path="),
])  # fmt: skip
def test_mistakes_are_named(run: Path, override: str, message: str, told: Callable[..., str]) -> None:
    assert message in told("adapt", f"checkpoint={run / 'run'}", f"data.path={run / 'texts'}", override)
