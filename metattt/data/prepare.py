"""`metattt prepare`: text to memory-mapped shards of tokens, in parallel, going on where a killed run stopped.

The documents are cut, in their order, into units of `shard_bytes` of text. A unit becomes one shard per split, whoever
tokenises it and whenever, so that the files do not depend on the number of workers or on interruptions. What is known
of a unit is written before its shards get their names: a shard without a record is not ours.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from metattt.composition.settings import settings
from metattt.data.documents import Document
from metattt.data.manifest import (
    FORMAT,
    MANIFEST,
    VERSION,
    check_shard,
    partial,
    read_manifest,
    refuse_strangers,
    write_json,
)
from metattt.data.progress import BytesProgress
from metattt.data.sources import Source, is_local, open_source
from metattt.data.tokenizers import TOKENIZER, FileTokenizer, fingerprint, load_tokenizer
from metattt.data.windows import Tokenizer
from metattt.errors import MetaTTTError, check_integer

SPLITS = ("train", "validation")


@dataclass
class PrepareSettings:
    """The keys of `configs/prepare.yaml`."""

    target: str
    source: Any = None
    text_key: str = "text"
    dataset_config: str | None = None
    dataset_split: str = "train"
    dataset_files: Any = None
    tokenizer: str = "bytes"
    validation_fraction: float = 0.01
    seed: int = 0
    shard_bytes: int = 2**26
    workers: int | None = None


def prepare(cfg: DictConfig) -> int:
    """Writes the shards and the manifest, or what is missing of them.

    Args:
        cfg: the configuration of the job `prepare`.

    Returns:
        The exit code: 0, or 130 after Ctrl-C.

    Raises:
        MetaTTTError: a setting, a source or a tokenizer that cannot be used, or a folder with files of another run.
    """
    chosen = _settings(cfg)
    console = Console(highlight=False, soft_wrap=True)
    folder = Path(chosen.target).expanduser()
    tokenizer = load_tokenizer(chosen.tokenizer)
    if isinstance(chosen.source, str) and chosen.dataset_files is None and not is_local(chosen.source):
        console.print(f"there is no {chosen.source} here: asking the Hugging Face Hub for a dataset of that name")
    source = open_source(
        chosen.source, chosen.text_key, chosen.dataset_config, chosen.dataset_split, chosen.dataset_files
    )
    manifest = _begin(folder, chosen, tokenizer, source)
    if manifest["complete"]:
        console.print(f"{folder} is complete already")
    else:
        try:
            units = _write_units(folder, chosen, tokenizer, source)
        except KeyboardInterrupt:
            console.print(f"stopped. To go on: the same command again, target={folder}")
            return 130
        manifest = _finish(folder, manifest, units)
    table = Table(
        "split", *(f"{column:>10}" for column in ("documents", "MB of text", "M tokens", "shards")), title=str(folder)
    )
    for split, counts in manifest["splits"].items():
        number = sum(shard["split"] == split for shard in manifest["shards"])
        table.add_row(
            split,
            f"{counts['documents']:>10,}",
            f"{counts['bytes'] / 1e6:>10,.1f}",
            f"{counts['tokens'] / 1e6:>10,.2f}",
            f"{number:>10}",
        )
    console.print(table)
    return 0


def _settings(cfg: DictConfig) -> PrepareSettings:
    chosen = settings(PrepareSettings, cfg, target="no folder for the shards is given: add target=<a new folder>")
    if not 0 <= chosen.validation_fraction < 1:
        raise MetaTTTError(
            f"validation_fraction={chosen.validation_fraction} is not allowed: it must be at least 0 and less than 1"
        )
    for key in ("shard_bytes", "workers"):
        if getattr(chosen, key) is not None:
            check_integer(key, getattr(chosen, key), most=1024 if key == "workers" else 2**40)
    return chosen


def _begin(folder: Path, chosen: PrepareSettings, tokenizer: Tokenizer, source: Source) -> dict[str, Any]:
    """The manifest of the folder: as it is, if the settings are the same, or a new one.

    Raises:
        MetaTTTError: a folder that holds other things, or shards of other settings.
    """
    settings = {
        "source": source.name,
        "text_key": chosen.text_key,
        "validation_fraction": chosen.validation_fraction,
        "seed": chosen.seed,
        "shard_bytes": chosen.shard_bytes,
        "tokenizer": fingerprint(tokenizer),
    }
    manifest = read_manifest(folder) if folder.is_dir() else None
    if manifest is None:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise MetaTTTError(f"target={folder} exists and holds something else: choose a new folder")
        folder.mkdir(parents=True, exist_ok=True)
        dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
        manifest = {"format": FORMAT, "version": VERSION, "complete": False, "dtype": dtype, "settings": settings}
        write_json(folder / MANIFEST, manifest)
    for key, value in settings.items():
        before = manifest["settings"].get(key)
        if before != value:
            raise MetaTTTError(
                f"target={folder} was begun with {key}={before}, not {value}: say the same again, or choose a new folder"
            )
    if isinstance(tokenizer, FileTokenizer) and not (folder / TOKENIZER).is_file():
        part = partial(folder / TOKENIZER)
        part.write_text(tokenizer.content, encoding="utf-8")
        part.replace(folder / TOKENIZER)
    for leftover in folder.glob("*.part"):  # of a run that was killed
        leftover.unlink(missing_ok=True)
    if manifest["complete"]:
        for record in folder.glob("unit-*.json"):
            record.unlink()
        refuse_strangers(folder, {shard["file"] for shard in manifest["shards"]})
        for shard in manifest["shards"]:
            check_shard(folder, shard, np.dtype(manifest["dtype"]).itemsize, checksum=True)
    return manifest


def _write_units(folder: Path, chosen: PrepareSettings, tokenizer: Tokenizer, source: Source) -> list[dict[str, Any]]:
    """Tokenises all units that are not there yet; the records of all."""
    item_size = 2 if tokenizer.vocab_size <= 2**16 else 4
    records = _finished_units(folder, item_size)
    leading = next(index for index in range(len(records) + 1) if index not in records)
    skipped = leading if source.can_skip else 0
    documents = source.documents(sum(records[index]["documents"] for index in range(skipped)))
    workers = chosen.workers or os.cpu_count() or 1
    arguments = (chosen.tokenizer, str(folder), chosen.validation_fraction, chosen.seed, np.dtype(f"u{item_size}").name)
    pending: deque[tuple[int, Future[dict[str, Any]]]] = deque()
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=arguments
    )
    try:
        with BytesProgress(source.num_bytes, sum(_bytes(record) for record in records.values())) as progress:
            for index, unit in enumerate(_units(documents, chosen.shard_bytes), start=skipped):
                if index in records:
                    if records[index]["input"] != _fingerprint(unit):
                        raise MetaTTTError(
                            f"source={source.name} has changed since {folder} was begun: choose a new folder"
                        )
                    continue
                pending.append((index, pool.submit(_write_unit, index, unit)))
                while len(pending) > workers:  # one unit waits for every worker
                    _collect(pending, records, progress)
            while pending:
                _collect(pending, records, progress)
    finally:
        pool.shutdown(cancel_futures=True)
    return [records[index] for index in sorted(records)]


def _collect(
    pending: deque[tuple[int, Future[dict[str, Any]]]], records: dict[int, dict[str, Any]], progress: BytesProgress
) -> None:
    index, future = pending.popleft()
    records[index] = future.result()
    progress.advance(_bytes(records[index]))


def _bytes(record: dict[str, Any]) -> int:
    return sum(shard["bytes"] for shard in record["shards"])


def _units(documents: Iterator[Document], size: int) -> Iterator[list[Document]]:
    """Consecutive documents with at least `size` bytes together, but for the last."""
    unit: list[Document] = []
    held = 0
    for document in documents:
        unit.append(document)
        held += len(document.text)
        if held >= size:
            yield unit
            unit, held = [], 0
    if unit:
        yield unit


def _fingerprint(unit: list[Document]) -> str:
    digest = hashlib.sha256()
    for document in unit:
        digest.update(f"{document.key}\n{len(document.text)}\n".encode())
        digest.update(document.text)
    return digest.hexdigest()


def _finished_units(folder: Path, item_size: int) -> dict[int, dict[str, Any]]:
    """The records of units whose shards are all there.

    Raises:
        MetaTTTError: a shard that is not as its record says, or without a record.
    """
    records: dict[int, dict[str, Any]] = {}
    known: set[str] = set()
    for file in sorted(folder.glob("unit-*.json")):
        record = json.loads(file.read_text(encoding="utf-8"))
        known |= {shard["file"] for shard in record["shards"]}
        present = [shard for shard in record["shards"] if (folder / shard["file"]).is_file()]
        for shard in present:
            check_shard(folder, shard, item_size, checksum=True)
        if len(present) == len(record["shards"]):  # else it was killed between two names: once more
            records[record["unit"]] = record
    refuse_strangers(folder, known)
    return records


def _finish(folder: Path, manifest: dict[str, Any], units: list[dict[str, Any]]) -> dict[str, Any]:
    """The complete manifest, written; the records of units are in it and go.

    Raises:
        MetaTTTError: a split without documents.
    """
    shards = [shard for unit in units for shard in unit["shards"]]
    fraction = manifest["settings"]["validation_fraction"]
    for split in SPLITS if fraction > 0 else SPLITS[:1]:
        if not any(shard["split"] == split for shard in shards):
            raise MetaTTTError(
                f"no document is in the {split} split: set validation_fraction (now {fraction}) or seed, and another target"
            )
    splits = {
        split: {
            key: sum(shard[key] for shard in shards if shard["split"] == split)
            for key in ("documents", "bytes", "tokens")
        }
        for split in SPLITS
    }
    manifest = {
        **manifest,
        "complete": True,
        "splits": splits,
        "shards": sorted(shards, key=lambda shard: shard["file"]),
    }
    write_json(folder / MANIFEST, manifest)
    for record in folder.glob("unit-*.json"):
        record.unlink()
    return manifest


# -- in the workers ----------------------------------------------------------------------------------------------------

_work: dict[str, Any] = {}


def _start_worker(tokenizer: str, folder: str, validation_fraction: float, seed: int, dtype: str) -> None:
    """What every unit needs; and a watch, so that no worker outlives a main process that is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process
    threading.Thread(target=_die_with_the_main_process, daemon=True).start()
    file = Path(folder) / TOKENIZER
    _work.update(
        tokenizer=load_tokenizer(str(file) if file.is_file() else tokenizer),
        folder=Path(folder), validation_fraction=validation_fraction, seed=seed, dtype=np.dtype(dtype),
    )  # fmt: skip


