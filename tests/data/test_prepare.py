"""Prepared text: the same bytes whatever happens on the way, nothing half there, strangers refused, windows and documents
as they should be."""

import errno
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals_for_tests import refusal
from tokenizer_for_tests import trained_tokenizer

from metattt.composition.compose import compose
from metattt.data import prepare as preparing
from metattt.data.documents import find_files, iterate_documents, share
from metattt.data.manifest import read_manifest
from metattt.data.prepare import prepare
from metattt.data.shards import ShardData
from metattt.data.sources import load
from metattt.data.tokenizers import load_tokenizer
from metattt.errors import MetaTTTError
from metattt.hf.tokenizer import to_transformers
from metattt.locking import locked

datasets = pytest.importorskip("datasets")
FILES = {"tokens.bin", "documents.bin", "manifest.json"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for index in range(40):
        (folder / f"{index:02d}.txt").write_text(f"document {index}: " + f"word{index} é " * (20 + 7 * index))
    rows = [json.dumps({"text": f"row {row} " * 50}) for row in range(30)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return folder


def settings(corpus: Any, target: Path, *overrides: str) -> tuple[str, ...]:
    return (f"source={corpus}", f"target={target}", "validation_fraction=0.2", "workers=1", *overrides)


def run(corpus: Any, target: Path, *overrides: str) -> int:
    return prepare(compose(*settings(corpus, target, *overrides), job="prepare"))


def refused(corpus: Any, target: Path, *overrides: str) -> str:
    return refusal(lambda: run(corpus, target, *overrides))


def shards(folder: Path, **settings: Any) -> ShardData:
    data = ShardData(str(folder), **settings)
    data.setup()
    return data


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def prepared(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared") / "shards"
    assert run(corpus, folder) == 0
    return folder


def test_the_shards_hold_the_documents_and_the_manifest_counts_them(corpus: Path, prepared: Path) -> None:
    assert content(prepared).keys() == FILES and not prepared.with_name("shards.part").exists()
    manifest = json.loads((prepared / "manifest.json").read_text())
    documents = list(iterate_documents(find_files(str(corpus)), "text"))
    data, place = shards(prepared, context_length=64, document_reset=True), 0
    for split in ("train", "validation"):
        chosen = [document.text for document in documents if (share(document.name, 0) < 0.2) == (split == "validation")]
        expected = b"".join(chosen)
        counts = manifest["splits"][split]
        assert counts == {"documents": len(chosen), "bytes": len(expected), "tokens": len(expected) + len(chosen)}
        tokens = data.tokens.all[place : place + counts["tokens"]]
        assert data.tokenizer.decode(tokens.tolist()) == expected and tokens[0] == 256
        windows = data.windows(split)
        np.testing.assert_array_equal(windows[list(range(len(windows)))].reshape(-1), tokens[: windows.size])
        place += counts["tokens"]
    np.testing.assert_array_equal(data.documents.all, np.flatnonzero(data.tokens.all == data.document_start))
    assert data.sample_document() == chosen[0][: len(data.sample_document())] and len(chosen[0]) > 100


def test_workers_change_nothing(corpus: Path, prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(corpus, tmp_path / "two", "workers=2") == 0
    said, splits = capsys.readouterr().out, json.loads((prepared / "manifest.json").read_text())["splits"]
    assert all(f" {count:,} " in said for split in splits.values() for count in split.values())  # as they were counted
    assert content(tmp_path / "two") == content(prepared)


def test_a_run_does_not_mix_with_another(corpus: Path, prepared: Path, tmp_path: Path) -> None:
    before = content(prepared)
    assert "prepared with seed=0, not 1" in refused(corpus, prepared, "seed=1")
    assert "prepared with source=" in refused(corpus / "rows.jsonl", prepared)
    assert run(corpus, prepared) == 0 and content(prepared) == before
    (tmp_path / "mine").mkdir()
    assert run(corpus, tmp_path / "mine") == 0  # a folder that is empty
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    assert run(corpus, tmp_path / "link") == 0 and content(tmp_path / "disk") == content(prepared)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    assert "holds other files" in refused(corpus, tmp_path / "other")
    for kind, version in (("shards", 1), ("tokens", 2)):
        (tmp_path / "other" / "manifest.json").write_text(json.dumps({"format": f"metattt {kind}", "version": version}))
        assert "is not of this release of metattt prepare" in refused(corpus, tmp_path / "other")


def test_stopped_there_is_nothing_half_and_the_same_command_goes_on(
    corpus: Path, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target, part = tmp_path / "target", tmp_path / "target.part"
    with monkeypatch.context() as patch:
        patch.setattr(preparing, "_write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert run(corpus, target) == 130
    assert "To resume, run the same command again" in capsys.readouterr().out
    assert not target.exists() and part.is_dir()
    with locked(part, "a test"):
        assert "is in use by process" in refused(corpus, target)
    with monkeypatch.context() as patch:  # a full disk
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
        refusal(lambda: run(corpus, target), "No space left on device: free some, or choose")
    assert not target.exists()
    with monkeypatch.context() as patch:  # what datasets has kept is not read or tokenised again
        read: list[Any] = []

        def seen(*given: Any) -> Any:
            return (read.append(one) or one for one in iterate_documents(*given))  # type: ignore[func-returns-value]

        patch.setattr(preparing, "iterate_documents", seen)
        patch.setattr(preparing, "document_tokens", lambda *_: (_ for _ in ()).throw(AssertionError))
        assert run(corpus, target) == 0
    assert content(target) == content(prepared) and not part.exists() and len(read) <= 1


def test_files_that_have_changed_and_files_of_both_splits(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text(f"{number} some text\n" * 90)
    assert run(tmp_path, tmp_path / "apart", f"validation_source={tmp_path / '3.txt'}") == 0
    for folder, numbers in (("text", range(6)), ("held", [3])):  # the same text in another file
        (tmp_path / folder).mkdir()
        for number in numbers:
            (tmp_path / folder / f"of {folder} {number}.txt").write_bytes((tmp_path / f"{number}.txt").read_bytes())
    assert run(tmp_path / "text", tmp_path / "texts", f"validation_source={tmp_path / 'held'}") == 0
    for target in ("apart", "texts"):
        counts = read_manifest(tmp_path / target)["splits"]  # type: ignore[index]
        assert [counts[split]["documents"] for split in ("train", "validation")] == [5, 1]
    (tmp_path / "2.txt").write_text("another")
    assert "have changed since target=" in refused(tmp_path, tmp_path / "apart", f"validation_source={tmp_path / '3.txt'}")
    rows, given = tmp_path / "rows.json", (f"dataset_files={tmp_path}/*.json", "validation_fraction=0")
    rows.write_text('{"text": "one"}\n')
    assert run("json", tmp_path / "rows", *given) == 0
    rows.write_text('{"text": "two"}\n{"text": "three"}\n')
    assert "have changed since target=" in refused("json", tmp_path / "rows", *given)


@pytest.mark.slow
@pytest.mark.parametrize(("one", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_killed_and_started_again_is_as_if_nothing_had_happened(
    corpus: Path, prepared: Path, tmp_path: Path, one: signal.Signals, code: int
) -> None:
    target = tmp_path / "killed"
    command = [sys.executable, "-m", "metattt", "prepare", *settings(corpus, target, "workers=2")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while not (tmp_path / "killed.part" / "new").is_dir() and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(one)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code and b"Traceback" not in err and not target.exists()
    assert code == -9 or b"the same command again" in out
    assert run(corpus, target) == 0
    assert content(target) == content(prepared)


@pytest.mark.parametrize(("overrides", "message"), [
    (("validation_fraction=1",), "validation_fraction=1 is not allowed"),
    (("validation_fraction=1e-9",), "no document is in the validation split: set validation_fraction (now 1e-09)"),
    (("tokenizer=./none.json",), "tokenizer=./none.json does not exist"),
    (("workers=many",), "workers"),
    (("workers=1000000",), "at most 1,024"),
    (("source=null", "dataset_files=[a.gz]"), "dataset_files=['a.gz'] needs their format"),
    (("source='~nobody-of-that-name/x'",), "is not a path"),
    (("target=/dev/null/x",), "Not a directory"),
    (("target=/dev/null",), "is not a folder"),
    (("source=/nowhere.jsonl",), "does not exist"),
    (("source={here}/empty.txt",), "holds no text"),
])  # fmt: skip
def test_bad_settings_are_one_line(corpus: Path, tmp_path: Path, overrides: tuple[str, ...], message: str) -> None:
    (tmp_path / "empty.txt").touch()
    assert message in refused(corpus, tmp_path / "target", *(one.format(here=tmp_path) for one in overrides))
    assert not (tmp_path / "target").exists()


def test_what_chooses_the_text_is_named_as_this_command_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"words": "a text"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0]))
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "rows.parquet"))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list(rows))
    (tmp_path / "some.txt").write_text("a text")
    for source, more, advice in (
        (tmp_path / "rows.jsonl", (), ": set text_key="),
        (tmp_path / "rows.parquet", (), ": name it with text_key="),
        (tmp_path / "some.txt", ("validation_source=someone/texts",), ": set text_key="),
    ):
        assert advice in refused(source, tmp_path / "target", *more)


def test_what_is_no_file_is_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = datasets.Dataset.from_list([{"text": f"row {row} " * 40} for row in range(60)])
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config, data_files, split: rows)
    assert run("someone/texts", tmp_path / "loaded") == 0
    manifest = json.loads((tmp_path / "loaded" / "manifest.json").read_text())
    assert manifest["settings"]["source"] == "someone/texts/train"
    assert "has no text in 'words', only text: set text_key=" in refused("someone/texts", tmp_path / "b", "text_key=words")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'metattt[text]'" in refused(Path("someone/texts"), tmp_path / "b")
    with pytest.raises(MetaTTTError, match=r"^reading some/1\.txt needs datasets"):  # files, as data=stream reads them
        load("text", None, "train", "text", "some/1.txt", "data.path")


@pytest.mark.parametrize("kind", ["json", "text"])
def test_files_of_the_library_of_hugging_face(kind: str, tmp_path: Path) -> None:
    """The library itself, on files of this machine, one of them compressed. A file of text is one document; rows without
    text are none."""
    texts = [f"row {row} " * 40 for row in range(60)]
    lines = [json.dumps({"text": text}) if kind == "json" else text for text in texts]
    lines[5:5] = [json.dumps({"text": text}) for text in ("", None)] if kind == "json" else []
    (tmp_path / "0.txt").write_text("\n".join(lines[:30]))
    (tmp_path / "1.gz").write_bytes(gzip.compress("\n".join(lines[30:]).encode()))
    given = (f"dataset_files=[{tmp_path / '0.txt'},{tmp_path / '1.gz'}]", "validation_fraction=0")
    assert run(kind, tmp_path / "shards", *given) == 0
    data = shards(tmp_path / "shards", context_length=8)
    splits = data.manifest["splits"].values()
    count = {"json": 60, "text": 2}[kind]
    assert sum(split["documents"] for split in splits) == (data.tokens.all == 256).sum() == count
    found = data.tokenizer.decode(data.tokens.all.tolist())
    assert len(found) == sum(split["bytes"] for split in splits) and all(text.strip().encode() in found for text in texts)
    assert "has no text in 'words'" in refused(kind, tmp_path / "b", *given, "text_key=words")
    assert "cannot be opened as a dataset" in refused(kind, tmp_path / "b", *given, "dataset_split=test")
    if kind == "json":
        assert "no rows in" in refused(kind, tmp_path / "b", f"dataset_files={tmp_path}/none*.jsonl")
    (tmp_path / "latin").write_bytes(b"caf\xe9 " * 9)
    assert ("continuation byte", "JSON parse error")[kind == "json"] in refused(kind, tmp_path / "b", f"dataset_files={tmp_path}/latin")


def test_a_tokenizer_from_a_file(corpus: Path, tmp_path: Path) -> None:
    trained_tokenizer(corpus, tmp_path / "tokenizer.json")
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    text = "wörd <s> is text\n"
    ids = tokenizer.encode(text)
    assert tokenizer.separator not in ids and tokenizer.decode(ids.tolist()) == text.encode()
    assert int(tokenizer.token_bytes[ids.astype(np.int64)].sum()) == len(text.encode())
    assert run(corpus, tmp_path / "shards", f"tokenizer={tmp_path / 'tokenizer.json'}") == 0
    data = shards(tmp_path / "shards", context_length=16)
    pytest.importorskip("transformers")
    to_transformers(tokenizer).save_pretrained(tmp_path / "exported")
    data.read_as(load_tokenizer(str(tmp_path / "exported")))  # an exported model reads the tokens of its run
    assert 256 < data.tokenizer.vocab_size <= 400 and content(tmp_path / "shards").keys() == FILES | {"tokenizer.json"}
    ids = data.tokens.all
    assert (ids == tokenizer.separator).sum() == (ids == tokenizer.end).sum() == 70  # BOS + text + EOS
    documents = iterate_documents(find_files(str(corpus)), "text")
    assert len(data.tokenizer.decode(ids.tolist())) == sum(len(document.text) for document in documents)
    (tmp_path / "shards" / "tokenizer.json").write_text((tmp_path / "tokenizer.json").read_text().replace('"<s>"', '"<bos>"'))
    refusal(lambda: ShardData(str(tmp_path / "shards")).setup(), "is not the tokenizer of these tokens")
