"""The record of a folder of shards: what is in every file, and from which text and settings it was made.

It is data: names without folders, numbers of the right kind, checksums of the shards and one of its own. Whatever was
changed in it is found before a file that it names is opened.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from metattt.errors import MetaTTTError
from metattt.io import inside, parse, read_text, write_whole

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
FORMAT = "metattt shards"
VERSION = 2  # of the format; no other is read
CHECKSUM = "xxh3_128"  # of a shard, in its record
SPLITS = ("train", "validation")
COUNTS = ("documents", "bytes", "tokens")
RECORD_BYTES = 1024  # of a shard in a manifest, at most; ours have 250
SETTINGS_BYTES = 2**20  # of everything else in it, at most: a source may be a long list of files

Check = Callable[[Any], bool]


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder; None if there is none. The files that it names are not looked at.

    Raises:
        MetaTTTError: a file of that name that is not a manifest of ours, or not as it was written.
    """
    file = inside(folder, MANIFEST)
    if not file.is_file():
        return None
    content = parse(read_text(file, SETTINGS_BYTES + RECORD_BYTES * _count(folder)), str(file))
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise MetaTTTError(f"{file} was not written by metattt prepare")
    version = content.get("version")
    if type(version) is not int or version != VERSION:
        raise MetaTTTError(
            f"{file} has version {version!r:.40}; this release reads version {VERSION}: prepare the text again, in a new folder"
        )
    _check_own(file, content)
    _check_manifest(file, content)
    return content


def read_record(file: Path) -> dict[str, Any]:
    """The record of a unit, of a preparation that is not complete.

    Raises:
        MetaTTTError: it is not as it was written.
    """
    advice = "to write its shards again, remove it and them"
    content = parse(read_text(inside(file.parent, file.name), SETTINGS_BYTES), str(file))
    if not isinstance(content, dict):
        raise MetaTTTError(f"{file} is not the record of a unit: {advice}")
    _check_own(file, content)
    _check_fields(file, "", content, {
        "unit": lambda value: _is_count(value) and file.name == record_name(value), "input": _is_hex(64),
        "documents": _is_count, "shards": lambda value: isinstance(value, list) and 0 < len(value) <= len(SPLITS),
    })  # fmt: skip
    _check_shards(file, content["shards"])
    return content


def record_name(unit: int) -> str:
    """The name of the file with the record of a unit."""
    return f"unit-{unit:06d}.json"


def write_signed(file: Path, content: Mapping[str, Any]) -> None:
    """Writes plain data with its own checksum."""
    signed = {**content, "checksum": _own_checksum(content)}
    write_whole(file, json.dumps(signed, indent=1).encode())


def dtype_of(vocab_size: int) -> np.dtype:
    """The type of number that tokens are written in: unsigned, of two bytes where they suffice."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def refuse_strangers(folder: Path, known: set[str]) -> None:
    """Refuses shards that no record knows.

    Raises:
        MetaTTTError: naming the first of them.
    """
    for file in sorted(folder.glob("*.bin")):
        if file.name not in known:
            raise MetaTTTError(
                f"{file} is in no record of this folder: it is of another run; remove it, or choose another target"
            )


# -- what may be in them -----------------------------------------------------------------------------------------------


def _count(folder: Path) -> int:
    """Files in the folder: a manifest has no more shards than that."""
    with os.scandir(folder) as files:
        return sum(1 for _ in files)


def _own_checksum(content: Mapping[str, Any]) -> str:
    """Of the data, not of the text: white space and the order of keys do not count."""
    plain = {key: value for key, value in content.items() if key != "checksum"}
    return xxhash.xxh3_128_hexdigest(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode())


def _check_own(file: Path, content: dict[str, Any]) -> None:
    if content.pop("checksum", None) != _own_checksum(content):
        raise MetaTTTError(f"{file} is not as metattt prepare wrote it (checksum): it is damaged or was edited")


def _check_manifest(file: Path, content: dict[str, Any]) -> None:
    complete = content.get("complete")
    held = {"splits": _is_object, "shards": lambda value: isinstance(value, list)} if complete is True else {}
    _check_fields(file, "", content, {
        "format": _is_text, "version": _is_count, "complete": lambda value: type(value) is bool, "dtype": _is_text,
        "settings": _is_object, **held,
    })  # fmt: skip
    settings, tokenizer = content["settings"], content["settings"].get("tokenizer")
    _check_fields(file, "settings.", settings, {
        "source": _is_text, "text_key": _is_text, "seed": lambda value: type(value) is int, "shard_bytes": _is_count,
        "validation_fraction": lambda value: type(value) in (int, float) and 0 <= value < 1, "tokenizer": _is_object,
    })  # fmt: skip
    sha = {"sha256": _is_hex(64)} if tokenizer.get("kind") == TOKENIZER else {}
    _check_fields(file, "settings.tokenizer.", tokenizer, {
        "kind": lambda value: value in ("bytes", TOKENIZER), "vocab_size": lambda value: _is_count(value) and 0 < value <= 2**32,
        "separator": lambda value: _is_count(value) and value < tokenizer["vocab_size"],
        "end": lambda value: value is None or (_is_count(value) and value < tokenizer["vocab_size"]), **sha,
    })  # fmt: skip
    if content["dtype"] != dtype_of(tokenizer["vocab_size"]).name:
        _refuse(file, "dtype", content["dtype"])
    if complete:
        _check_shards(file, content["shards"])
        _check_fields(file, "splits.", content["splits"], dict.fromkeys(SPLITS, _is_object))
        for split, counts in content["splits"].items():
            for key in (*COUNTS, *counts):
                total = (
                    sum(shard[key] for shard in content["shards"] if shard["split"] == split) if key in COUNTS else -1
                )
                if counts.get(key) != total:
                    _refuse(file, f"splits.{split}.{key}", counts.get(key))


def _check_shards(file: Path, shards: list[Any]) -> None:
    """The records of shards: each complete, no name twice, in the order of their names."""
    fields: dict[str, Check] = {
        "file": _is_text, "split": lambda value: value in SPLITS, **dict.fromkeys(COUNTS, _is_count),
        CHECKSUM: _is_hex(32),
    }  # fmt: skip
    before = ""
    for place, shard in enumerate(shards):
        where = f"shards[{place}]"
        if not isinstance(shard, dict):
            _refuse(file, where, shard)
        _check_fields(file, f"{where}.", shard, fields)
        if not re.fullmatch(rf"{shard['split']}-[0-9]{{6,}}\.bin", shard["file"]) or shard["file"] <= before:
            _refuse(file, f"{where}.file", shard["file"])
        before = shard["file"]


def _check_fields(file: Path, where: str, content: Mapping[str, Any], checks: Mapping[str, Check]) -> None:
    """Refuses keys that are missing, not known, or have a value that cannot be."""
    for key in sorted(set(content) | set(checks)):
        if key not in content:
            raise MetaTTTError(f"{file} is damaged: it has no {where}{key}")
        if key not in checks:
            raise MetaTTTError(f"{file} is damaged: {where}{key[:40]} is not one of its keys")
    for key, check in checks.items():
        if not check(content[key]):
            _refuse(file, where + key, content[key])


def _refuse(file: Path, key: str, value: Any) -> None:
    raise MetaTTTError(f"{file} is damaged or was not written by metattt prepare: {key}={value!r:.80} cannot be")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_hex(digits: int) -> Check:
    return lambda value: isinstance(value, str) and re.fullmatch(rf"[0-9a-f]{{{digits}}}", value) is not None
