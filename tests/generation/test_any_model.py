"""`metattt eval` and `metattt generate` on models of any origin: runs on shards, converted folders, published files."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizer_for_tests import trained_tokenizer
from torch import Tensor

from metattt.checkpoints.convert import convert
from metattt.composition.compose import compose
from metattt.data import ByteTokenizer
from metattt.data.prepare import prepare
from metattt.errors import MetaTTTError
from metattt.evaluation.evaluate import evaluate
from metattt.generation.generate import generate
from metattt.generation.text import Continuation, ends
from metattt.training.train import train

RUN = (
    "dim=16",
    "num_heads=2",
    "model.num_layers=1",
    "data.batch_size=4",
    "trainer.accelerator=cpu",
    "trainer.max_steps=4",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, and a run on its bytes."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text").mkdir()
    for index in range(12):
        (folder / "text" / f"{index}.txt").write_text(f"document {index} " + "alpha beta gamma " * (10 + index))
    settings = (*RUN, "data.context_length=24", f"data.path={folder / 'text'}", f"output_dir={folder / 'linear'}")
    assert train(compose(*settings, "model=mamba_backbone")) == 0
    return folder


@pytest.fixture(scope="module")
def published(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run `linear` under published names, and from there as ours again."""
    folder = tmp_path_factory.mktemp("converted")
    convert(
        compose(f"source={runs / 'linear'}", f"target={folder / 'theirs'}", "direction=to_published", job="convert")
    )
    convert(compose(f"source={folder / 'theirs'}", f"target={folder / 'ours'}", job="convert"))
    return folder


def test_a_converted_folder_is_a_checkpoint(
    runs: Path, published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (f"data.path={runs / 'text'}", "data.context_length=24", "device=cpu", "split=all", f"output_dir={tmp_path}")
    given = f"checkpoint=[{runs / 'linear'},{published / 'ours'},{published / 'theirs' / 'model.safetensors'}]"
    found = evaluate(compose(given, "data.batch_size=4", *text, job="eval"))
    assert list(found) == ["linear", "ours", "theirs"] and len({one.loss for one in found.values()}) == 1
    with pytest.raises(MetaTTTError, match=r"ours comes with no text: add data\.path="):
        evaluate(compose(f"checkpoint={published / 'ours'}", job="eval"))
    with pytest.raises(MetaTTTError, match=r"data\.validation_max_tokens does not apply"):
        evaluate(compose(f"checkpoint={published / 'ours'}", *text, "data.validation_max_tokens=9", job="eval"))
    texts = []
    for checkpoint in (runs / "linear", published / "ours", published / "theirs"):
        capsys.readouterr()
        generate(
            compose(
                f"checkpoint={checkpoint}", "prompt=alpha", "max_new_tokens=20", "seed=1", "device=cpu", job="generate"
            )
        )
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 1 and texts[0].startswith("alpha")


def test_a_run_on_shards_keeps_its_tokenizer(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tokenizer.json"
    trained_tokenizer(runs / "text", file)
    settings = (
        f"source={runs / 'text'}",
        f"target={tmp_path / 'shards'}",
        "validation_fraction=0.3",
        "workers=1",
        f"tokenizer={file}",
    )
    assert prepare(compose(*settings, job="prepare")) == 0
    shards = (
        "data=shards",
        f"data.path={tmp_path / 'shards'}",
        "data.context_length=16",
        "data.validation_max_tokens=200",
    )
    assert (
        train(
            compose(
                *RUN, *shards, "model=transformer_backbone", "model.vocab_size=400", f"output_dir={tmp_path / 'run'}"
            )
        )
        == 0
    )
    shutil.rmtree(tmp_path / "shards")  # the checkpoint knows its tokenizer without them
    file.rename(tmp_path / "away.json")
    convert(
        compose(f"source={tmp_path / 'run'}", f"target={tmp_path / 'theirs'}", "direction=to_published", job="convert")
    )
    assert (tmp_path / "theirs" / "tokenizer.json").is_file()
    losses = set()
    for checkpoint in (tmp_path / "run", tmp_path / "theirs"):
        options = (
            f"data.path={runs / 'text'}",
            "data.context_length=16",
            "split=all",
            f"output_dir={tmp_path / 'eval'}",
            "device=cpu",
        )
        scores = evaluate(compose(f"checkpoint={checkpoint}", *options, job="eval"))[checkpoint.name]
        losses.add(scores.loss)
        assert scores.tokens < sum(one.stat().st_size for one in (runs / "text").iterdir())  # a token is several bytes
        assert scores.bytes.sum() > 1.5 * scores.tokens
        capsys.readouterr()
        generate(
            compose(f"checkpoint={checkpoint}", "prompt=alpha beta", "max_new_tokens=5", "device=cpu", job="generate")
        )
        assert capsys.readouterr().out.startswith("alpha beta")
    assert len(losses) == 1
    (tmp_path / "theirs" / "tokenizer.json").unlink()
    with pytest.raises(MetaTTTError, match=r"has 400 tokens, and no tokenizer\.json says which: add tokenizer="):
        generate(compose(f"checkpoint={tmp_path / 'theirs'}", job="generate"))
    generate(
        compose(
            f"checkpoint={tmp_path / 'theirs'}",
            f"tokenizer={tmp_path / 'away.json'}",
            "max_new_tokens=2",
            job="generate",
        )
    )


def test_generation_ends_where_a_text_ends(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def drawn(*_: object, stop: list[int], **__: object) -> Iterator[Tensor]:
        assert stop == [256]
        yield from (torch.tensor([byte]) for byte in b"one. two. three")

    monkeypatch.setattr("metattt.generation.generate.sample_tokens", drawn)
    generate(compose(f"checkpoint={runs / 'linear'}", "prompt=>", "stop=['. t','#']", "device=cpu", job="generate"))
    output = capsys.readouterr()
    assert output.out == ">one\n" and output.err.startswith("6 tokens")
    with pytest.raises(MetaTTTError, match="stop="):
        generate(compose(f"checkpoint={runs / 'linear'}", "stop=['']", job="generate"))


class Ending(ByteTokenizer):
    """Bytes, with a token after every document."""

    vocab_size, end = 258, 257


def test_the_token_of_end_ends_a_text() -> None:
    text = Continuation(Ending())
    assert [text.add(token) for token in (65, 257, 66)] == ["A", "", ""] and text.ended and ends(Ending()) == [256, 257]
