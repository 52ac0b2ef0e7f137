"""The record of a folder that `metattt prepare` wrote: what its files hold, and from which text and settings.

tokens.bin      the tokens of all documents, those to train on first: `uint16`, or `uint32` if there are more kinds
documents.bin   where each document starts in it: `int64`
tokenizer.json  the tokenizer, unless tokens are bytes
manifest.json   this record, with a checksum of each file and one of itself
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from metattt.errors import MetaTTTError
from metattt.io import read_object, seal, write_whole

MANIFEST = "manifest.json"
TOKENS, DOCUMENTS, TOKENIZER = "tokens.bin", "documents.bin", "tokenizer.json"
FORMAT, VERSION = "metattt tokens", 1


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder; None if there is none. The files that it is of are not looked at.

    Raises:
        MetaTTTError: a file of that name that is not a manifest of this format, or not as it was written.
    """
    file = folder / MANIFEST
    if not file.is_file():
        return None
    content = read_object(file, 2**20)
    if content.get("format") != FORMAT or content.get("version") != VERSION:
        raise MetaTTTError(f"{file} is not of this release of metattt prepare: prepare the text again, in a new folder")
    if content.pop("checksum", None) != seal(content):
        raise MetaTTTError(f"{file} is not as metattt prepare wrote it (checksum): it is damaged or was edited")
    return content


def write_signed(file: Path, content: Mapping[str, Any]) -> None:
    """Writes plain data with its own checksum."""
    write_whole(file, json.dumps({**content, "checksum": seal(content)}, indent=1).encode())
