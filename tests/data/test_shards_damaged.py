"""Prepared tokens that were damaged, exchanged or edited: each is refused in one line that names the file."""

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from refusals_for_tests import refusal
from tokenizer_for_tests import trained_tokenizer

from metattt.composition.compose import compose
from metattt.data import shards
from metattt.data.prepare import prepare
from metattt.data.shards import DamagedTokens, ShardData

FILES = ("manifest.json", "tokenizer.json", "tokens.bin", "documents.bin")
CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"", "half": lambda content: content[: len(content) // 2], "a byte less": lambda content: content[:-1],
    "a byte more": lambda content: content + b"\1", "turned": lambda content: content[64:] + content[:64],
    "a bit": lambda content: content[:50] + bytes([content[50] ^ 2]) + content[51:],
}  # fmt: skip


@pytest.fixture(scope="module")
def prepared(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens of a tokenizer from a file."""
    folder = tmp_path_factory.mktemp("prepared")
    trained_tokenizer(corpus, folder / "tokenizer.json")
    settings = (f"source={corpus}", f"target={folder / 'shards'}", f"tokenizer={folder / 'tokenizer.json'}")
    assert prepare(compose(*settings, "validation_fraction=0.3", "workers=1", job="prepare")) == 0
    return folder / "shards"


@pytest.fixture
def copy(prepared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / "copy"))


def refused(folder: Path) -> str:
    said = refusal(lambda: ShardData(str(folder)).setup(), lines=1, longest=700)
    assert said.isprintable()
    return said


@pytest.mark.parametrize("name", FILES)
def test_every_damage_is_one_line_that_names_the_file(name: str, copy: Path, tmp_path: Path) -> None:
    file = copy / name
    whole = file.read_bytes()
    for what, change in CHANGES.items():
        file.write_bytes(change(whole))
        assert str(file) in refused(copy), what
    file.unlink()
    assert name == "manifest.json" or str(file) in refused(copy)
    (tmp_path / "elsewhere").write_bytes(whole)
    file.symlink_to(tmp_path / "elsewhere")
    assert str(file) in refused(copy)


def test_the_tokens_are_checked_once(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, checked, check = ShardData(str(prepared), context_length=32), [], shards.checksum
    monkeypatch.setattr(shards, "checksum", lambda file: checked.append(file.name) or check(file))
    for split in ("train", "validation", "all"):
        assert next(iter(data.loader(split))) is not None  # type: ignore[arg-type]
    kept = pickle.dumps(data.windows("train"))
    assert len(kept) < 20000  # no tokens: those stay on the disk
    assert (pickle.loads(kept)[[0]] == data.windows("train")[[0]]).all()  # as in a worker
    assert checked == ["tokens.bin", "documents.bin"]


def test_without_the_check_sizes_are_still_compared(copy: Path) -> None:
    os.truncate(copy / "tokens.bin", 10)
    with pytest.raises(DamagedTokens, match=r"tokens.bin has 10 bytes and not \d+: remove .* metattt prepare again"):
        ShardData(str(copy), verify=False).setup()
