"""The folder that `metattt prepare` writes: new, begun or complete; nothing in it that is not ours."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from metattt.data.manifest import (
    COUNTS,
    FORMAT,
    MANIFEST,
    SPLITS,
    TOKENIZER,
    VERSION,
    dtype_of,
    read_manifest,
    refuse_strangers,
    write_signed,
)
from metattt.data.shard_file import ShardFile
from metattt.data.tokenizers import FileTokenizer, fingerprint, read_tokenizer
from metattt.data.windows import Tokenizer
from metattt.errors import MetaTTTError
from metattt.io import write_whole
from metattt.locking import LOCK


def check_free(folder: Path) -> None:
    """Refuses a folder that holds other things, before anything is written into it.

    Raises:
        MetaTTTError: it does.
    """
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        raise MetaTTTError(f"target={folder} exists and is no folder: choose a new one")
    if read_manifest(folder) is None and any(file.name != LOCK and not _is_part(file) for file in folder.iterdir()):
        raise MetaTTTError(f"target={folder} exists and holds something else: choose a new folder")


def _is_part(file: Path) -> bool:
    """Whether a file is one of ours that was being written when its process was killed."""
    return (
        re.fullmatch(r"(manifest\.json|tokenizer\.json|unit-\d+\.json|\w+-\d+\.bin)\.\d+\.part", file.name) is not None
    )


def begin(folder: Path, settings: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """The manifest of the folder: as it is, if the settings are the same, or a new one.

    Args:
        folder: which this process has locked.
        settings: of the shards, as they stand in a manifest; the tokenizer's fingerprint comes to them.
        tokenizer: which is written beside the manifest.

    Raises:
        MetaTTTError: a folder that holds other things, or shards of other settings, or damaged ones.
    """
    settings = {**settings, "tokenizer": fingerprint(tokenizer)}
    check_free(folder)  # once more: nobody else writes here now
    for file in folder.iterdir():
        if _is_part(file):
            file.unlink()
    manifest = read_manifest(folder)
    if manifest is None:
        dtype = dtype_of(tokenizer.vocab_size).name
        manifest = {"format": FORMAT, "version": VERSION, "complete": False, "dtype": dtype, "settings": settings}
        write_signed(folder / MANIFEST, manifest)
    for key, value in settings.items():
        before = manifest["settings"].get(key)
        if before != value:
            raise MetaTTTError(
                f"target={folder} was begun with {key}={before}, not {value}: say the same again, or choose a new folder"
            )
    if manifest["complete"]:
        _check_complete(folder, manifest)
    elif isinstance(tokenizer, FileTokenizer) and not os.path.lexists(folder / TOKENIZER):
        write_whole(folder / TOKENIZER, tokenizer.content.encode())
    read_tokenizer(folder, settings["tokenizer"])  # it is what the workers read
    return manifest


def _check_complete(folder: Path, manifest: dict[str, Any]) -> None:
    """Compares all files with the manifest; records of units are in it and go.

    Raises:
        MetaTTTError: a file that is missing, damaged, or of another run.
    """
    _remove_records(folder)
    refuse_strangers(folder, {shard["file"] for shard in manifest["shards"]})
    vocab_size = manifest["settings"]["tokenizer"]["vocab_size"]
    for shard in manifest["shards"]:
        ShardFile.of(folder, shard, np.dtype(manifest["dtype"]), vocab_size, whole=True).check()


def _remove_records(folder: Path) -> None:
    for file in folder.iterdir():
        if re.fullmatch(r"unit-\d{6,}\.json", file.name):
            file.unlink()


def finish(folder: Path, manifest: dict[str, Any], units: list[dict[str, Any]]) -> dict[str, Any]:
    """The complete manifest, written; the records of units are in it and go."""
    shards = [shard for unit in units for shard in unit["shards"]]
    splits = {
        split: {key: sum(shard[key] for shard in shards if shard["split"] == split) for key in COUNTS}
        for split in SPLITS
    }
    manifest = {
        **manifest,
        "complete": True,
        "splits": splits,
        "shards": sorted(shards, key=lambda shard: shard["file"]),
    }
    write_signed(folder / MANIFEST, manifest)
    _remove_records(folder)
    return manifest
