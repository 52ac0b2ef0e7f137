"""Prepared tokens that were damaged, exchanged or edited: each is refused in one line that names the file, or reads the
same."""

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizer_for_tests import trained_tokenizer

from metattt.composition.compose import compose
from metattt.data.prepare import prepare
from metattt.data.shards import DamagedTokens, ShardData, TokenFile
from metattt.errors import MetaTTTError

Damage = Callable[[Path], None]
WIDTH = 33


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens of a tokenizer from a file."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "corpus").mkdir()
    for index in range(12):
        (folder / "corpus" / f"{index}.txt").write_text(f"document {index}: " + f"word{index} é " * 120)
    trained_tokenizer(folder / "corpus", folder / "tokenizer.json")
    settings = (f"source={folder / 'corpus'}", f"target={folder / 'shards'}", f"tokenizer={folder / 'tokenizer.json'}")
    assert prepare(compose(*settings, "validation_fraction=0.3", "workers=1", job="prepare")) == 0
    return folder / "shards"


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes the manifest as a program would."""
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text())
    change(manifest)
    file.write_text(json.dumps(manifest, indent=1))


def read(folder: Path) -> str:
    """All that training could see of a folder."""
    data = ShardData(str(folder), context_length=WIDTH - 1)
    seen = hashlib.sha256()
    for split in ("train", "validation"):
        for batch in data.loader(split):
            seen.update(batch.numpy().tobytes())
    seen.update(data.sample_document())
    return seen.hexdigest()


def flip(file: Path, place: int, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[place % len(content)] ^= 1 << bit
    file.write_bytes(content)


def damages(folder: Path) -> Iterator[tuple[str, str, Damage]]:
    """Name, file that the message has to name, and what is done to a copy of the folder."""
    for name in ("manifest.json", "tokenizer.json", "tokens.bin", "documents.bin"):
        for place, bit in ((0, 0), (1, 3), (-1, 0), (-2, 7), (100, 1), (501, 5), (1111, 2), (2221, 6)):
            yield f"flip {name} {place} {bit}", name, lambda at, n=name, p=place, b=bit: flip(at / n, p, b)  # type: ignore[misc]
        changes: dict[str, Callable[[bytes], bytes]] = {
            "empty": lambda _: b"", "half": lambda content: content[: len(content) // 2],
            "one byte less": lambda content: content[:-1], "one token less": lambda content: content[:-2],
            "a byte more": lambda content: content + b"\1", "a page more": lambda content: content + b"\1" * 4096,
            "twice": lambda content: content * 2, "turned": lambda content: content[64:] + content[:64],
            "junk": lambda content: b"\xff\xd8" * 500,
        }  # fmt: skip
        for what, change in changes.items():
            yield f"{name} {what}", name, lambda at, n=name, c=change: (at / n).write_bytes(c((at / n).read_bytes()))  # type: ignore[misc]
        yield f"{name} missing", name if name != "manifest.json" else "", lambda at, n=name: (at / n).unlink()  # type: ignore[misc]
        yield f"{name} a folder", name if name != "manifest.json" else "", lambda at, n=name: replaced(at / n).mkdir()  # type: ignore[misc]
        yield f"{name} a pipe", name if name != "manifest.json" else "", lambda at, n=name: os.mkfifo(replaced(at / n))  # type: ignore[misc]
        yield f"{name} a link out", name, lambda at, n=name: link(at, n)  # type: ignore[misc]


def replaced(file: Path) -> Path:
    file.unlink()
    return file


def link(folder: Path, name: str) -> None:
    """The file, unchanged, but elsewhere."""
    elsewhere = folder.parent / f"{folder.name} elsewhere {name}"
    (folder / name).rename(elsewhere)
    (folder / name).symlink_to(elsewhere)


def refusal(folder: Path) -> str | None:
    """The line that says why a folder cannot be read; None if it can."""
    try:
        read(folder)
    except MetaTTTError as error:
        said = str(error)
    else:
        return None
    assert len(said) < 700 and said.isprintable(), said
    return said


def test_every_damage_is_one_line_that_names_the_file(prepared: Path, tmp_path: Path) -> None:
    before, count = read(prepared), 0
    for count, (what, file, damage) in enumerate(damages(prepared), start=1):
        copy = tmp_path / str(count)
        shutil.copytree(prepared, copy)
        assert read(copy) == before
        damage(copy)
        said = refusal(copy)
        assert said is not None and file in said and str(copy) in said, f"{what}: {said}"
        shutil.rmtree(copy)
    assert count > 80


EDITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    **{f"{key} {value!r}": lambda manifest, key=key, value=value: manifest["splits"]["train"].update({key: value})
       for key in ("tokens", "documents") for value in (-1, 0, 10**30, 1e30, "5", None, True, [])},
    "a border moved": lambda manifest: [manifest["splits"][split].update(tokens=split == "train") for split in manifest["splits"]],
    **{f"dtype {value!r}": lambda manifest, value=value: manifest.update(dtype=value)
       for value in ("uint32", "object", "S100000000", None, ["uint16"], "uint16,uint16")},
    **{f"version {value!r}": lambda manifest, value=value: manifest.update(version=value) for value in (0, 2, "1", 10**40)},
    **{f"{key} {value!r}": lambda manifest, key=key, value=value: manifest.update({key: value})
       for key in ("format", "settings", "tokenizer", "splits", "checksums") for value in (None, [], {}, "other")},
    "no settings": lambda manifest: manifest.pop("settings"),
    "a name elsewhere": lambda manifest: manifest["checksums"].update({"../secret.key": "0"}),
    "checksum": lambda manifest: manifest["checksums"].update({"tokens.bin": "0" * 32}),
    **{f"tokenizer {key} {value!r}": lambda manifest, key=key, value=value: manifest["tokenizer"].update({key: value})
       for key, value in (("kind", "bytes"), ("kind", []), ("sha256", "0" * 64), ("vocab_size", 10**12), ("vocab_size", -1),
                          ("separator", None), ("end", -1), ("path", "/etc/passwd"))},
    "a key more": lambda manifest: manifest.update(_target_="os.system"),
}  # fmt: skip


def test_every_edit_of_a_manifest_is_refused(prepared: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(prepared, copy)
    whole = (copy / "manifest.json").read_bytes()
    (tmp_path / "secret.key").write_bytes(b"\1\0" * 100)
    for what, change in EDITS.items():
        edit(copy, change)
        said = refusal(copy)
        assert said is not None and str(copy) in said, what
        (copy / "manifest.json").write_bytes(whole)
    assert refusal(copy) is None


@pytest.mark.parametrize(
    "text",
    [
        "[" * 10**5, '{"a":' * 10**5, '{"format": "metattt shards", "version": 2, "splits": ' + "[" * 10**5 + "]" * 10**5 + "}",
        '{"format": NaN}', '{"format": 1, "format": 2}', "null", "3", '"metattt shards"', "[]", "{}", "1" * 10**5,
        '{"format": "metattt shards", "version": ' + "9" * 5000 + "}", '"' + "\\" * 10**5, "\ufeff{}", "\0" * 100,
    ],
)  # fmt: skip
def test_junk_for_a_manifest(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    said = refusal(tmp_path)
    assert said is not None and "manifest.json" in said


def test_a_manifest_without_end_is_not_read(prepared: Path, tmp_path: Path) -> None:
    shutil.copytree(prepared, tmp_path / "copy")
    file = tmp_path / "copy" / "manifest.json"
    with file.open("ab") as stream:
        stream.truncate(10**9)  # takes no space
    assert "has more than" in (refusal(tmp_path / "copy") or "")


def test_the_tokens_are_checked_once(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, checked = ShardData(str(prepared), context_length=WIDTH - 1), []
    check = TokenFile.check
    monkeypatch.setattr(TokenFile, "check", lambda file: checked.append(file.path.name) or check(file))
    for split in ("train", "validation", "all"):
        assert next(iter(data.loader(split))) is not None  # type: ignore[arg-type]
    kept = pickle.dumps(data.windows("train"))
    assert len(kept) < 20000  # no tokens: those stay on the disk
    pickle.loads(kept)[[0]]  # as in a worker
    assert checked == ["tokens.bin", "documents.bin"]


def test_without_the_check_sizes_are_still_compared(prepared: Path, tmp_path: Path) -> None:
    shutil.copytree(prepared, tmp_path / "copy")
    os.truncate(tmp_path / "copy" / "tokens.bin", 10)
    with pytest.raises(DamagedTokens, match=r"tokens.bin has 10 bytes .* half-written"):
        ShardData(str(tmp_path / "copy"), verify=False).setup()
