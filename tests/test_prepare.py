"""Prepared text: the same bytes whatever happens on the way, strangers refused, windows and documents as they should
be."""

import csv
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from tokenizer_for_tests import trained_tokenizer

from metattt.composition.compose import compose
from metattt.composition.instantiate import instantiate_model
from metattt.data.documents import find_files, iterate_documents
from metattt.data.manifest import write_signed
from metattt.data.prepare import prepare
from metattt.data.shards import ShardData, ShardWindows
from metattt.data.sources import open_source
from metattt.data.tokenizers import load_tokenizer
from metattt.data.units import cut, digest
from metattt.errors import MetaTTTError
from metattt.metrics_file import CLOCK

SMALL = ("shard_bytes=4000", "validation_fraction=0.2", "workers=1")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for index in range(40):
        (folder / f"{index:02d}.txt").write_text(f"document {index}: " + f"word{index} é " * (20 + 7 * index))
    rows = [json.dumps({"text": f"row {row} " * 50}) for row in range(30)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return folder


def settings(corpus: Path, target: Path, *overrides: str) -> tuple[str, ...]:
    return (f"source={corpus}", f"target={target}", *SMALL, *overrides)


def run(corpus: Path, target: Path, *overrides: str) -> int:
    return prepare(compose(*settings(corpus, target, *overrides), job="prepare"))


def refused(corpus: Path, target: Path, *overrides: str) -> str:
    with pytest.raises(MetaTTTError) as error:
        run(corpus, target, *overrides)
    assert str(error.value).count("\n") <= 1
    return str(error.value)


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def prepared(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared") / "shards"
    assert run(corpus, folder) == 0
    return folder


def test_the_shards_hold_the_documents_and_the_manifest_counts_them(corpus: Path, prepared: Path) -> None:
    manifest = json.loads((prepared / "manifest.json").read_text())
    documents = list(iterate_documents(find_files(str(corpus)), "text"))
    data = ShardData(str(prepared), context_length=64)
    for split in ("train", "validation"):
        chosen = [document.text for document in documents if (document.share(0) < 0.2) == (split == "validation")]
        expected = b"".join(chosen)
        counts = manifest["splits"][split]
        assert counts == {"documents": len(chosen), "bytes": len(expected), "tokens": len(expected) + len(chosen)}
        windows = data.windows(split)
        assert isinstance(windows, ShardWindows) and len(windows.pieces) > 3
        tokens = windows.tokens(0, counts["tokens"] + 5)
        assert data.tokenizer.decode(tokens.tolist()) == expected and tokens[0] == 256
        rows = windows[list(range(len(windows)))]  # windows cross the borders of files
        np.testing.assert_array_equal(rows.reshape(-1), tokens[: rows.size])
    assert not list(prepared.glob("*.part")) and not list(prepared.glob("unit-*"))


def test_workers_change_nothing(corpus: Path, prepared: Path, tmp_path: Path) -> None:
    assert run(corpus, tmp_path / "two", "workers=2") == 0
    assert content(tmp_path / "two") == content(prepared)


@pytest.mark.slow
def test_killed_and_resumed_is_as_if_nothing_had_happened(corpus: Path, prepared: Path, tmp_path: Path) -> None:
    target = tmp_path / "killed"
    command = [sys.executable, "-m", "metattt.cli", "prepare", *settings(corpus, target)]
    for shards in (1, 4):  # killed twice, each time a little later
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while len(list(target.glob("train-*.bin"))) < shards and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.0005)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert len(list(target.glob("train-*.bin"))) >= shards
        if not json.loads((target / "manifest.json").read_text())["complete"]:
            with pytest.raises(MetaTTTError, match="not complete: run the same metattt prepare again"):
                ShardData(str(target)).setup()
    time.sleep(0.5)  # the orphaned worker sees that it is alone
    (target / "train-000099.bin.1.part").write_bytes(b"half")
    assert run(corpus, target) == 0
    assert content(target) == content(prepared)


def begun(corpus: Path, prepared: Path, folder: Path) -> None:
    """A folder whose preparation stopped after its second unit."""
    manifest = json.loads((prepared / "manifest.json").read_text())
    folder.mkdir()
    units: dict[int, list[dict[str, object]]] = {0: [], 1: []}
    for shard in manifest["shards"]:
        unit = int(shard["file"].partition("-")[2].removesuffix(".bin"))
        if unit in units:
            units[unit].append(shard)
            (folder / shard["file"]).write_bytes((prepared / shard["file"]).read_bytes())
    for unit, shards in units.items():
        shards.sort(key=lambda shard: str(shard["split"]))
        documents = sum(int(str(shard["documents"])) for shard in shards)
        record = {"unit": unit, "input": fingerprint(corpus, unit), "documents": documents, "shards": shards}
        write_signed(folder / f"unit-{unit:06d}.json", record)
    unfinished = {key: value for key, value in manifest.items() if key not in ("splits", "shards")} | {
        "complete": False
    }
    write_signed(folder / "manifest.json", unfinished)


def fingerprint(corpus: Path, unit: int) -> str:
    return [digest(one) for one in cut(iterate_documents(find_files(str(corpus)), "text"), 4000)][unit]


def test_half_written_and_foreign_shards_are_refused(corpus: Path, prepared: Path, tmp_path: Path) -> None:
    begun(corpus, prepared, tmp_path / "fine")
    assert run(corpus, tmp_path / "fine") == 0 and content(tmp_path / "fine") == content(prepared)

    begun(corpus, prepared, tmp_path / "cut")
    shard = tmp_path / "cut" / "train-000001.bin"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-100])
    assert "train-000001.bin has" in (message := refused(corpus, tmp_path / "cut")) and "half-written" in message
    shard.write_bytes(whole[:-2] + b"xx")  # as long as it should be
    assert "checksum" in refused(corpus, tmp_path / "cut")
    shard.unlink()
    assert run(corpus, tmp_path / "cut") == 0 and content(tmp_path / "cut") == content(prepared)

    begun(corpus, prepared, tmp_path / "foreign")
    (tmp_path / "foreign" / "train-000007.bin").write_bytes(b"abcd")
    assert "train-000007.bin is in no record" in refused(corpus, tmp_path / "foreign")


