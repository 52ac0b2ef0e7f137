"""`metattt prepare` that is stopped, or finds no space: one line, nothing half there, and the same command goes on."""

import copy
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from metattt.composition.compose import compose
from metattt.data import units
from metattt.data.prepare import prepare
from metattt.data.shards import ShardData
from metattt.data.tokenizers import read_tokenizer
from metattt.errors import MetaTTTError
from metattt.locking import LOCK, FolderLock


class Inline:
    """What a pool of processes does, in this one: what is patched here reaches it."""

    def __init__(self, workers: int, context: object, initializer: object, initargs: tuple[units.Work]):
        self._processes: dict[int, object] = {}
        units._at_hand.update(work=initargs[0], tokenizer=read_tokenizer(initargs[0].folder, initargs[0].tokenizer))

    def submit(self, function: Callable[..., Any], *arguments: object) -> "Future[Any]":
        future: Future[Any] = Future()
        future.set_result(function(*arguments))
        return future

    def shutdown(self, cancel_futures: bool) -> None:
        pass


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metattt.data.prepare.ProcessPoolExecutor", Inline)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for index in range(14):
        (folder / f"{index}.txt").write_text(f"document {index} " * 90)
    return folder


@cache
def configuration(*overrides: str) -> DictConfig:
    return compose("target=?", "shard_bytes=4000", "validation_fraction=0.3", "workers=1", *overrides, job="prepare")


def run(corpus: Path, target: Path, *overrides: str) -> int:
    cfg = copy.deepcopy(configuration(*overrides))
    cfg.source = cfg.source or str(corpus)
    cfg.target = str(target) if cfg.target == "?" else cfg.target
    return prepare(cfg)


