"""Text data: reading files, the split, windows, their order, and what is refused."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from refusals_for_tests import refusal
from tokenizer_for_tests import trained_tokenizer

from metattt.data.base import Place
from metattt.data.documents import find_files, read_documents
from metattt.data.sources import is_local
from metattt.data.text import ByteTokenizer, TextData
from metattt.data.tokenizers import load_tokenizer


def write(folder: Path, files: int = 30, size: int = 200) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(files):
        (folder / f"{index}.txt").write_bytes(bytes((index * 7 + i) % 256 for i in range(size)))
    return folder


def test_every_kind_of_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "deep" / "b.md").write_text("märkdown")
    (tmp_path / "deep" / "er" / "c.py").write_text("python")
    (tmp_path / "ignored.bin").write_text("no")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "d.jsonl").write_text('\ufeff{"text": "one"}\n\n{"text": "two", "other": 1}\n')
    pyarrow.parquet.write_table(pyarrow.table({"text": ["row", None, "last"]}), tmp_path / "e.parquet")
    found = {document.key: document.text.decode() for document in read_documents(str(tmp_path), "text")}
    assert found == {
        "a.txt": "text", "deep/b.md": "märkdown", "deep/er/c.py": "python", "d.jsonl:1": "one", "d.jsonl:2": "two",
        "e.parquet:1": "row", "e.parquet:3": "last",
    }  # fmt: skip
    both = read_documents([str(tmp_path / "a.txt"), str(tmp_path / "d.jsonl")], "text")
    assert [document.text for document in both] == [b"text", b"one", b"two"]


# -- splits ------------------------------------------------------------------------------------------------------------


def test_the_split_is_by_document_and_stable(tmp_path: Path) -> None:
    data = TextData(str(write(tmp_path / "one")), context_length=16, validation_fraction=0.3)
    train, validation = data.split("train"), data.split("validation")
    assert len(train) + len(validation) == 30 and not set(train) & set(validation) and 3 <= len(validation) <= 15
    assert sorted(data.split("all")) == sorted(train + validation)
    elsewhere = TextData(str(write(tmp_path / "two")), context_length=16, validation_fraction=0.3)
    assert elsewhere.split("validation") == validation  # names relative to the folder decide
    other = TextData(data.path, context_length=16, validation_fraction=0.3, seed=1)
    assert other.split("validation") != validation


def test_no_text_is_trained_on_and_validated_on(tmp_path: Path) -> None:
    folder = write(tmp_path / "one")
    held = TextData(str(folder), validation_path=str(folder / "3.txt"))
    assert len(held.split("train")) == 29 and held.split("validation")[0] not in held.split("train")
    twice = TextData([str(folder), str(tmp_path)], validation_fraction=0.3)  # a file counts once
    assert len(twice.split("train")) + len(twice.split("validation")) == 30
    inside = TextData(str(folder / "3.txt"), validation_path=str(folder))
    refusal(inside.setup, "nothing to train on that is not in data.validation_path")


def test_the_test_split_shares_no_text_with_the_others(tmp_path: Path) -> None:
    write(tmp_path / "one")
    (tmp_path / "one" / "copy.txt").write_bytes((tmp_path / "one" / "3.txt").read_bytes())
    path, settings = str(tmp_path / "one"), {"context_length": 16, "validation_fraction": 0.3}
    data, before = TextData(path, **settings, test_fraction=0.3), TextData(path, **settings)  # type: ignore[arg-type]
    splits = [data.split(name) for name in ("train", "validation", "test")]
    assert all(len(one) >= 3 for one in splits) and sum(map(len, splits)) == 30
    assert len(set().union(*splits)) == 30  # by content: the copy counts once
    assert len(before.split("all")) == 31  # which it does where nothing is kept for a test
    assert set(before.split("validation")) == set(splits[1])
    seeds = [TextData(path, **settings, test_fraction=0.3, seed=seed, split_seed=0) for seed in (1, 2)]  # type: ignore[arg-type]
    assert [one.split("test") for one in seeds] == [splits[2], splits[2]]
    assert not np.array_equal(*(next(iter(one.train_dataloader())).numpy() for one in seeds))  # the order is not the same
    beside = TextData(path, validation_path=str(write(tmp_path / "two", files=2)), test_fraction=0.3)
    held = beside.split("validation")
    assert len(held) == 2 and not {*held} & {*beside.split("test"), *beside.split("train")}
    refusal(lambda: before.split("test"), "there is no test text: set data.test_fraction=0.1")
    assert "data.test_fraction=0.9 is not allowed" in refused(path, test_fraction=0.9)
    refusal(lambda: TextData(str(tmp_path / "two"), test_fraction=0.1).split("train"), "2 documents, too few for 3 splits")


def test_few_documents_still_have_all_splits(tmp_path: Path) -> None:
    three = TextData(str(write(tmp_path / "three", files=3)), validation_fraction=0.01, test_fraction=0.01)
    assert [len(three.split(name)) for name in ("train", "validation", "test")] == [1, 1, 1]
    two = TextData(str(write(tmp_path / "two", files=2)), validation_fraction=0.01)
    assert len(two.split("train")) == len(two.split("validation")) == 1
    one = TextData(str(write(tmp_path / "one", files=1)), validation_fraction=0.1, test_fraction=0.2)
    text = (tmp_path / "one" / "0.txt").read_bytes()
    assert [one.split(name) for name in ("train", "test", "validation")] == [[text[:140]], [text[140:180]], [text[180:]]]


# -- windows -----------------------------------------------------------------------------------------------------------


def test_windows_are_the_text_with_separators(tmp_path: Path) -> None:
    data = TextData(str(write(tmp_path)), context_length=31)
    windows = data.windows("train")
    assert windows.dtype == np.uint16 and windows.shape[1] == 32
    stream = [token for text in data.split("train") for token in (ByteTokenizer.separator, *text)]
    assert windows.reshape(-1).tolist() == stream[: windows.size]
    few = TextData(data.path, context_length=31, validation_max_bytes=3 * 32)
    assert len(few.windows("validation")) == 3
    short = TextData(data.path, context_length=31, max_bytes=500)
    assert 500 - 32 <= short.windows("train").size <= 500 + 30
    everything = torch.cat(list(data.val_dataloader()))
    assert torch.equal(everything, torch.from_numpy(data.windows("validation").astype(np.int64)))
    found = []
    for data.place in (Place(0, 2), Place(1, 2)):  # what fills up the last batch is no text
        found += [window.tolist() for batch in data.val_dataloader() for window in batch if (window >= 0).any()]
    assert sorted(found) == sorted(everything.tolist())


def test_validation_max_bytes_are_bytes_of_text_with_any_tokenizer(tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / f"{number}.txt").write_text(f"the window of document {number} and the tokens of it " * 20)
    trained_tokenizer(tmp_path, tmp_path / "tokenizer.json")
    data = TextData(str(tmp_path), context_length=7, validation_max_bytes=200)
    data.windows("validation")  # of bytes: they are cut anew
    data.read_as(tokenizer := load_tokenizer(str(tmp_path / "tokenizer.json")))
    assert data.windows("validation").max() > 256
    assert 120 < tokenizer.token_bytes[data.windows("validation").astype(np.int64)].sum() <= 210


# -- what is refused ---------------------------------------------------------------------------------------------------


def refused(path: object, **settings: object) -> str:
    return refusal(lambda: TextData(path, **settings).windows("train"))  # type: ignore[arg-type]


def test_bad_paths_are_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "does not exist" in refused(str(tmp_path / "missing"))
    said = refused(str(tmp_path))
    assert "no files that can be read" in said and "of a dataset saved on disk: source=arrow dataset_files=" in said
    for path in ("", [], 3, "~nobody-of-that-name/x"):
        assert "is not a path" in refused(path)
    assert "File name too long" in refused("/" + "x" * 5000)
    (tmp_path / "x.txt").write_text("")
    assert "holds no text" in refused(str(tmp_path))
    (tmp_path / "x.jsonl.gz").write_text("abc")
    assert ".gz is not supported" in (said := refused(str(tmp_path / "x.jsonl.gz"))) and "metattt prepare source=" in said
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "x.txt").write_text("too short for a window")
    message = refused(str(tmp_path / "deep"))
    assert "data.context_length=" in message and "fewer than the 257" in message
    scan = os.scandir

    def denied(path: object) -> object:
        if str(path).endswith("deep"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scan(path)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "scandir", denied)
    assert "deep cannot be read: Permission denied" in refused(str(tmp_path))  # not as if it were empty
    (tmp_path / "manifest.json").write_text("{}")
    assert "holds shards of metattt prepare, not text: add data=shards" in refused(str(tmp_path))


@pytest.mark.parametrize(("line", "message"), [
    ('{"text": "cut', "x.jsonl:2 cannot be read"),
    ('{"body": "b"}', "x.jsonl:2 has no text in 'text'"),
    ('["text"]', "x.jsonl:2 has no text in 'text'"),
    ('{"text": 3}', "x.jsonl:2 has no text in 'text'"),
    ('{"text": ' + "[" * 10**5, "x.jsonl:2 cannot be read"),
])  # fmt: skip
def test_bad_jsonl_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "good"}) + "\n" + line + "\n")
    assert message in refused(str(tmp_path))
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "good"}) + "\n\n \n" + line + "\n")
    assert message.replace(":2", ":4") in refused(str(tmp_path))  # the line, and not the row


def test_what_is_no_character_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "half \\ud83d"}\n{"text": "whole \\ud83d\\ude00"}\n{"text": "byte \xff"}\n')
    found = [document.text.decode() for document in read_documents(str(tmp_path), "text")]
    assert found == ["half \ufffd", "whole \U0001f600", "byte \ufffd"]
    (tmp_path / "y.jsonl").write_text("not json")
    assert len(read_documents(str(tmp_path), "text", most=3)) == 3  # no more than these is read


def test_bad_parquet_is_named(tmp_path: Path) -> None:
    file = tmp_path / "x.parquet"
    file.write_bytes(b"not parquet at all")
    assert "x.parquet:1 cannot be read" in refused(str(tmp_path))
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a"]}), file)
    assert "no column 'text', only body" in refused(str(tmp_path))
    pyarrow.parquet.write_table(pyarrow.table({"text": [3]}), file)
    assert "x.parquet:1 has no text in 'text'" in refused(str(tmp_path))


def test_no_file_is_left_out_in_silence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base, outside = tmp_path / "base", tmp_path / "outside"
    (base / "own").mkdir(parents=True)
    (outside / "deep").mkdir(parents=True)
    (base / "A.TXT").write_text("upper")
    (base / "b.JSONL").write_text('{"text": "row"}')
    (base / "own" / "c.txt").write_text("own")
    (outside / "deep" / "d.txt").write_text("linked")
    (base / "a_link").symlink_to(base / "own")  # read under its own name
    (base / "link").symlink_to(outside)
    (base / "other").symlink_to(outside / "deep")  # read once
    (outside / "deep" / "back").symlink_to(outside)
    (outside / "up").symlink_to(tmp_path)
    os.mkfifo(base / "pipe.txt")  # it would be waited for
    found = {document.key: document.text.decode() for document in read_documents(str(base), "text")}
    assert found == {"A.TXT": "upper", "b.JSONL:1": "row", "own/c.txt": "own", "other/d.txt": "linked"}
    assert not caplog.records
    (outside / "e.jsonl.gz").touch()
    (base / "f.txt").symlink_to(tmp_path / "unmounted.txt")
    (base / ".trash").mkdir()
    (base / ".trash" / "g.md").write_text("hidden")
    for _ in range(2):
        assert {document.key for document in read_documents(str(base), "text")} == found.keys()
    assert [one.getMessage() for one in caplog.records] == [
        f"data.path={base}: compressed files are left out (1, as e.jsonl.gz)",
        f"data.path={base}: links that lead nowhere are left out (1, as f.txt)",
        f"data.path={base}: hidden files are left out (1, as g.md)",
    ]


def test_a_path_is_not_asked_for_at_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for path in ("data/typo", "./typo", "/typo", "~/typo", "typo.txt", "typo.jsonl.gz", "a/b/c", "data", "typo/"):
        assert is_local(path), path
    for name in ("allenai/c4", "imdb", "teknium/OpenHermes-2.5"):
        assert not is_local(name), name
    keys = {file.relative_to(base).as_posix() for file, base in find_files(None)}
    assert "textwrap.py" in keys and not any("site-packages" in key or key.startswith("test/") for key in keys)
