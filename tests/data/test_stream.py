"""Training on a stream: where its windows are, that a run goes on exactly, and what cannot be streamed."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from processes_for_tests import two_processes
from refusals_for_tests import refusal
from runs_for_tests import after_step, column, log
from tokenizer_for_tests import trained_tokenizer

from metattt.composition.compose import compose
from metattt.data.base import ReadError
from metattt.data.sources import load
from metattt.data.stream import Reader, StreamData, StreamWindows
from metattt.data.text import ByteTokenizer
from metattt.errors import MetaTTTError
from metattt.evaluation.text import _changed
from metattt.training.resume import check_same_data
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
    """Documents in three compressed files, with empty ones among them."""
    folder = tmp_path_factory.mktemp("stream")
    for number in range(3):
        with gzip.open(folder / f"{number}.jsonl.gz", "wt") as file:
            for text in [*TEXTS[number * 10 : number * 10 + 10], "", None]:
                file.write(json.dumps({"text": text}) + "\n")
    return f"{folder}/*.jsonl.gz"


def reader(files: str, kind: str = "json", **options: Any) -> Reader:
    return Reader(load(kind, None, "train", "text", files, "data.path", streaming=True, **options), "text", ByteTokenizer())


def all_tokens(texts: list[str]) -> np.ndarray:
    return np.concatenate([[256, *text.encode()] for text in texts])


def test_tokens_are_those_of_the_documents_again_and_again(files: str) -> None:
    once = all_tokens(TEXTS)
    found = reader(files).read(2 * len(once) + 10)
    assert np.array_equal(found, np.concatenate([once, once, once[:10]]))


@pytest.mark.parametrize("kind", ["json", "parquet", "text"])
def test_a_bookmark_goes_on_at_any_token(kind: str, tmp_path: Path, files: str) -> None:
    options = {}
    if kind == "text":
        (tmp_path / "one.txt").write_text("two\nlines\n")
        (tmp_path / "two.txt").write_text("another document")
        files, options = f"{tmp_path}/*.txt", {"sample_by": "document"}
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS[:8]}), tmp_path / "t.parquet")
        files = str(tmp_path / "t.parquet")
    expected = reader(files, kind, **options).read(120)
    for place in (0, 1, 11, 12, 13, 50, 119):
        first, second = reader(files, kind, **options), reader(files, kind, **options)
        first.read(place)
        second.go_to(json.loads(json.dumps(first.bookmark())))
        assert np.array_equal(second.read(120 - place), expected[place:]), place
    refusal(lambda: reader(files, kind, **options).go_to({"used": 1, "place": "x"}), match=r"^data\.path=.* cannot be read as text")


def test_a_stream_that_breaks_costs_no_step(tmp_path: Path) -> None:
    (tmp_path / "0.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (tmp_path / "1.jsonl").write_text('{"text": cut')
    given = ("data.path=json", f"data.files=[{tmp_path}/0.jsonl,{tmp_path}/1.jsonl]", f"output_dir={tmp_path / 'run'}")
    with pytest.raises(ReadError, match="cannot be read as text"):
        train(compose(*TINY, *given, "trainer.max_steps=99", "callbacks.checkpoint.every_steps=99", "callbacks.checkpoint.best=null"))
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 1


def test_columns_between_tabs(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("text\tid\none, and more\t1\ntwo\t2\n")
    data = StreamData(str(tmp_path / "a.tsv"), context_length=7)
    assert [row["text"] for row in data._open("train")] == ["one, and more", "two"]


def test_files_that_are_assigned_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}')
    data = StreamData("json", files=["other.jsonl"], context_length=7)
    data.files = [tmp_path / "a.jsonl"]  # type: ignore[list-item]
    assert [row["text"] for row in data._open("train")] == ["one"] and data._bookmarked()[1] == [str(tmp_path / "a.jsonl")]


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
    places = [2 * block + 1, 2 * block + 4]
    assert later._number == 1 and np.array_equal(later[places], found[places])
    with pytest.raises(ValueError, match="has passed"):
        later[[0]]
    for first in range(4 * block, 40 * block, 4 * block):  # batches over several blocks: one that was made but not asked for
        assert len(later[list(range(first, first + 4 * block))]) == 4 * block
    assert {32, 36} <= later.bookmarks.keys() and len(later.bookmarks) <= 3


def test_what_is_held_out_is_not_trained_on(files: str) -> None:
    data = StreamData(files, context_length=7, validation_documents=4, shuffle=1)
    data.setup()
    held = all_tokens(TEXTS[:4])
    assert np.array_equal(np.asarray(data.windows("validation")[:]).ravel(), held[: len(held) // 8 * 8])  # type: ignore[index]
    trained = data.windows("train")[list(range(10))].ravel()
    assert np.array_equal(trained, all_tokens(TEXTS[4:])[:80])
    assert data.sample_document().decode() == TEXTS[0]
    assert "streamed" in data.describe()
    refusal(lambda: len(data.windows("train")), "split=train: a stream has no end; split=validation")


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
    with monkeypatch.context() as patch:
        after_step(patch, stop, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        assert train(compose(*TINY, f"data.path='{files}'", f"output_dir={run}", "trainer.max_steps=8")) == 143
    begun: list[Any] = []
    original = Reader.texts

    def texts(self: Reader, place: Any) -> Any:
        begun.append(place is self.begin)
        return original(self, place)

    monkeypatch.setattr(Reader, "texts", texts)
    assert train(compose(f"resume={run}")) == 0
    assert log(run) == log(whole)
    assert begun[:2] == [True, False], "what is held out, then the bookmark"


def test_resuming_says_that_files_have_changed(files: str, tmp_path: Path) -> None:
    def there(name: str) -> StreamData:
        data = StreamData(f"{tmp_path}/{name}/*.jsonl.gz", context_length=7, validation_documents=4)
        data.setup()
        return data

    for name in ("old", "copy"):
        shutil.copytree(Path(files).parent, tmp_path / name)
    before = there("old").fingerprint()
    for old in (before, before.split()[0]):  # a record of an older version is of the text held out alone
        assert check_same_data({"data": old}, there("copy"), moved=True) is None
    changes: list[Callable[[Path], Any]] = [
        lambda folder: (folder / "2.jsonl.gz").write_bytes((folder / "1.jsonl.gz").read_bytes() * 2),
        lambda folder: (folder / "2.jsonl.gz").unlink(),
        lambda folder: shutil.copy(folder / "0.jsonl.gz", folder / "3.jsonl.gz"),
    ]
    for change in changes:
        change(tmp_path / "copy")
        after = there("copy")
        assert after.fingerprint().split()[0] == before.split()[0] and not _changed({"run": SimpleNamespace(data=before)}, after)
        assert "has changed since" in str(check_same_data({"data": before}, after, moved=False))
        refusal(lambda found=after: check_same_data({"data": before}, found, moved=True), "does not hold the data")


@pytest.mark.slow
def test_two_processes_train_as_one(files: str, tmp_path: Path, whole: Path) -> None:
    run = tmp_path / "run"
    given = (*TINY, f"data.path='{files}'", f"output_dir={run}", "trainer.max_steps=8", "trainer=ddp")
    codes, output = two_processes(tmp_path, *given)
    assert codes == [0, 0], output
    assert column(run, "train/loss") == pytest.approx(column(whole, "train/loss"), rel=1e-5)


@pytest.mark.parametrize(("overrides", "message"), [
    (("data.path=???",), "`data.path` has no value: give data.path=..."),
    (("data.path=/nowhere/a.jsonl.gz",), "cannot be opened as a dataset"),
    (("data.path={here}/cut.jsonl.gz",), "marker was reached in {here}/cut.jsonl.gz"),
    (("data.path={here}",), "the files of a folder as {here}/*.jsonl, or the format"),
    (("data.shuffle=0",), "data.shuffle=0 is not allowed"),
    (("data.context_length=100000",), "set data.context_length="),
    (("data.text_key=words",), ".jsonl.gz, only text: set data.text_key="),
    (("data.split=nothing",), "cannot be opened as a dataset"),
    (("data.num_workers=2",), "num_workers"),
    (("data.validation_documents=1000",), "holds no text to train on: give more documents"),
])  # fmt: skip
def test_refusals_are_a_line_or_two(files: str, tmp_path: Path, overrides: tuple[str, ...], message: str, told: Callable[..., str]) -> None:
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "of a download that broke"}')[:-9])
    overrides = tuple(one.format(here=tmp_path) for one in overrides)
    assert message.format(here=tmp_path) in told("train", *TINY, f"data.path='{files}'", f"output_dir={tmp_path / 'run'}", *overrides)


def test_a_format_and_files_and_paths_of_the_working_directory(files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A format is no path; files and tokenizer are where they were when the run goes on from elsewhere."""
    run = tmp_path / "run"
    monkeypatch.chdir(Path(files).parent)
    trained_tokenizer(tmp_path, Path("tok.json"))
    given = (*TINY, "data.path=json", "data.files='*.jsonl.gz'", f"output_dir={run}", "trainer.max_steps=2")
    given += ("data.tokenizer=tok.json", "model.vocab_size=400")
    assert train(compose(*given)) == 0
    monkeypatch.chdir(tmp_path)
    assert train(compose(f"resume={run}", "trainer.max_steps=3")) == 0
    assert sorted(column(run, "train/loss")) == [1, 2, 3]


def test_a_name_on_the_hub_stays_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load(name: str, *rest: Any, **options: Any) -> Any:
        raise ConnectionError(f"asked for {name}")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(MetaTTTError, match=r"data.path=somebody/corpus cannot be opened .*: asked for somebody/corpus"):
        train(compose(*TINY, "data.path=somebody/corpus", f"output_dir={tmp_path / 'run'}"))
