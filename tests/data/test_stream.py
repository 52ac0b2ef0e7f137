"""Training on a stream: where its windows are, that a run goes on exactly, and what cannot be streamed."""

from __future__ import annotations

import csv
import gzip
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes_for_tests import two_processes

from metattt.cli import main
from metattt.composition.compose import compose
from metattt.data.stream import Reader, Stream, StreamData, StreamWindows
from metattt.data.text import ByteTokenizer
from metattt.data.windows import Batches
from metattt.errors import MetaTTTError
from metattt.training.callbacks import LossCurve
from metattt.training.train import train

TEXTS = [f"document {number} " + "abc " * (number % 7) for number in range(30)]
TINY = (
    "dim=16", "num_heads=2", "model.num_layers=1", "data=stream", "data.context_length=24", "data.batch_size=4",
    "data.validation_documents=3", "data.shuffle=5", "trainer.accelerator=cpu", "optimizer.mini_batch_size=8",
    "trainer.log_every_n_steps=1", "trainer.val_check_interval=2", "sample=false", "callbacks.checkpoint.every_steps=2",
    "callbacks.inner_health.every=0",
)  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Documents in three compressed files, with an empty one among them."""
    folder = tmp_path_factory.mktemp("stream")
    for number in range(3):
        with gzip.open(folder / f"{number}.jsonl.gz", "wt") as file:
            for text in [*TEXTS[number * 10 : number * 10 + 10], ""]:
                file.write(json.dumps({"text": text}) + "\n")
    return f"{folder}/*.jsonl.gz"


def reader(files: str, skip: int = 0) -> Reader:
    return Reader(Stream("json", None, "train", "text", files, skip), ByteTokenizer())


def all_tokens(texts: list[str]) -> np.ndarray:
    return np.concatenate([[256, *text.encode()] for text in texts])


def test_tokens_are_those_of_the_documents_again_and_again(files: str) -> None:
    once = all_tokens(TEXTS[2:])
    found = reader(files, skip=2).read(2 * len(once) + 10)
    assert np.array_equal(found, np.concatenate([once, once, once[:10]]))


@pytest.mark.parametrize("kind", ["jsonl.gz", "parquet", "csv", "txt"])
def test_a_bookmark_goes_on_at_any_token(kind: str, tmp_path: Path, files: str) -> None:
    if kind == "jsonl.gz":
        stream = Stream("json", None, "train", "text", files)
    elif kind == "txt":
        (tmp_path / "one.txt").write_text("two\nlines\n")
        (tmp_path / "two.txt").write_text("another document")
        stream = Stream("text", None, "train", "text", f"{tmp_path}/*.txt", sample_by="document")
    else:
        import pandas

        table = pandas.DataFrame({"text": TEXTS[:8], "other": range(8)})
        getattr(table, f"to_{kind}")(tmp_path / f"t.{kind}", index=False)
        stream = Stream(kind, None, "train", "text", str(tmp_path / f"t.{kind}"))
    expected = Reader(stream, ByteTokenizer()).read(120)
    for place in (0, 1, 11, 12, 13, 50, 119):
        first = Reader(stream, ByteTokenizer())
        first.read(place)
        kept = json.loads(json.dumps(first.bookmark()))
        second = Reader(stream, ByteTokenizer())
        second.go_to(kept)
        assert np.array_equal(second.read(120 - place), expected[place:]), place


def test_windows_of_a_block_are_all_there_in_another_order(files: str) -> None:
    width, block = 9, 6
    windows = StreamWindows(reader(files), width, block, seed=1)
    found = windows[list(range(3 * block))]
    plain = reader(files).read(3 * block * width).reshape(3, block, width)
    for number, expected in enumerate(plain):
        part = found[number * block : number * block + block]
        assert sorted(map(tuple, part)) == sorted(map(tuple, expected)) and not np.array_equal(part, expected)
    later = StreamWindows(reader(files), width, block, seed=1)
    later.bookmarks = dict(windows.bookmarks)
    later.start_at(2 * block + 1)
    assert later._number == 1 and np.array_equal(
        later[[2 * block + 1, 2 * block + 4]], found[[2 * block + 1, 2 * block + 4]]
    )
    with pytest.raises(ValueError, match="has passed"):
        later[[0]]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_processes_read_what_one_reads(world_size: int) -> None:
    together = list(Batches(8, 10, 3))
    parts = [list(Batches(8 // world_size, 10, 3, rank, world_size)) for rank in range(world_size)]
    assert [[number for part in parts for number in part[batch]] for batch in range(7)] == together


def test_what_is_held_out_is_not_trained_on(files: str) -> None:
    data = StreamData(files, context_length=7, validation_documents=4, shuffle=1)
    data.setup()
    held = all_tokens(TEXTS[:4])
    assert np.array_equal(np.asarray(data.windows("validation")[:]).ravel(), held[: len(held) // 8 * 8])  # type: ignore[index]
    trained = data.windows("train")[list(range(10))].ravel()
    assert np.array_equal(trained, all_tokens(TEXTS[4:])[:80])
    assert data.sample_document().decode() == TEXTS[0]
    assert "streamed" in data.describe()
    with pytest.raises(MetaTTTError, match="has no end"):
        len(data.windows("train"))


def losses(run: Path) -> dict[int, str]:
    with (run / "metrics.csv").open(newline="") as file:
        return {int(row["step"]): row["train/loss"] for row in csv.DictReader(file) if row["train/loss"]}


def validations(run: Path) -> list[str]:
    with (run / "metrics.csv").open(newline="") as file:
        return [row["validation/loss"] for row in csv.DictReader(file) if row["validation/loss"]]


@pytest.fixture(scope="module")
def whole(files: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    assert train(compose(*TINY, f"data.path='{files}'", f"output_dir={run}", "trainer.max_steps=8")) == 0
    return run


@pytest.mark.parametrize("stop", [2, 5])
def test_a_run_goes_on_exactly_and_not_from_the_beginning(
    files: str, tmp_path: Path, whole: Path, stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    end = LossCurve.on_train_batch_end

    def stopped(self: LossCurve, trainer: Any, *rest: Any) -> None:
        end(self, trainer, *rest)
        if trainer.global_step == stop:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(LossCurve, "on_train_batch_end", stopped)
        assert train(compose(*TINY, f"data.path='{files}'", f"output_dir={run}", "trainer.max_steps=8")) == 143
    begun: list[Any] = []
    original = Stream.texts

    def texts(self: Stream, place: Any = None) -> Any:
        begun.append(place)
        return original(self, place)

    monkeypatch.setattr(Stream, "texts", texts)
    assert train(compose(f"resume={run}")) == 0
    assert losses(run) == losses(whole) and validations(run) == validations(whole)
    assert begun[0] is None and begun[1] is not None, "what is held out, then the bookmark"


@pytest.mark.slow
def test_two_processes_train_as_one(files: str, tmp_path: Path, whole: Path) -> None:
    run = tmp_path / "run"
    given = (*TINY, f"data.path='{files}'", f"output_dir={run}", "trainer.max_steps=8", "trainer=ddp")
    codes, output = two_processes(tmp_path, *given)
    assert codes == [0, 0], output
    for step, loss in losses(run).items():
        assert float(loss) == pytest.approx(float(losses(whole)[step]), rel=1e-5)


def test_a_changed_stream_is_said(files: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "texts"
    shutil.copytree(Path(files).parent, folder)
    run = tmp_path / "run"
    given = (*TINY, f"data.path='{folder}/*.jsonl.gz'", f"output_dir={run}", "trainer.max_steps=4")
    assert train(compose(*given)) == 0
    with gzip.open(folder / "0.jsonl.gz", "wt") as file:
        file.write(json.dumps({"text": "something else that is held out " * 9}) + "\n")
    capsys.readouterr()
    assert main(["train", f"resume={run}", "trainer.max_steps=6"]) in (0, 2)
    said = capsys.readouterr()
    assert "has changed" in said.out + said.err or "no such place" in said.out + said.err


def begin_at(windows: StreamWindows, number: int) -> None:
    windows.start_at(number)
    windows[[number]]


def test_a_damaged_bookmark_is_one_line(files: str) -> None:
    data = StreamData(files, context_length=8)
    data.load_state_dict({"of": ["another"], "bookmarks": 1})
    data.load_state_dict({})
    for place in ({"shard": []}, [], "x", 3, {"examples_iterable": {"shard_idx": -9, "type": "nothing"}, "epoch": "x"}):
        data = StreamData(files, context_length=8, shuffle=2)
        data.load_state_dict({"of": data._settings(), "bookmarks": {"1": {"used": 1, "place": place}}})
        data.setup()
        windows = data.windows("train")
        assert isinstance(windows, StreamWindows)
        with pytest.raises(MetaTTTError) as error:
            begin_at(windows, 2)
        assert len(str(error.value).splitlines()) == 1 and "data.path=" in str(error.value), place


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("data.path=null",), "data.path"),
        (("data.path=/nowhere/a.jsonl.gz",), "cannot be opened as a dataset"),
        (("data.path=/nowhere/a.bin",), "has an unknown format"),
        (("data.shuffle=0",), "data.shuffle=0 is not allowed"),
        (("data.shuffle=2000000000",), "data.shuffle=2000000000 is not allowed"),
        (("data.validation_documents=0",), "data.validation_documents=0 is not allowed"),
        (("data.context_length=100000",), "set data.context_length="),
        (("data.text_key=words",), "set data.text_key="),
        (("data.split=nothing",), "cannot be opened as a dataset"),
        (("trainer.max_steps=-1", "trainer.max_epochs=1"), "a stream has no end"),
        (("data.num_workers=2",), "num_workers"),
        (("data.validation_documents=1000",), "holds no text to train on"),
    ],
)
def test_refusals_are_a_line_or_two(
    files: str, tmp_path: Path, overrides: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*TINY, f"data.path='{files}'", f"output_dir={tmp_path / 'run'}", *overrides]
    assert main(["train", *given]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and len(error.splitlines()) <= 2, error


def test_a_format_and_files_and_paths_of_the_working_directory(
    files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A format is no path, and files are where they were when the run goes on from elsewhere."""
    run = tmp_path / "run"
    monkeypatch.chdir(Path(files).parent)
    given = (*TINY, "data.path=json", "data.files='*.jsonl.gz'", f"output_dir={run}", "trainer.max_steps=2")
    assert train(compose(*given)) == 0
    monkeypatch.chdir(tmp_path)
    assert train(compose(f"resume={run}", "trainer.max_steps=3")) == 0
    assert sorted(losses(run)) == [1, 2, 3]


def test_a_name_on_the_hub_stays_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load(name: str, *rest: Any, **options: Any) -> Any:
        raise ConnectionError(f"asked for {name}")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(MetaTTTError, match=r"data.path=somebody/corpus cannot be opened .*: asked for somebody/corpus"):
        train(compose(*TINY, "data.path=somebody/corpus", f"output_dir={tmp_path / 'run'}"))
