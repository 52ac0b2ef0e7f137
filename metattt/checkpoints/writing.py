"""Writes checkpoints (`metattt.checkpoints.folder`): under another name first, renamed when all of it is on the disk.
Killed at any moment, a process leaves the old one or the new one."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageWriter, SavePlan, SavePlanner
from torch.futures import Future

from metattt.checkpoints.folder import (
    CONTENT,
    FORMAT,
    MODEL,
    OLD,
    TOKENIZER,
    TRAINING,
    WEIGHTS,
    canonical,
    cause,
    standing,
)
from metattt.checkpoints.plain import take_apart
from metattt.checkpoints.tensors import alone, save
from metattt.errors import MetaTTTError
from metattt.io import checksum, digest, sync, write_whole

NEW = ".part"  # after a folder's name while it is written
PLACES = "DCP_SHARDING_INFO"  # the entry of a header that says where its tensors lie in the whole ones

Files = dict[str, dict[str, Any]]


class _Writer(HuggingFaceStorageWriter):
    """`torch.distributed.checkpoint` decides which process writes what of each tensor, and tells all if one fails.

    The files are its own, but for two things: weights and the rest apart, and written by safetensors as they are (torch
    puts a file together in memory first, as much again as all tensors).

    Args:
        new: the folder.
        weights: names of the tensors that go into files of their own.
        finish: called in the first process with the files of all.
    """

    def __init__(self, new: Path, weights: Collection[str], finish: Callable[[Files], None]):
        super().__init__(str(new), save_distributed=True)
        self.new, self.weights, self.end, self.count = new, weights, finish, 1

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        clear(self.new)
        self.new.mkdir(parents=True)
        numbered = super().prepare_global_plan(plans)
        for plan in numbered:
            plan.storage_data["count"] = len(plans)
        return numbered

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[Any]]:
        number, count = plan.storage_data["shard_index"], plan.storage_data["count"]
        files: Files = {}
        for kind in (MODEL, TRAINING):
            items = [item for item in plan.items if (item.index.fqn in self.weights) == (kind == MODEL)]
            if not items:
                continue
            tensors: dict[str, Tensor] = {}
            seen = {0}  # of tensors without elements
            for item in items:
                tensor = alone(planner.resolve_data(item))  # type: ignore[arg-type]
                if tensor.data_ptr() in seen:  # tied and divided: every name has its own
                    tensor = tensor.clone()
                seen.add(tensor.data_ptr())
                tensors[item.index.fqn] = tensor
            places = {item.index.fqn: {"saved_offsets": list(item.tensor_data.chunk.offsets)} for item in items}  # type: ignore[union-attr]
            file = self.new / (f"{kind}-{number:05}-of-{count:05}.safetensors" if count > 1 else f"{kind}.safetensors")
            save(file, tensors, {PLACES: json.dumps(places)})
            files[file.name] = _about(file)
        done: Future[list[Any]] = Future()
        done.set_result([files])
        return done

    def finish(self, metadata: Any, results: list[list[Any]]) -> None:
        self.end({name: about for result in results for files in result for name, about in files.items()})


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
    together = together and dist.is_initialized()
    tensors: dict[str, Tensor] = {}
    held = take_apart(dict(content[WEIGHTS]), tensors)
    weights = set(tensors)
    rest = {WEIGHTS: held, **take_apart({key: value for key, value in content.items() if key != WEIGHTS}, tensors)}
    new = folder.with_name(folder.name + NEW)

    def finish(files: Files) -> None:
        if tokenizer is not None:
            write_whole(new / TOKENIZER, tokenizer.encode())
            files[TOKENIZER] = _about(new / TOKENIZER)
        said = {"format": FORMAT, **record, "files": files, "content": rest}
        write_whole(
            new / CONTENT, (json.dumps({"checksum": digest(canonical(said)), **said}, indent=1) + "\n").encode()
        )
        take_place(new, folder)

    try:
        with warnings.catch_warnings(action="ignore"):  # that there is one process
            dcp.save(tensors, storage_writer=_Writer(new, weights, finish), no_dist=not together)
    except CheckpointException as error:
        if not together or dist.get_rank() == 0:
            shutil.rmtree(new, ignore_errors=True)
        raise MetaTTTError(f"{folder} cannot be written: {_reason(cause(error))}") from error


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
        clear(new)
        new.mkdir(parents=True)
        yield new
        take_place(new, folder)
    except (OSError, SafetensorError) as error:
        raise MetaTTTError(f"{folder} cannot be written: {_reason(error)}") from error
    finally:
        shutil.rmtree(new, ignore_errors=True)


def clear(folder: Path) -> None:
    """Removes what a killed process left of a checkpoint; nothing else has this name."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def take_place(new: Path, folder: Path) -> None:
    """The new folder becomes the checkpoint of this name."""
    sync(new)
    old = folder.with_name(folder.name + OLD)
    if standing(folder) == folder:  # else the last one was killed between the two names
        clear(old)
        if folder.exists() or folder.is_symlink():
            folder.rename(old)
    new.rename(folder)
    sync(folder.parent)
    clear(old)


def _about(file: Path) -> dict[str, Any]:
    return {"bytes": file.stat().st_size, "xxh3": checksum(file)}


def _reason(error: BaseException) -> str:
    full = "No space left" in str(error)
    advice = "; the disk is full: free some, or choose a folder on another disk" if full else ""
    said = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    return f"{said.splitlines()[0]}{advice}"