def _die_with_the_main_process() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _write_unit(index: int, unit: list[Document]) -> dict[str, Any]:
    """Tokenises a unit, writes its shards, and returns its record."""
    tokenizer: Tokenizer = _work["tokenizer"]
    dtype, folder = _work["dtype"], _work["folder"]
    start = np.array([tokenizer.separator], dtype)
    end = np.array([] if tokenizer.end is None else [tokenizer.end], dtype)
    record: dict[str, Any] = {"unit": index, "input": _fingerprint(unit), "documents": len(unit), "shards": []}
    parts: list[tuple[Path, Path]] = []
    for split in SPLITS:
        held_out = split == "validation"
        chosen = [
            document for document in unit if (document.share(_work["seed"]) < _work["validation_fraction"]) == held_out
        ]
        if not chosen:
            continue
        tokens = np.concatenate(
            [piece for document in chosen for piece in (start, tokenizer.encode(document.text).astype(dtype), end)]
        )
        file = folder / f"{split}-{index:06d}.bin"
        part = partial(file)
        with part.open("wb") as stream:
            tokens.tofile(stream)
            stream.flush()
            os.fsync(stream.fileno())
        parts.append((part, file))
        record["shards"].append(
            {
                "file": file.name, "split": split, "documents": len(chosen), "bytes": sum(len(document.text) for document in chosen),
                "tokens": len(tokens), "sha256": hashlib.sha256(tokens.tobytes()).hexdigest(),
            }
        )  # fmt: skip
    write_json(folder / f"unit-{index:06d}.json", record)
    for part, file in parts:
        part.replace(file)
    return record
