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

from metattt.data.documents import find_files, read_documents
from metattt.data.sources import is_local
from metattt.data.text import ByteTokenizer, TextData
from metattt.data.windows import ShuffledBatches
from metattt.errors import MetaTTTError


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
    (tmp_path / "d.jsonl").write_text('{"text": "one"}\n\n{"text": "two", "other": 1}\n')
    pyarrow.parquet.write_table(pyarrow.table({"text": ["row", None, "last"]}), tmp_path / "e.parquet")
    found = {document.key: document.text.decode() for document in read_documents(str(tmp_path), "text")}
    assert found == {
        "a.txt": "text", "deep/b.md": "märkdown", "deep/er/c.py": "python", "d.jsonl:1": "one", "d.jsonl:2": "two",
        "e.parquet:1": "row", "e.parquet:3": "last",
    }  # fmt: skip
    both = read_documents([str(tmp_path / "a.txt"), str(tmp_path / "d.jsonl")], "text")
    assert [document.text for document in both] == [b"text", b"one", b"two"]


def test_the_standard_library_is_the_default() -> None:
    documents = read_documents(None, "text")
    keys = {document.key for document in documents}
    assert "textwrap.py" in keys and not any("site-packages" in key or key.startswith("test/") for key in keys)
    assert sum(len(document.text) for document in documents) > 4e6


def test_the_split_is_by_document_and_stable(tmp_path: Path) -> None:
    data = TextData(str(write(tmp_path / "one")), context_length=16, validation_fraction=0.3)
    train, validation = data.split("train"), data.split("validation")
    assert len(train) + len(validation) == 30 and not set(train) & set(validation) and 3 <= len(validation) <= 15
    assert sorted(data.split("all")) == sorted(train + validation)
    elsewhere = TextData(str(write(tmp_path / "two")), context_length=16, validation_fraction=0.3)
    assert elsewhere.split("validation") == validation  # names relative to the folder decide
    other = TextData(data.path, context_length=16, validation_fraction=0.3, seed=1)
    assert other.split("validation") != validation


def test_a_test_split_shares_nothing_with_the_others(tmp_path: Path) -> None:
    path = str(write(tmp_path / "one"))
    plain = TextData(path, validation_fraction=0.3)
    data = TextData(path, validation_fraction=0.3, test_fraction=0.3)
    splits = {name: data.split(name) for name in ("train", "validation", "test")}
    assert sorted(text for texts in splits.values() for text in texts) == sorted(data.split("all")) == sorted(plain.split("all"))
    assert all(splits.values()) and splits["validation"] == plain.split("validation")
    other = TextData(path, validation_fraction=0.3, test_fraction=0.3, seed=1, split_seed=0)
    assert other.split("test") == splits["test"]
    beside = TextData(path, validation_path=str(write(tmp_path / "two", files=2)), test_fraction=0.3)
    held = beside.split("validation")
    assert len(held) == 2 and not {*held} & {*beside.split("test"), *beside.split("train")}
    assert len(beside.split("test")) + len(beside.split("train")) == 28  # two of the thirty are those that are held out
    three = TextData(str(write(tmp_path / "three", files=3)), validation_fraction=0.01, test_fraction=0.01)
    assert [len(three.split(name)) for name in ("train", "validation", "test")] == [1, 1, 1]
    one = TextData(str(write(tmp_path / "four", files=1)), validation_fraction=0.1, test_fraction=0.2)
    text = (tmp_path / "four" / "0.txt").read_bytes()
    assert [one.split(name) for name in ("train", "test", "validation")] == [[text[:140]], [text[140:180]], [text[180:]]]
    with pytest.raises(MetaTTTError, match=r"there is no test text: set data\.test_fraction=0\.1"):
        plain.split("test")
    with pytest.raises(MetaTTTError, match="2 documents, too few for 3 splits"):
        TextData(str(tmp_path / "two"), test_fraction=0.1).split("train")
    with pytest.raises(MetaTTTError, match=r"data\.test_fraction=0\.9"):
        TextData(path, validation_fraction=0.2, test_fraction=0.9)


def test_few_documents_still_have_both_splits(tmp_path: Path) -> None:
    two = TextData(str(write(tmp_path / "two", files=2)), validation_fraction=0.01)
    assert len(two.split("train")) == len(two.split("validation")) == 1
    one = TextData(str(write(tmp_path / "one", files=1)), validation_fraction=0.1)
    text = (tmp_path / "one" / "0.txt").read_bytes()
    assert one.split("train") == [text[:180]] and one.split("validation") == [text[180:]]


