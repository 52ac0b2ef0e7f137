"""A checkpoint: a folder with tensors as safetensors, and `checkpoint.json` with everything else as plain data.

    checkpoint.json       format, version, configuration, state of the training; the files with their sizes and
    checksums model.safetensors     the weights
    training.safetensors  what optimizers and callbacks hold in tensors; not of a model alone
    tokenizer.json        where there is one

Several processes that divide the tensors write a file each, `model-00001-of-00004.safetensors`, as
`torch.distributed.checkpoint` lays them out; any number of processes read them (`metattt.checkpoints.writing` writes).
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from metattt.checkpoints.plain import TENSOR, put_together
from metattt.checkpoints.tensors import UNREADABLE, damaged
from metattt.errors import MetaTTTError
from metattt.io import check_own, checksum, digest, inside, read_object, read_text

CONTENT = "checkpoint.json"
TOKENIZER = "tokenizer.json"  # of the `tokenizers` library
FORMAT = "metattt checkpoint"
WEIGHTS, STATES = "state_dict", "optimizer_states"  # the entries with the many tensors
MODEL, TRAINING = "model", "training"  # how the names of the files with tensors begin
OLD = ".old"  # after a folder's name while another takes its place


def is_checkpoint(path: Path) -> bool:
    """Whether a path is a folder with a checkpoint."""
    return (path / CONTENT).is_file()


def is_of_run(path: Path) -> bool:
    """Whether a checkpoint is of a run that can go on, and not of a model alone."""
    return "global_step" in (read_object(path / CONTENT).get("content") or ())


def standing(path: Path) -> Path:
    """The path, or the checkpoint that was about to be replaced by it when the process was killed."""
    old = path.with_name(path.name + OLD)
    return old if old.exists() and not path.exists() else path


def canonical(content: Mapping[str, Any]) -> bytes:
    """What the checksum of a `checkpoint.json` is of."""
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def read_content(folder: Path) -> dict[str, Any]:
    """What `checkpoint.json` says, compared with its checksum; and whether the files that it names, and no other
    tensors, are there with their sizes. No tensors are read.

    Raises:
        MetaTTTError: a file that is missing, of another checkpoint, or damaged.
    """
    path = folder / CONTENT
    content = read_object(path)
    if content.get("format") != FORMAT:
        raise MetaTTTError(f"{path} is not a checkpoint of metattt: its format is {str(content.get('format'))[:40]!r}")
    if content.pop("checksum", None) != digest(canonical(content)):
        raise MetaTTTError(f"{path} is damaged or was edited: it is not what was written (checksum)")
    files = content.get("files")
    if not isinstance(files, dict) or not isinstance(content.get("content"), dict):
        raise MetaTTTError(f"{path} names no files: it is of another program")
    for name, about in files.items():
        check_own(file := inside(folder, name))
        expected = about.get("bytes") if isinstance(about, dict) else None
        if (size := file.stat().st_size) != expected:
            raise MetaTTTError(f"{file} has {size} bytes and not {expected}: it is truncated or of another checkpoint")
    if more := sorted(file.name for file in folder.glob("*.safetensors") if file.name not in files):
        raise MetaTTTError(f"{folder} holds {', '.join(more)}, which is not of this checkpoint: move it away")
    return content


def verify(folder: Path, kind: str = "", share: tuple[int, int] = (0, 1)) -> dict[str, Any]:
    """Reads files of a checkpoint and compares them with their checksums.

    Args:
        folder: the checkpoint.
        kind: how the names of the files begin.
        share: (i, n): every n-th file from the i-th on.

    Returns:
        As `read_content`.

    Raises:
        MetaTTTError: naming the first file that is not what was written.
    """
    content = read_content(folder)
    files = sorted((name, about) for name, about in content["files"].items() if name.startswith(kind))
    for name, about in files[share[0] :: share[1]]:
        if checksum(folder / name) != about.get("xxh3"):
            raise MetaTTTError(
                f"{folder / name} is damaged or of another checkpoint: it is not what was written (checksum)"
            )
    return content


def read_checkpoint(
    folder: Path, content: Mapping[str, Any], wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, Any]:
    """The content of a checkpoint with tensors on the CPU, put together from the pieces of all processes; those that
    one file holds may lie on the disk until they are used.

    Args:
        folder: the checkpoint; `verify` compares its files.
        content: as `read_content` returned it.
        wanted: whether a tensor is read; the others are left out with their keys.

    Raises:
        MetaTTTError: a tensor that is not all there.
    """
    about = _metadata(folder)
    found: dict[str, Tensor] = {}
    pieces: dict[str, Tensor] = {}
    for place, stored in about.storage_data.items():
        name, known = place.fqn, about.state_dict_metadata[place.fqn]
        if not wanted(name) or isinstance(known, BytesStorageMetadata):  # (the files hold tensors alone)
            continue
        if len(known.chunks) == 1 and tuple(known.size) == tuple(stored.shape):
            with safe_open(stored.relative_path, framework="pt") as opened:
                found[name] = opened.get_tensor(name)
        elif name not in pieces:
            held, whole = sum(math.prod(chunk.sizes) for chunk in known.chunks), math.prod(known.size)
            if held != whole:  # before it is allocated
                raise MetaTTTError(f"{folder} does not hold all of {name}: it has {held} of {whole} numbers")
            pieces[name] = torch.empty(known.size, dtype=known.properties.dtype)
    load_parts(folder, pieces)
    read: dict[str, Any] = put_together(content["content"], found | pieces)
    return read


def weights(content: Mapping[str, Any]) -> dict[str, str]:
    """The names of the weights, each with that of its tensor: that of another weight, where the two are one."""
    held = content["content"].get(WEIGHTS)
    return (
        {name: one[TENSOR] for name, one in held.items() if isinstance(one, dict) and TENSOR in one}
        if isinstance(held, dict)
        else {}
    )


def load_parts(folder: Path, tensors: Mapping[str, Tensor], together: bool = False) -> None:
    """Fills tensors, whole or divided among processes, from the pieces that others wrote; in place, and every process
    reads what it needs. `verify` compares the files.

    Args:
        folder: the checkpoint.
        tensors: by their names in the checkpoint.
        together: all processes call this.

    Raises:
        MetaTTTError: a tensor that the checkpoint does not have, or of another shape.
    """
    if not tensors and not together:
        return
    try:
        with warnings.catch_warnings(action="ignore"), torch.no_grad():  # that there is one process
            dcp.load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=not together)
    except CheckpointException as error:
        reason = (str(cause(error)).splitlines() or [""])[0]
        raise MetaTTTError(f"{folder} does not fit this model, or is damaged: {reason}") from error


def cause(error: CheckpointException) -> BaseException:
    """What a process raised first."""
    return next(iter(error.failures.values()))[0]


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights by name; no tensors are read."""
    known = _metadata(folder).state_dict_metadata
    tensors = {name: one.size for name, one in known.items() if isinstance(one, TensorStorageMetadata)}
    return {name: tuple(tensors[one]) for name, one in weights(read_content(folder)).items() if one in tensors}


def read_tokenizer(folder: Path) -> str | None:
    """The text of the tokenizer.json in a folder; None if there is none.

    Raises:
        MetaTTTError: it cannot be read.
    """
    file = folder / TOKENIZER
    return read_text(inside(folder, TOKENIZER)) if file.exists() or file.is_symlink() else None


def _metadata(folder: Path) -> Metadata:
    """What the headers of all files say: the names, shapes and places of tensors and pieces."""
    try:
        return HuggingFaceStorageReader(str(folder)).read_metadata()
    except UNREADABLE as error:
        raise damaged(folder, error) from error