def refused(corpus: Path, target: Path, *overrides: str) -> str:
    with pytest.raises(MetaTTTError) as error:
        run(corpus, target, *overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def failing_at(call: int, function: Callable[..., Any], error: BaseException) -> Callable[..., Any]:
    """A function that raises the error when it is called for that time."""
    calls: Iterator[int] = iter(range(10**6))

    def fail(*arguments: object, **settings: object) -> Any:
        if next(calls) == call:
            raise error
        return function(*arguments, **settings)

    return fail


@pytest.mark.parametrize("what", ["disk full", "stopped"])
@pytest.mark.parametrize("place", ["os.fsync", "pathlib.Path.replace", "pathlib.Path.unlink"])
def test_wherever_it_ends_the_same_command_goes_on(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inline: None, what: str, place: str
) -> None:
    assert run(corpus, tmp_path / "whole") == 0
    whole, count = content(tmp_path / "whole"), 0
    assert "manifest.json" in whole and LOCK not in whole and len(whole) > 6
    error: BaseException = (
        OSError(errno.ENOSPC, "No space left on device") if what == "disk full" else KeyboardInterrupt()
    )
    for count in range(1000):
        target = tmp_path / str(count)
        with monkeypatch.context() as patch:
            owner, _, name = place.rpartition(".")
            function = os.fsync if owner == "os" else getattr(Path, name)
            patch.setattr(place, failing_at(count, function, error))
            try:
                code = run(corpus, target)
            except MetaTTTError as refusal:
                code, said = -1, str(refusal)
        if code == 0:
            assert content(target).keys() - {LOCK} == whole.keys()
            break
        assert code == (-1 if what == "disk full" else 130) and target.is_dir()
        assert code == 130 or ("No space left" in said and "free some" in said and "\n" not in said)
        assert not list(target.glob("*.part")) or what == "stopped" or place.endswith("unlink")
        if not (target / "manifest.json").is_file():
            assert "holds no shards" in unreadable(target)
        assert run(corpus, target) == 0 and content(target) == whole
    assert count > (10 if place != "pathlib.Path.unlink" else 3)


def unreadable(folder: Path) -> str:
    with pytest.raises(MetaTTTError) as error:
        ShardData(str(folder)).setup()
    return str(error.value)


@pytest.mark.slow
def test_sigterm_is_like_ctrl_c_and_two_do_not_write_at_once(corpus: Path, tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.mkdir()
    for index in range(300):
        (large / f"{index}.txt").write_text(f"document {index} " * 90)
    target = tmp_path / "target"
    settings = (f"source={large}", f"target={target}", "shard_bytes=4000", "validation_fraction=0.3", "workers=1")
    process = subprocess.Popen(
        [sys.executable, "-m", "metattt.cli", "prepare", *settings], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 120
    begun = ("train-*.bin", "manifest.json")
    while not all(any(target.glob(name)) for name in begun) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(signal.SIGSTOP)  # so that it holds the folder while we look
    before = content(target)
    said = refused(large, target)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    out, err = process.communicate(timeout=60)
    assert f"is in use by process {process.pid} on" in said and "manifest.json" in before
    assert process.returncode == 143 and b"To go on: the same command again" in out and b"Traceback" not in err
    assert not (target / LOCK).exists() and "not complete" in unreadable(target)
    assert run(large, target) == 0 and run(large, tmp_path / "whole") == 0
    assert content(target) == content(tmp_path / "whole")


def test_a_folder_begun_is_compared_with_what_is_in_it(corpus: Path, tmp_path: Path, inline: None) -> None:
    target = tmp_path / "target"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("metattt.data.prepare.finish", failing_at(0, print, KeyboardInterrupt()))
        assert run(corpus, target) == 130
    begun = content(target)
    record = sorted(target.glob("unit-*.json"))[1]

    def damaged(file: Path, data: bytes, message: str) -> None:
        file.write_bytes(data)
        said = refused(corpus, target)
        assert file.name in said and message in said, said
        file.write_bytes(begun[file.name]) if file.name in begun else file.unlink()

    damaged(record, begun[record.name][:-9], "damaged")
    damaged(record, begun[record.name].replace(b'"documents": ', b'"documents": 1'), "checksum")
    damaged(record, b"null", "is not the record of a unit")
    damaged(record, b"[" * 100000, "nested")
    damaged(target / "unit-000099.json", begun[record.name], "unit=1 cannot be")
    damaged(target / "manifest.json", begun["manifest.json"].replace(b'"seed": 0', b'"seed": 1'), "checksum")
    damaged(sorted(target.glob("*.bin"))[2], b"\0" * 100, "half-written")
    record.unlink()
    (target / record.name).symlink_to(tmp_path / "elsewhere.json")
    (tmp_path / "elsewhere.json").write_bytes(begun[record.name])
    assert "is a link that leads out" in refused(corpus, target)
    (target / record.name).unlink()
    (target / record.name).write_bytes(begun[record.name])
    with FolderLock(target, "a test"):
        assert "is in use by process" in refused(corpus, target)
    shorter = tmp_path / "shorter"
    shorter.mkdir()
    (target / "notes.7.part").write_text("mine")  # not ours to remove
    assert run(corpus, target) == 0
    assert (target / "notes.7.part").read_text() == "mine"


def test_a_source_that_lost_its_end_is_another(corpus: Path, tmp_path: Path, inline: None) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for index in range(9):
        (source / f"{index}.txt").write_text("x" * 4000)  # a unit each
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("metattt.data.prepare.finish", failing_at(0, print, KeyboardInterrupt()))
        assert run(source, tmp_path / "target") == 130
    (source / "8.txt").unlink()
    assert "has changed since" in refused(source, tmp_path / "target")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("source=' '",), "has no value"),
        (("source=['']",), "has no value"),
        (("source=[a,'']",), "has no value"),
        (("source={a: 1}", "dataset_files=[1]"), "cannot be opened as a dataset"),
        (("source='~nobody-of-that-name/x'",), "is no path"),
        (("source=/" + "x" * 5000,), "File name too long"),
        (("target='~nobody-of-that-name/x'",), "is no path"),
        (("target=/dev/null/x",), "Not a directory"),
        (("target=/dev/null",), "is no folder"),
        (("target=/tmp/" + "x" * 5000,), "File name too long"),
        (("tokenizer=''",), "has no value"),
        (("seed=1000000000000000000000000",), "is not allowed"),
        (("workers=1000000",), "at most 1,024"),
        (("shard_bytes=1000000000000000000",), "shard_bytes=1000000000000000000 is not allowed"),
        (("validation_fraction=nan",), "validation_fraction=nan is not allowed"),
    ],
)
def test_bad_settings(corpus: Path, tmp_path: Path, inline: None, overrides: tuple[str, ...], message: str) -> None:
    assert message in refused(corpus, tmp_path / "target", *overrides)
    assert not (tmp_path / "target").exists()


def test_names_that_are_not_utf8(tmp_path: Path, inline: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Names are bytes: they decide where a document goes, and are shown as they can be."""
    source = os.fsencode(tmp_path / "source") + b"\xff"
    os.mkdir(source)
    for index in range(30):
        with open(source + b"/\xfe%d.txt" % index, "w") as file:
            file.write("text " * 200)
    target = os.fsdecode(os.fsencode(tmp_path / "target") + b"\xfd")
    assert run(Path(os.fsdecode(source)), Path(target)) == 0
    assert "target\\xfd" in capsys.readouterr().out
    assert len(ShardData(target, context_length=8).windows("all")) > 100


def test_a_target_inside_its_source(corpus: Path, tmp_path: Path, inline: None) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for file in corpus.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    assert run(source, source / "shards") == 0
    before = content(source / "shards")
    assert run(source, source / "shards") == 0 and run(source, tmp_path / "beside") == 0
    assert content(source / "shards") == content(tmp_path / "beside") == before
    assert "holds something else" in refused(source, source)