def test_the_test_split_shares_no_text_with_the_others(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "copy.txt").write_bytes((tmp_path / "3.txt").read_bytes())
    settings = {"context_length": 16, "validation_fraction": 0.3}
    data = TextData(str(tmp_path), **settings, test_fraction=0.3)
    splits = [data.split(name) for name in ("train", "validation", "test")]
    assert all(len(one) >= 3 for one in splits) and sum(map(len, splits)) == 30
    assert len(set().union(*splits)) == 30  # by content: the copy counts once
    before = TextData(str(tmp_path), **settings)
    assert set(before.split("validation")) == set(splits[1]) and not set(before.split("validation")) & set(splits[2])
    seeds = [TextData(str(tmp_path), **settings, test_fraction=0.3, seed=seed, split_seed=0) for seed in (1, 2)]
    assert [one.split("test") for one in seeds] == [splits[2], splits[2]]
    assert not np.array_equal(*(next(iter(one.train_dataloader())).numpy() for one in seeds))  # the order is not the same


def test_the_standard_library_has_three_splits_without_common_text() -> None:
    data = TextData(test_fraction=0.1, seed=7, split_seed=0)
    train, validation, test = (set(data.split(name)) for name in ("train", "validation", "test"))
    assert not train & validation and not train & test and not validation & test
    assert min(len(train), len(validation), len(test)) > 30


def test_one_document_and_other_files_to_validate_on_have_a_test_split(tmp_path: Path) -> None:
    write(tmp_path / "one", files=1)
    text = (tmp_path / "one" / "0.txt").read_bytes()
    one = TextData(str(tmp_path / "one"), test_fraction=0.2)
    assert [one.split(name) for name in ("train", "test", "validation")] == [[text[:140]], [text[140:180]], [text[180:]]]
    write(tmp_path / "more", files=3, size=30)
    both = TextData(str(tmp_path / "more"), validation_path=str(tmp_path / "one"), test_fraction=0.1)
    assert both.split("validation") == [text] and len(both.split("test")) == 1 and len(both.split("train")) == 2
    (tmp_path / "more" / "copy.txt").write_bytes(text)
    again = TextData(str(tmp_path / "more"), validation_path=str(tmp_path / "one"), test_fraction=0.1)
    assert text not in again.split("train") + again.split("test")


@pytest.mark.parametrize("fraction", [-0.1, 0.9, 1.0, float("nan")])
def test_a_test_split_that_leaves_nothing_to_train_on_is_refused(fraction: float) -> None:
    with pytest.raises(MetaTTTError, match=r"data\.test_fraction=.* is not allowed"):
        TextData(test_fraction=fraction)


def test_a_test_split_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MetaTTTError, match=r"set data\.test_fraction=0\.1, before training"):
        TextData(str(write(tmp_path, files=2))).split("test")
    with pytest.raises(MetaTTTError, match="2 documents, too few for 3 splits"):
        TextData(str(tmp_path), test_fraction=0.1).split("test")


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


def test_batches_are_a_permutation_that_the_step_decides() -> None:
    batches = list(ShuffledBatches(10, 4, seed=0, num_batches=5))
    seen = [position for batch in batches for position in batch]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10)) and seen[:10] != seen[10:]
    assert list(ShuffledBatches(10, 4, seed=0, num_batches=5, start=3)) == batches[3:]
    assert list(ShuffledBatches(10, 4, seed=1, num_batches=5)) != batches


def test_loaders_give_int64_windows(tmp_path: Path) -> None:
    data = TextData(str(write(tmp_path)), context_length=15, batch_size=4)
    data.setup()
    batch = next(iter(data.train_dataloader()))
    assert batch.shape == (4, 16) and batch.dtype == torch.int64
    everything = torch.cat(list(data.val_dataloader()))
    assert torch.equal(everything, torch.from_numpy(data.windows("validation").astype(np.int64)))


def test_bytes_round_trip() -> None:
    tokenizer = ByteTokenizer()
    text = "naïve 文字 \x00".encode()
    assert tokenizer.decode([256, *tokenizer.encode(text).tolist()]) == text
    assert tokenizer.token_bytes.tolist() == [1] * 256 + [0]


def refused(path: object, **settings: object) -> str:
    with pytest.raises(MetaTTTError) as error:
        TextData(path, **settings).windows("train")  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
    return str(error.value)


