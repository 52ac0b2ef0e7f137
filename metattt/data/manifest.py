"""The record of a folder of shards: what is in every file, and from which text and settings it was made."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from metattt.errors import MetaTTTError

MANIFEST = "manifest.json"
FORMAT = "metattt shards"
VERSION = 1


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder; None if there is none.

    Raises:
        MetaTTTError: a file of that name that is not a manifest of ours.
    """
    file = folder / MANIFEST
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise MetaTTTError(f"{file} is damaged: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise MetaTTTError(f"{file} was not written by metattt prepare")
    if content.get("version") != VERSION:
        raise MetaTTTError(f"{file} has version {content.get('version')}; this release reads version {VERSION}")
    return content


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Writes a file that is there as a whole or not at all, whatever happens meanwhile."""
    part = partial(file)
    with part.open("w", encoding="utf-8") as stream:
        json.dump(content, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(file)


def partial(file: Path) -> Path:
    """The name of a file while it is written, different in every process."""
    return file.with_name(f"{file.name}.{os.getpid()}.part")


def check_shard(folder: Path, shard: dict[str, Any], item_size: int, checksum: bool) -> None:
    """Compares a file with its record.

    Args:
        folder: the folder of shards.
        shard: the record: file, tokens, sha256.
        item_size: bytes per token.
        checksum: compare what is in it too, not its size alone.

    Raises:
        MetaTTTError: a file that is missing, half-written or not the one of the record.
    """
    file = folder / shard["file"]
    if not file.is_file():
        raise MetaTTTError(f"{file} is missing: run metattt prepare again with another target")
    size, expected = file.stat().st_size, shard["tokens"] * item_size
    if size != expected:
        raise MetaTTTError(
            f"{file} has {size} bytes and not the {expected} of its record: it is half-written or of another run; remove it"
        )
    if checksum:
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != shard["sha256"]:
            raise MetaTTTError(
                f"{file} is not the shard of its record (checksum): it is half-written or of another run; remove it"
            )


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
