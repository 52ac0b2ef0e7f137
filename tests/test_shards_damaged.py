"""Shards that were damaged, exchanged or edited: each is refused in one line that names the file, or reads the same."""

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import xxhash
from tokenizer_for_tests import trained_tokenizer

from metattt.composition.compose import compose
from metattt.data import shard_file
from metattt.data.manifest import write_signed
from metattt.data.prepare import prepare
from metattt.data.shard_file import DamagedShard, check_together
from metattt.data.shards import ShardData
from metattt.errors import MetaTTTError

Damage = Callable[[Path], None]
WIDTH = 33


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards with a tokenizer from a file."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "corpus").mkdir()
    for index in range(12):
        (folder / "corpus" / f"{index}.txt").write_text(f"document {index}: " + f"word{index} é " * 120)
    trained_tokenizer(folder / "corpus", folder / "tokenizer.json")
    settings = (f"source={folder / 'corpus'}", f"target={folder / 'shards'}", f"tokenizer={folder / 'tokenizer.json'}")
    assert prepare(compose(*settings, "shard_bytes=4000", "validation_fraction=0.3", "workers=1", job="prepare")) == 0
    return folder / "shards"


def edit(folder: Path, change: Callable[[dict[str, Any]], None], sign: bool) -> None:
    """Changes the manifest as a program would; `sign`: with a checksum that is right again, where it has one."""
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text())
    change(manifest)
    if sign and "checksum" in manifest:
        write_signed(file, manifest)
    else:
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


def shards(folder: Path, split: str = "train") -> list[Path]:
    return sorted(folder.glob(f"{split}-*.bin"))