def test_a_run_does_not_mix_with_another(corpus: Path, prepared: Path, tmp_path: Path) -> None:
    before = content(prepared)
    assert "begun with seed=0, not 1" in refused(corpus, prepared, "seed=1")
    assert "begun with source=" in refused(corpus / "rows.jsonl", prepared)
    assert run(corpus, prepared) == 0 and content(prepared) == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    assert "holds something else" in refused(corpus, tmp_path / "mine")
    changed = tmp_path / "changed"
    changed.mkdir()
    for index in range(9):
        (changed / f"{index}.txt").write_text("a text " * 300)
    begun(changed, prepared_of(changed, tmp_path / "whole"), tmp_path / "stopped")
    (changed / "0.txt").write_text("another text")
    assert "has changed since" in refused(changed, tmp_path / "stopped")


def prepared_of(corpus: Path, folder: Path) -> Path:
    run(corpus, folder)
    return folder


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("validation_fraction=1",), "validation_fraction=1.0 is not allowed"),
        (("shard_bytes=0",), "shard_bytes=0 is not allowed"),
        (("validation_fraction=1e-9",), "no document is in the validation split"),
        (("tokenizer=./none.json",), "tokenizer=./none.json does not exist"),
        (("workers=many",), "workers"),
    ],
)
def test_bad_settings_are_one_line(corpus: Path, tmp_path: Path, overrides: tuple[str, ...], message: str) -> None:
    assert message in refused(corpus, tmp_path / "target", *overrides)


@pytest.mark.parametrize("documents", [0, 3])
def test_a_split_without_documents_is_noticed_before_the_work(documents: int, tmp_path: Path) -> None:
    (tmp_path / "few").mkdir()
    (tmp_path / "few" / "empty.txt").touch()
    for index in range(documents):
        (tmp_path / "few" / f"{index}.txt").write_text(f"document {index}")
    said = refused(tmp_path / "few", tmp_path / "target", "validation_fraction=0.01")
    assert f"no document is in the {'validation' if documents else 'train'} split" in said and "validation_source=" in said
    assert not (tmp_path / "target").exists()
    (tmp_path / "held.txt").write_text("another")
    if documents:
        assert run(tmp_path / "few", tmp_path / "target", f"validation_source={tmp_path / 'held.txt'}") == 0


