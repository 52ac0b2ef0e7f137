"""`metattt eval` and `metattt generate` on models of any origin: runs on shards, converted folders, published files."""

import shutil
from pathlib import Path

import pytest
import torch
from refusals_for_tests import refusal
from runs_for_tests import write_corpus
from tokenizer_for_tests import trained_tokenizer

from metattt.checkpoints.convert import convert
from metattt.composition.compose import compose
from metattt.data.prepare import prepare
from metattt.errors import MetaTTTError
from metattt.evaluation.evaluate import evaluate
from metattt.generation.generate import generate
from metattt.training.train import train

RUN = ("dim=16", "num_heads=2", "model.num_layers=1", "data.batch_size=4", "trainer.accelerator=cpu", "trainer.max_steps=4")


def said(capsys: pytest.CaptureFixture[str], checkpoint: Path, *words: str) -> str:
    """What `metattt generate` prints."""
    capsys.readouterr()
    generate(compose(f"checkpoint={checkpoint}", "device=cpu", *words, job="generate"))
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, a run on its bytes, that run under published names, and from there as ours again."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("runs")
    write_corpus(folder / "text")
    settings = (*RUN, "data.context_length=24", f"data.path={folder / 'text'}", f"output_dir={folder / 'linear'}")
    assert train(compose(*settings, "model=mamba_backbone")) == 0
    for source, target, direction in (("linear", "theirs", "to_published"), ("theirs", "ours", "from_published")):
        convert(compose(f"source={folder / source}", f"target={folder / target}", f"direction={direction}", job="convert"))
    return folder


def test_a_converted_folder_is_a_checkpoint(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (f"data.path={runs / 'text'}", "data.context_length=24", "device=cpu", "split=all", f"output_dir={tmp_path}")
    given = f"checkpoint=[{runs / 'linear'},{runs / 'ours'},{runs / 'theirs' / 'model.safetensors'}]"
    found = evaluate(compose(given, "data.batch_size=4", *text, job="eval"))
    assert list(found) == ["linear", "ours", "theirs"] and len({one.loss for one in found.values()}) == 1
    refusal(lambda: evaluate(compose(f"checkpoint={runs / 'ours'}", job="eval")), "ours comes with no text: add data.path=")
    with pytest.raises(MetaTTTError, match=r"data\.validation_max_tokens does not apply"):
        evaluate(compose(f"checkpoint={runs / 'ours'}", *text, "data.validation_max_tokens=9", job="eval"))
    words = ("prompt=alpha", "max_new_tokens=20", "seed=1")
    (text_,) = {said(capsys, runs / name, *words) for name in ("linear", "ours", "theirs")}
    assert text_.startswith("alpha")


def test_a_run_on_shards_keeps_its_tokenizer(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tokenizer.json"
    trained_tokenizer(runs / "text", file)
    places = (f"source={runs / 'text'}", f"target={tmp_path / 'shards'}", f"tokenizer={file}")
    assert prepare(compose(*places, "validation_fraction=0.3", "workers=1", job="prepare")) == 0
    shards = ("data=shards", f"data.path={tmp_path / 'shards'}", "data.context_length=16", "data.validation_max_tokens=200")
    model = ("model=transformer_backbone", "model.vocab_size=400", f"output_dir={tmp_path / 'run'}")
    assert train(compose(*RUN, *shards, *model)) == 0
    shutil.rmtree(tmp_path / "shards")  # the checkpoint knows its tokenizer without them
    file.rename(tmp_path / "away.json")
    convert(compose(f"source={tmp_path / 'run'}", f"target={tmp_path / 'theirs'}", "direction=to_published", job="convert"))
    losses = set()
    for checkpoint in (tmp_path / "run", tmp_path / "theirs"):
        options = (f"data.path={runs / 'text'}", "data.context_length=16", "split=all", f"output_dir={tmp_path / 'eval'}")
        scores = evaluate(compose(f"checkpoint={checkpoint}", *options, "device=cpu", job="eval"))[checkpoint.name]
        losses.add(scores.loss)
        assert scores.bytes.sum() > 1.5 * scores.tokens  # a token is several bytes
        assert said(capsys, checkpoint, "prompt=alpha beta", "max_new_tokens=5").startswith("alpha beta")
    assert len(losses) == 1
    (tmp_path / "theirs" / "tokenizer.json").unlink()
    refusal(lambda: said(capsys, tmp_path / "theirs"), "has 400 tokens, and no tokenizer.json says which: add tokenizer=")
    assert said(capsys, tmp_path / "theirs", f"tokenizer={tmp_path / 'away.json'}", "max_new_tokens=2")