def flip(file: Path, place: int, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[place % len(content)] ^= 1 << bit
    file.write_bytes(content)


def exchange(one: Path, other: Path) -> None:
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def zero(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(b"\0" * min(4096, len(content)) + content[4096:])


def set_last(folder: Path, token: int) -> None:
    """A token in the last shard, with a checksum that is right."""
    file = shards(folder)[-1]
    tokens = np.fromfile(file, np.uint16)
    tokens[-1] = token
    tokens.tofile(file)

    def change(manifest: dict[str, Any]) -> None:
        record = next(shard for shard in manifest["shards"] if shard["file"] == file.name)
        record["xxh3_128"] = xxhash.xxh3_128_hexdigest(file.read_bytes())

    edit(folder, change, sign=True)


def damages(folder: Path) -> Iterator[tuple[str, str, Damage]]:
    """Name, file that the message has to name, and what is done to a copy of the folder."""
    for name in ("manifest.json", "tokenizer.json", shards(folder)[0].name, shards(folder, "validation")[-1].name):
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
        yield f"{name} zeroed", name, lambda at, n=name: zero(at / n)  # type: ignore[misc]
        yield f"{name} missing", name if name != "manifest.json" else "", lambda at, n=name: (at / n).unlink()  # type: ignore[misc]
        yield f"{name} a folder", name if name != "manifest.json" else "", lambda at, n=name: replaced(at / n).mkdir()  # type: ignore[misc]
        yield f"{name} a pipe", name if name != "manifest.json" else "", lambda at, n=name: os.mkfifo(replaced(at / n))  # type: ignore[misc]
        yield f"{name} a link out", name, lambda at, n=name: link(at, n)  # type: ignore[misc]
    first, second, held_out = shards(folder)[0].name, shards(folder)[1].name, shards(folder, "validation")[0].name
    yield "two shards exchanged", "train-0", lambda at: exchange(at / first, at / second)
    yield "splits exchanged", "-0", lambda at: exchange(at / first, at / held_out)
    yield "a copy of another", first, lambda at: shutil.copy(at / second, at / first)  # type: ignore[func-returns-value]
    yield "a stranger", "train-999999.bin", lambda at: shutil.copy(at / second, at / "train-999999.bin")  # type: ignore[func-returns-value]
    yield "a token too many", shards(folder)[-1].name, lambda at: set_last(at, 60000)


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


def of_first(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest["shards"][0].update({key: value})


EDITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "reversed": lambda manifest: manifest["shards"].reverse(),
    "rotated": lambda manifest: manifest["shards"].append(manifest["shards"].pop(0)),
    "a record twice": lambda manifest: manifest["shards"].insert(0, manifest["shards"][0]),
    "a record less": lambda manifest: manifest["shards"].pop(0),
    "no records": lambda manifest: manifest["shards"].clear(),
    "records null": lambda manifest: manifest.update(shards=None),
    "records an object": lambda manifest: manifest.update(shards={"0": {}}),
    "a record null": lambda manifest: manifest["shards"].__setitem__(0, None),
    "names exchanged": lambda manifest: exchange_names(manifest),
    **{f"tokens {value!r}": of_first("tokens", value) for value in (-1, 0, 3, 10**30, 1e30, "5", None, True, [], 1.5)},
    **{f"documents {value!r}": of_first("documents", value) for value in (-1, 99, None, "1")},
    **{
        f"file {value!r}": of_first("file", value)
        for value in (
            "../secret.key", "/etc/passwd", "", ".", "..", "a/b.bin", "manifest.json", "train-000000.bin\0", "train-0.bin", None, 7,
            ["train-000000.bin"], "train-000000.bin\n", "..\\secret.key", "train-٠٠٠٠٠٠.bin", "x" * 10000,
        )
    },
    "split": of_first("split", "test"), "split a list": of_first("split", ["train"]),
    **{f"checksum {value!r}": lambda manifest, value=value: sums(manifest, value) for value in ("", "0" * 32, "0" * 64, None, 5)},
    "another key": of_first("dtype", "float64"),
    **{f"dtype {value!r}": lambda manifest, value=value: manifest.update(dtype=value)
       for value in ("uint32", "uint8", "int16", "object", "float16", "O", "S100000000", None, 3, ["uint16"], "uint16,uint16")},
    **{f"version {value!r}": lambda manifest, value=value: manifest.update(version=value) for value in (0, 1, 3, "2", 2.0, True, 10**40)},
    **{f"complete {value!r}": lambda manifest, value=value: manifest.update(complete=value) for value in (1, "true", None, False)},
    "format": lambda manifest: manifest.update(format="other"),
    "no settings": lambda manifest: manifest.pop("settings"),
    "settings a list": lambda manifest: manifest.update(settings=[]),
    "no tokenizer": lambda manifest: manifest["settings"].update(tokenizer=None),
    "splits": lambda manifest: manifest["splits"]["train"].update(tokens=1),
    "splits more": lambda manifest: manifest["splits"]["train"].update(lines=1),
    "splits null": lambda manifest: manifest.update(splits=None),
    "a split null": lambda manifest: manifest["splits"].update(train=None),
    "fraction": lambda manifest: manifest["settings"].update(validation_fraction=2.0),
    **{f"tokenizer {key} {value!r}": lambda manifest, key=key, value=value: manifest["settings"]["tokenizer"].update({key: value})
       for key, value in (("kind", "bytes"), ("kind", "pickle"), ("kind", []), ("sha256", "0" * 64), ("vocab_size", 10**12),
                          ("vocab_size", 5), ("vocab_size", -1), ("separator", 399999), ("separator", None), ("end", -1),
                          ("end", 0.0), ("path", "/etc/passwd"))},
    "a key more": lambda manifest: manifest.update(_target_="os.system"),
}  # fmt: skip


def sums(manifest: dict[str, Any], value: Any) -> None:
    manifest["shards"][0]["xxh3_128"] = value


def exchange_names(manifest: dict[str, Any]) -> None:
    one, other = manifest["shards"][:2]
    one["file"], other["file"] = other["file"], one["file"]


@pytest.mark.parametrize("sign", [True, False])
def test_every_edit_of_a_manifest_is_refused(prepared: Path, tmp_path: Path, sign: bool) -> None:
    """Even where the editor gets the manifest's own checksum right."""
    copy = tmp_path / "copy"
    shutil.copytree(prepared, copy)
    whole = (copy / "manifest.json").read_bytes()
    (tmp_path / "secret.key").write_bytes(b"\1\0" * 100)
    for what, change in EDITS.items():
        edit(copy, change, sign)
        said = refusal(copy)
        assert said is not None and str(copy) in said, what
        (copy / "manifest.json").write_bytes(whole)
    assert refusal(copy) is None


@pytest.mark.parametrize(
    "text",
    [
        "[" * 10**5, '{"a":' * 10**5, '{"format": "metattt shards", "version": 2, "shards": ' + "[" * 10**5 + "]" * 10**5 + "}",
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


def test_a_shard_that_changes_while_it_is_read(prepared: Path, tmp_path: Path) -> None:
    shutil.copytree(prepared, tmp_path / "copy")
    data = ShardData(str(tmp_path / "copy"), context_length=WIDTH - 1)
    windows, file = data.windows("train"), shards(tmp_path / "copy")[0]
    first = windows[[0]]
    os.utime(file)  # touched, and the same
    np.testing.assert_array_equal(windows[[0]], first)
    flip(file, 5, 0)
    with pytest.raises(DamagedShard, match="checksum"):
        windows[[0]]
    flip(file, 5, 0)
    np.testing.assert_array_equal(windows[[0]], first)
    os.truncate(file, 10)
    with pytest.raises(DamagedShard, match="half-written"):
        windows[[0]]
    file.unlink()
    with pytest.raises(DamagedShard, match=f"{file.name} cannot be read: No such file"):
        windows[[0]]


def test_a_shard_is_checked_once_in_a_process(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_file, "_checked", set())
    data, count = ShardData(str(prepared), context_length=WIDTH - 1), 0

    def counting() -> Any:
        nonlocal count
        count += 1
        return hasher()

    hasher = xxhash.xxh3_128
    monkeypatch.setattr(xxhash, "xxh3_128", counting)
    loader = data.loader("train")
    assert count == len(shards(prepared)) and data.loader("train") is not None and read(prepared)
    assert count == len(shards(prepared)) + len(shards(prepared, "validation"))
    windows = pickle.dumps(data.windows("train"))
    assert len(windows) < 20000  # no tokens: those stay on the disk
    monkeypatch.setattr(shard_file, "_checked", set())
    pickle.loads(windows)[[0]]  # as in a worker
    assert count == len(shards(prepared)) + len(shards(prepared, "validation")) and len(loader) > 1


def test_without_the_check_tokens_are_still_in_range(prepared: Path, tmp_path: Path) -> None:
    shutil.copytree(prepared, tmp_path / "copy")
    file = shards(tmp_path / "copy")[0]
    tokens = np.fromfile(file, np.uint16)
    tokens[3] = 65535
    tokens.tofile(file)
    with pytest.raises(DamagedShard, match=f"{file.name} holds the token 65535"):
        ShardData(str(tmp_path / "copy"), context_length=WIDTH - 1, verify=False).windows("train")[[0]]


def test_the_workers_of_a_loader_say_one_line(prepared: Path, tmp_path: Path) -> None:
    shutil.copytree(prepared, tmp_path / "copy")
    data = ShardData(str(tmp_path / "copy"), context_length=WIDTH - 1, num_workers=1)
    batches = iter(data.loader("train"))
    for file in shards(tmp_path / "copy"):
        os.truncate(file, 2)
    with pytest.raises(DamagedShard) as error:
        list(batches)
    assert "\n" not in str(error.value) and "half-written" in str(error.value)


def _rank(rank: int, folder: str, file: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    hashed = []
    check = shard_file.ShardFile._check_largest
    shard_file.ShardFile._check_largest = lambda file, token: (hashed.append(file.path.name), check(file, token))[1]  # type: ignore
    data = ShardData(folder, context_length=WIDTH - 1)
    data.setup()
    said = "fine"
    try:
        check_together(list(data._shards.values()))
        assert data.loader("all") is not None
    except DamagedShard as error:
        said = str(error)
    Path(f"{file}.{rank}").write_text(json.dumps([said, hashed]))
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork")
def test_processes_share_the_check_and_all_learn_of_a_failure(prepared: Path, tmp_path: Path) -> None:
    shutil.copytree(prepared, tmp_path / "copy")
    names = sorted(file.name for file in (tmp_path / "copy").glob("*.bin"))
    for what in ("fine", "damaged"):
        if what == "damaged":
            flip(tmp_path / "copy" / names[1], 7, 1)
        multiprocessing.start_processes(
            _rank, (str(tmp_path / "copy"), str(tmp_path / what)), nprocs=2, start_method="fork"
        )
        (one, first), (other, second) = (json.loads((tmp_path / f"{what}.{rank}").read_text()) for rank in (0, 1))
        assert one == other and ("fine" if what == "fine" else names[1]) in one
        if what == "fine":
            assert sorted(first + second) == names and abs(len(first) - len(second)) <= 1
