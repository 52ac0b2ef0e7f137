"""Units of text: consecutive documents that one process tokenises and writes, as a shard for each split.

What is known of a unit is written before its shards get their names: a shard without a record is not ours.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from metattt.data.documents import Document
from metattt.data.manifest import (
    CHECKSUM,
    SPLITS,
    TOKENIZER,
    dtype_of,
    read_record,
    record_name,
    refuse_strangers,
    write_signed,
)
from metattt.data.shard_file import ShardFile
from metattt.data.tokenizer_probe import trust
from metattt.data.tokenizers import read_tokenizer
from metattt.data.windows import Tokenizer
from metattt.errors import MetaTTTError
from metattt.io import sync, write_whole


@dataclass
class Work:
    """What every unit needs.

    Attributes:
        folder: of the shards; the tokenizer is in it.
        tokenizer: its fingerprint.
        validation_fraction: share of the documents held out.
        seed: of that choice.
    """

    folder: Path
    tokenizer: dict[str, Any]
    validation_fraction: float
    seed: int

    @property
    def dtype(self) -> np.dtype:
        """Of the tokens."""
        return dtype_of(self.tokenizer["vocab_size"])


def cut(documents: Iterator[Document], size: int) -> Iterator[list[Document]]:
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


def is_held_out(document: Document, fraction: float, seed: int) -> bool:
    """Whether a document is in the validation split."""
    return document.share(seed) < fraction if document.held_out is None else document.held_out


def digest(unit: list[Document]) -> str:
    """What tells the text of a unit from any other."""
    found = hashlib.sha256()
    for document in unit:
        found.update(document.name + f"\n{len(document.text)}\n".encode())
        found.update(document.text)
    return found.hexdigest()


def size(record: dict[str, Any]) -> int:
    """Bytes of text in a unit, from its record."""
    return sum(shard["bytes"] for shard in record["shards"])


def finished_units(work: Work) -> dict[int, dict[str, Any]]:
    """The records of units whose shards are all there.

    Raises:
        MetaTTTError: a shard that is not as its record says, or without a record; a record that is damaged.
    """
    records: dict[int, dict[str, Any]] = {}
    known: set[str] = set()
    for file in sorted(work.folder.glob(record_name(0).replace("000000", "*"))):
        record = read_record(file)
        known |= {shard["file"] for shard in record["shards"]}
        present = [shard for shard in record["shards"] if (work.folder / shard["file"]).is_file()]
        for shard in present:
            ShardFile.of(work.folder, shard, work.dtype, work.tokenizer["vocab_size"], whole=True).check()
        if len(present) == len(record["shards"]):  # else it was killed between two names: once more
            records[record["unit"]] = record
    refuse_strangers(work.folder, known)
    return records


# -- in the workers ----------------------------------------------------------------------------------------------------

_at_hand: dict[str, Any] = {}


def start_worker(work: Work) -> None:
    """Reads the tokenizer; and keeps a watch, so that no worker outlives a main process that is killed."""
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # they are for the main process, which ends its workers
        signal.signal(one, signal.SIG_IGN)
    threading.Thread(target=_die_with_the_main_process, daemon=True).start()
    if work.tokenizer["kind"] == TOKENIZER:
        trust(work.tokenizer["sha256"])
    _at_hand.update(work=work, tokenizer=read_tokenizer(work.folder, work.tokenizer))


def _die_with_the_main_process() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def write_unit(index: int, unit: list[Document]) -> dict[str, Any]:
    """Tokenises a unit, writes its shards, and returns its record.

    Raises:
        MetaTTTError: a text that the tokenizer cannot encode.
        OSError: it cannot be written.
    """
    work, tokenizer = _at_hand["work"], _at_hand["tokenizer"]
    record: dict[str, Any] = {"unit": index, "input": digest(unit), "documents": len(unit), "shards": []}
    contents: dict[Path, memoryview] = {}
    for split in SPLITS:
        held_out = split == "validation"
        chosen = [one for one in unit if is_held_out(one, work.validation_fraction, work.seed) == held_out]
        if not chosen:
            continue
        tokens = _tokens(chosen, tokenizer, work.dtype)
        file = work.folder / f"{split}-{index:06d}.bin"
        contents[file] = tokens.data.cast("B")
        shard: dict[str, Any] = {
            "file": file.name, "split": split, "documents": len(chosen), "bytes": sum(len(one.text) for one in chosen),
            "tokens": len(tokens), CHECKSUM: xxhash.xxh3_128_hexdigest(contents[file]),
        }  # fmt: skip
        record["shards"].append(shard)
    write_signed(work.folder / record_name(index), record)
    for file, content in contents.items():
        write_whole(file, content)
    sync(work.folder)
    return record


def _tokens(documents: list[Document], tokenizer: Tokenizer, dtype: np.dtype) -> np.ndarray:
    """The tokens of documents, one after the other, each between its start and its end."""
    start = np.array([tokenizer.separator], dtype)
    end = np.array([] if tokenizer.end is None else [tokenizer.end], dtype)
    pieces: list[np.ndarray] = []
    for document in documents:
        try:
            pieces += [start, tokenizer.encode(document.text).astype(dtype), end]
        except MetaTTTError as error:
            shown = document.name.decode(errors="backslashreplace")
            raise MetaTTTError(f"{shown}: {error}") from error
    return np.concatenate(pieces)