def test_what_is_no_file_is_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "does not exist" in refused(tmp_path / "nowhere.jsonl", tmp_path / "a")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'metattt[text]'" in refused(Path("someone/texts"), tmp_path / "b")

    class Rows(list):  # type: ignore[type-arg]
        def skip(self, count: int) -> "Rows":
            return Rows(self[count:])

    rows = Rows({"text": f"row {row} " * 40} for row in range(60))
    library = SimpleNamespace(load_dataset=lambda name, config, data_files, split, streaming: rows)
    monkeypatch.setitem(sys.modules, "datasets", library)
    assert run(Path("someone/texts"), tmp_path / "streamed") == 0
    assert (
        json.loads((tmp_path / "streamed" / "manifest.json").read_text())["settings"]["source"] == "someone/texts/train"
    )


@pytest.mark.parametrize("kind", ["json", "text", "parquet"])
def test_streaming_with_the_library_of_hugging_face(kind: str, tmp_path: Path) -> None:
    """The library itself, on files of this machine."""
    texts = [f"row {row} " * 40 for row in range(60)]
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    for index in range(2) if kind != "parquet" else ():  # several files, one of them compressed
        lines = texts[30 * index : 30 * index + 30]
        content = "\n".join(json.dumps({"text": text}) for text in lines) if kind == "json" else "\n".join(lines)
        (tmp_path / f"{index}.gz").write_bytes(gzip.compress(content.encode())) if index else (
            tmp_path / "0.txt"
        ).write_text(content)
    files = str(tmp_path / "a.parquet") if kind == "parquet" else [str(tmp_path / "0.txt"), str(tmp_path / "1.gz")]
    stream = open_source(kind, "text", None, "train", files)
    documents = list(stream.documents())
    assert [document.text.decode().strip() for document in documents] == [text.strip() for text in texts]
    assert list(stream.documents(skip=37)) == documents[37:]
    listed = files if isinstance(files, str) else f"[{','.join(files)}]"
    settings = (f"source={kind}", f"dataset_files={listed}", "tokenizer=bytes", *SMALL)
    assert prepare(compose(*settings, f"target={tmp_path / 'shards'}", job="prepare")) == 0
    manifest = json.loads((tmp_path / "shards" / "manifest.json").read_text())
    assert sum(split["documents"] for split in manifest["splits"].values()) == 60
    assert sum(split["bytes"] for split in manifest["splits"].values()) == sum(
        len(document.text) for document in documents
    )
    with pytest.raises(MetaTTTError, match="row 0 has no text in 'words'"):
        next(open_source(kind, "words", None, "train", files).documents())
    with pytest.raises(MetaTTTError, match="cannot be opened as a dataset"):
        open_source(kind, "text", None, "test", files)


@pytest.mark.slow
def test_a_streamed_dataset_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"row {row} " * 60}) for row in range(200)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    settings = ("source=json", f"dataset_files={tmp_path / 'rows.jsonl'}", *SMALL)
    assert prepare(compose(*settings, f"target={tmp_path / 'whole'}", job="prepare")) == 0
    command = [sys.executable, "-m", "metattt.cli", "prepare", *settings, f"target={tmp_path / 'killed'}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while (
        len(list((tmp_path / "killed").glob("train-*.bin"))) < 2
        and process.poll() is None
        and time.monotonic() < deadline
    ):
        time.sleep(0.0005)
    process.kill()
    process.wait()
    time.sleep(0.5)  # the orphaned worker sees that it is alone
    assert prepare(compose(*settings, f"target={tmp_path / 'killed'}", job="prepare")) == 0
    assert content(tmp_path / "killed") == content(tmp_path / "whole")


def test_a_tokenizer_from_a_file(corpus: Path, tmp_path: Path) -> None:
    trained_tokenizer(corpus, tmp_path / "tokenizer.json")
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    text = "wörd <s> is text\n"
    ids = tokenizer.encode(text)
    assert tokenizer.separator not in ids and tokenizer.decode(ids.tolist()) == text.encode()
    assert int(tokenizer.token_bytes[ids.astype(np.int64)].sum()) == len(text.encode())
    assert run(corpus, tmp_path / "shards", f"tokenizer={tmp_path / 'tokenizer.json'}") == 0
    data = ShardData(str(tmp_path / "shards"), context_length=16)
    windows = data.windows("all")
    assert isinstance(windows, ShardWindows) and 256 < data.tokenizer.vocab_size <= 400
    ids = windows.tokens(0, 10**6)
    assert (ids == tokenizer.separator).sum() == (ids == tokenizer.end).sum() == 70  # BOS + text + EOS
    assert len(data.tokenizer.decode(ids.tolist())) == sum(
        len(d.text) for d in iterate_documents(find_files(str(corpus)), "text")
    )
    (tmp_path / "shards" / "tokenizer.json").write_text(
        (tmp_path / "tokenizer.json").read_text().replace('"<s>"', '"<bos>"')
    )
    with pytest.raises(MetaTTTError, match="is not the tokenizer of these shards"):
        ShardData(str(tmp_path / "shards")).setup()


