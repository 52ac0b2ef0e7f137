"""Writes checkpoints (`metattt.checkpoints.folder`): under another name first, renamed when all of it is on the disk.
Killed at any moment, a process leaves the old one or the new one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.tensor import DTensor

from metattt.checkpoints.folder import (
    CONTENT,
    FORMAT,
    MODEL,
    OLD,
    TOKENIZER,
    TRAINING,
    WEIGHTS,
    canonical,
    offset_of,
    standing,
)
from metattt.checkpoints.plain import take_apart
from metattt.checkpoints.tensors import Piece, write_tensors
from metattt.errors import MetaTTTError
from metattt.io import digest, sync, write_text

NEW = ".part"  # after a folder's name while it is written


def write_checkpoint(
    folder: Path,
    record: Mapping[str, Any],
    content: Mapping[str, Any],
    tokenizer: str | None = None,
    together: bool = False,
) -> None:
    """Writes a checkpoint in place of what has this name. Killed at any moment, it leaves the old one or the new one.

    Args:
        folder: the checkpoint.
        record: version, configuration and what else is known of the model; plain data.
        content: `state_dict`, and what else there is to keep of a run: plain data and tensors.
        tokenizer: the text of its tokenizer.json.
        together: all processes of the run call this, and each writes the tensors, or the pieces of them, that it holds.

    Raises:
        MetaTTTError: it cannot be written; what was there before is still there.
    """
    many = together and dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if many else (0, 1)
    tensors: dict[str, dict[str, Tensor]] = {MODEL: dict(content[WEIGHTS]), TRAINING: {}}
    rest = take_apart({key: value for key, value in content.items() if key != WEIGHTS}, tensors[TRAINING])
    new = folder.with_name(folder.name + NEW)
    files: dict[str, dict[str, Any]] = {}
    problem: str | None = None
    try:
        if rank == 0:
            _recover(folder)
            _clear(new)
            new.mkdir(parents=True)
    except OSError as error:
        problem = _reason(error)
    problem = _agreed(problem, many)
    if problem is None:
        try:
            for name, held in tensors.items():
                whole, pieces = _mine(held, rank, many)
                file = new / (f"{name}-{rank + 1:05}-of-{world:05}.safetensors" if world > 1 else f"{name}.safetensors")
                if whole:
                    files[file.name] = {"header": write_tensors(file, whole, pieces), "bytes": file.stat().st_size}
            if rank == 0 and tokenizer is not None:
                text = write_text(new / TOKENIZER, tokenizer)
                files[TOKENIZER] = {"xxh3": text, "bytes": (new / TOKENIZER).stat().st_size}
        except (OSError, SafetensorError) as error:
            problem = _reason(error)
        problem = _agreed(problem, many)
    files = _gathered(files, many)
    if problem is None and rank == 0:
        try:
            write_text(new / CONTENT, _signed({"format": FORMAT, **record, "files": files, "content": rest}))
            sync(new)
            _take_place(new, folder)
        except OSError as error:
            problem = _reason(error)
    problem = _agreed(problem, many)
    if problem is not None:
        if rank == 0 and new.exists():
            shutil.rmtree(new, ignore_errors=True)
        raise MetaTTTError(f"{folder} cannot be written: {problem}")


def write_model(folder: Path, record: Mapping[str, Any], tensors: Mapping[str, Tensor], tokenizer: str | None) -> None:
    """Writes a model alone, without the state of its training.

    Raises:
        MetaTTTError: as `write_checkpoint`.
    """
    write_checkpoint(folder, record, {WEIGHTS: tensors}, tokenizer)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder that gets its name when all that the block wrote into it is on the disk.

    Raises:
        MetaTTTError: it cannot be written.
    """
    new = folder.with_name(folder.name + NEW)
    try:
        _clear(new)
        new.mkdir(parents=True)
        yield new
        sync(new)
        _take_place(new, folder)
    except (OSError, SafetensorError) as error:
        raise MetaTTTError(f"{folder} cannot be written: {_reason(error)}") from error
    finally:
        if new.exists():
            shutil.rmtree(new, ignore_errors=True)


def _mine(held: Mapping[str, Tensor], rank: int, many: bool) -> tuple[dict[str, Tensor], dict[str, Piece]]:
    """What this process writes of tensors that all hold, whole or in pieces: of what several hold, the first of them
    writes it."""
    local: dict[str, Tensor] = {}
    pieces: dict[str, Piece] = {}
    for name, tensor in held.items():
        local[name] = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if isinstance(tensor, DTensor) and local[name].shape != tensor.shape:
            pieces[name] = Piece(offset_of(tensor), tuple(tensor.shape))
    if many:
        places = [(name, pieces[name].offset if name in pieces else None, local[name].numel()) for name in local]
        all_places: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(all_places, places)
        before = {
            (name, offset) for other in all_places[:rank] for name, offset, count in other if count or offset is None
        }
        written = {name for name, offset, count in places if (name, offset) not in before and (count or offset is None)}
        local = {name: local[name] for name in written}
        pieces = {name: piece for name, piece in pieces.items() if name in written}
    return {name: local[name] for name in sorted(local)}, pieces


def _signed(content: dict[str, Any]) -> str:
    """The text of a `checkpoint.json`: one that was changed is noticed."""
    return json.dumps({"checksum": digest(canonical(content)), **content}, indent=1) + "\n"


def _recover(folder: Path) -> None:
    """A checkpoint that was about to be replaced gets its name back."""
    old = standing(folder)
    if old != folder:
        old.rename(folder)


def _clear(folder: Path) -> None:
    """Removes what a killed process left of a checkpoint; nothing else has this name."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def _take_place(new: Path, folder: Path) -> None:
    """The new folder becomes the checkpoint of this name."""
    old = folder.with_name(folder.name + OLD)
    if folder.exists() or folder.is_symlink():
        _clear(old)
        folder.rename(old)
        new.rename(folder)
        sync(folder.parent)
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old)
        else:
            old.unlink()
    else:
        new.rename(folder)
    sync(folder.parent)


def _agreed(problem: str | None, many: bool) -> str | None:
    """The first problem that any process has: all go on, or none."""
    if not many:
        return problem
    problems: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    return next((one for one in problems if one is not None), None)


def _gathered(files: dict[str, dict[str, Any]], many: bool) -> dict[str, dict[str, Any]]:
    """The files of all processes."""
    if not many:
        return files
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, files)
    return {name: about for one in found for name, about in one.items()}


def _reason(error: BaseException) -> str:
    advice = (
        "; the disk is full: free some, or choose a folder on another disk" if "No space left" in str(error) else ""
    )
    return f"{getattr(error, 'strerror', None) or error}{advice}"