def test_bad_paths_are_one_clear_line(tmp_path: Path) -> None:
    assert "does not exist" in refused(str(tmp_path / "missing"))
    assert "no files that can be read" in refused(str(tmp_path))
    (tmp_path / "x.txt").write_text("")
    assert "holds no text" in refused(str(tmp_path))
    (tmp_path / "x.bin").write_text("abc")
    assert ".bin is not supported" in refused(str(tmp_path / "x.bin"))
    (tmp_path / "short").mkdir()
    (tmp_path / "short" / "x.txt").write_text("too short for a window")
    message = refused(str(tmp_path / "short"))
    assert "data.context_length=" in message and "fewer than the 257" in message


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut', "x.jsonl:2 is not a line of JSON"),
        ('{"body": "b"}', "x.jsonl:2 has no key 'text'"),
        ('["text"]', "x.jsonl:2 has no key 'text'"),
        ('{"text": 3}', "holds int, not text"),
        ('{"text": "bad \\ud800 half"}', r"x.jsonl:2: 'text' holds half a surrogate pair (\ud800, character 4)"),
        ('{"text": ' + "[" * 10**5, "x.jsonl:2 cannot be read"),
        ('{"text": ' + "1" * 5000 + "}", "x.jsonl:2 cannot be read"),
        ("\0" * 100, "x.jsonl:2 is not a line of JSON"),
    ],
)
def test_bad_jsonl_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "good"}) + "\n" + line + "\n")
    assert message in refused(str(tmp_path))


def test_bad_parquet_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"not parquet at all")
    assert "is not a parquet file" in refused(str(tmp_path))
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a"]}), tmp_path / "x.parquet")
    assert "no column 'text', only body" in refused(str(tmp_path))


@pytest.mark.parametrize("settings", [{"context_length": 0}, {"batch_size": 0}, {"validation_fraction": 1.0}])
def test_bad_sizes_are_refused(settings: dict[str, float]) -> None:
    name, value = next(iter(settings.items()))
    assert f"data.{name}={value}" in refused(None, **settings)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "data.path= is not a path"), ("  ", "is not a path"), ([], "data.path=[] is not a path"),
        (["a", ""], "data.path= is not a path"),
        (3, "data.path=3 is not a path"), ("~nobody-of-that-name/x", "is not a path"), ("/tmp/a\0b", "is not a path"),
        ("/" + "x" * 5000, "File name too long"), ("/dev/null", "no suffix is not supported|does not exist"),
    ],
)  # fmt: skip
def test_what_is_no_path(path: object, message: str) -> None:
    assert any(one in refused(path) for one in message.split("|"))


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.txt").write_text("text")
    file = tmp_path / "b.txt"
    with file.open("wb") as stream:
        stream.truncate(2**43)  # takes no space on the disk
    assert "does not fit into memory" in refused(str(tmp_path))
    file.unlink()
    os.mkfifo(file)  # a pipe is not waited for
    assert [document.key for document in read_documents(str(tmp_path), "text")] == ["deep/a.txt"]
    (tmp_path / "deep" / "back").symlink_to(tmp_path)
    assert [document.key for document in read_documents(str(tmp_path), "text")] == ["deep/a.txt"]

    def denied(*_: object) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "deep"))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", denied)
        assert "a.txt cannot be read: Permission denied" in refused(str(tmp_path))
    scan = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: denied() if str(path).endswith("deep") else scan(path))
    assert "deep cannot be read: Permission denied" in refused(str(tmp_path))  # not as if it were empty


def test_parquet_with_flipped_bits_is_one_line_or_text(tmp_path: Path) -> None:
    file = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": [f"row {row} " * 9 for row in range(50)]}), file)
    content = file.read_bytes()
    refusals = 0
    for place in range(0, len(content), 13):
        file.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :])
        try:
            read_documents(str(tmp_path), "text")
        except MetaTTTError as error:
            said = str(error)
            refusals += "\n" not in said and "x.parquet" in said
    assert refusals > 10


@pytest.mark.parametrize(
    "settings",
    [{"batch_size": 10**9}, {"num_workers": -1}, {"seed": -1}, {"max_bytes": -5}, {"max_bytes": 0}, {"validation_max_bytes": 0}],
)  # fmt: skip
def test_numbers_without_a_meaning_are_refused(settings: dict[str, int]) -> None:
    name, value = next(iter(settings.items()))
    assert f"data.{name}={value} is not allowed" in refused(None, **settings)


def test_shards_without_data_shards(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(MetaTTTError, match="holds shards of metattt prepare, not text: add data=shards"):
        find_files(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.jsonl.gz", "json"), ("a.txt.zst", "text"), ("a.gz", "text"), ("a.csv", "csv"), ("a.png", None)],
)
def test_a_format_that_is_read_another_way(name: str, kind: str | None, tmp_path: Path) -> None:
    (tmp_path / name).write_text("")
    with pytest.raises(MetaTTTError) as caught:
        find_files(str(tmp_path / name), "source")
    way = f"metattt prepare source={kind} dataset_files={tmp_path / name} "
    assert (way in str(caught.value)) == (kind is not None) and str(caught.value).count("\n") <= 1


def test_a_path_is_not_asked_for_at_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for path in ("data/typo", "./typo", "/typo", "~/typo", "typo.txt", "typo.jsonl.gz", "a/b/c", "data", "typo/"):
        assert is_local(path), path
    for name in ("allenai/c4", "imdb", "teknium/OpenHermes-2.5"):
        assert not is_local(name), name