def test_shards_are_checked_before_training(prepared: Path, tmp_path: Path) -> None:
    with pytest.raises(MetaTTTError, match=r"holds no shards: write them with metattt prepare"):
        ShardData(str(tmp_path)).setup()
    folder = tmp_path / "copy"
    folder.mkdir()
    for name, data in content(prepared).items():
        (folder / name).write_bytes(data)
    shard = sorted(folder.glob("train-*.bin"))[0]
    shard.write_bytes(b"xx" + shard.read_bytes()[2:])
    with pytest.raises(MetaTTTError, match="checksum"):
        ShardData(str(folder), context_length=64).loader("train")
    shard.write_bytes(b"xx")
    with pytest.raises(MetaTTTError, match="half-written"):
        ShardData(str(folder)).setup()
    with pytest.raises(MetaTTTError, match=r"fewer than the 1000001 of one window.*data\.context_length="):
        ShardData(str(prepared), context_length=10**6).windows("train")


@pytest.mark.parametrize("layer", ["ttt_linear", "ttt_mlp", "attention", "mamba2"])
def test_documents_with_resets_are_as_documents_apart(prepared: Path, layer: str) -> None:
    from metattt.training.text_module import AdamW, LanguageModeling

    data = ShardData(str(prepared), context_length=700, document_reset=True)
    window = next(iter(data.loader("train")))[:1]
    model = instantiate_model(compose(f"layer={layer}", "dim=16", "num_heads=2", "model.num_layers=2"))
    data.setup()
    together = LanguageModeling(model, AdamW(), data.tokenizer.token_bytes, {}, data.document_start).sums(window)[0]
    starts = [*(place for place in range(1, 700) if window[0, place] == 256), 700]
    assert len(starts) > 2
    apart, first = torch.zeros(()), 0
    for last in starts:  # a document, and the label after its last token
        apart = (
            apart
            + LanguageModeling(model, AdamW(), data.tokenizer.token_bytes, {}).sums(window[:, first : last + 1])[0]
        )
        first = last
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=0)


def test_a_run_on_shards_resumes_bitwise(prepared: Path, tmp_path: Path) -> None:
    from metattt.checkpoints.trained import read_checkpoint
    from metattt.training.train import train

    tiny = (
        "data=shards", f"data.path={prepared}", "data.context_length=32", "data.batch_size=2", "batch_tokens=192", "dim=16", "num_heads=2",
        "model.num_layers=1", "trainer.accelerator=cpu", "trainer.log_every_n_steps=1", "data.document_reset=true", "trainer.max_steps=6",
        "data.validation_max_tokens=500",
    )  # fmt: skip
    assert train(compose(*tiny, f"output_dir={tmp_path / 'whole'}")) == 0
    stopping = ("callbacks.checkpoint.every_steps=4", "callbacks.checkpoint.best=null", f"output_dir={tmp_path / 'cut'}")
    stop = compose(*tiny, *stopping)
    with pytest.MonkeyPatch.context() as patch:

        def killed(self: object, trainer: SimpleNamespace, *_: object) -> None:
            if trainer.global_step == 5:
                raise KeyError("killed")

        patch.setattr("metattt.training.callbacks.LossCurve.on_train_batch_end", killed)
        with pytest.raises(KeyError):
            train(stop)
    assert read_checkpoint(tmp_path / "cut")["global_step"] == 4
    assert train(compose(f"resume={tmp_path / 'cut'}")) == 0
    whole, resumed = (read_checkpoint(tmp_path / name)["state_dict"] for name in ("whole", "cut"))
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())
    logs = []
    for name in ("whole", "cut"):
        with (tmp_path / name / "metrics.csv").open(newline="") as file:
            logs.append(
                [
                    {key: value for key, value in row.items() if key not in CLOCK}
                    for row in csv.DictReader(file)
                ]
            )
    assert logs[0] == logs[1]
