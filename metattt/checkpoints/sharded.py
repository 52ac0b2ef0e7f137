"""Sharded checkpoints: a folder in which every process wrote its part of the tensors (torch.distributed.checkpoint).

The folder holds the parts (`*.distcp`), their index (`.metadata`) and everything that is no tensor (`meta.pt`). It is
read by any number of processes, or put together into what one process would have saved. Nothing in it is run: the index
is unpickled with the index's own classes alone, the rest as weights only.
"""

from __future__ import annotations

import pathlib
import pickle
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata

from metattt.errors import MetaTTTError

PLAIN = "meta.pt"  # the name that Lightning gives it
INDEX = ".metadata"
WEIGHTS, STATES = "state_dict", "optimizer_states"  # the entries with tensors
OLD, NEW = ".old", ".part"  # after the folder's name, while another one takes its place


def is_sharded(path: Path) -> bool:
    """Whether a path is a folder with a sharded checkpoint."""
    return (path / PLAIN).is_file() and (path / INDEX).is_file()


def read_sharded(folder: Path, weights_only: bool = False) -> dict[str, Any]:
    """What one process would have saved: `state_dict`, `optimizer_states` and plain data, with whole tensors on the
    CPU.

    Args:
        folder: the checkpoint.
        weights_only: leave out what the optimizers hold.

    Raises:
        MetaTTTError: parts that are missing or damaged.
    """
    try:
        content = read_plain(folder)
        reader = _Reader(folder)
        index = reader.read_metadata()
        paths = {name: path for name, path in index.planner_data.items() if path[0] == WEIGHTS or not weights_only}
        tensors = {name: _empty(index.state_dict_metadata[name]) for name in paths}
        with warnings.catch_warnings(action="ignore"):  # that one process reads alone
            dcp.load(tensors, storage_reader=reader, no_dist=True)
        content[WEIGHTS] = {path[1]: tensors[name] for name, path in paths.items() if path[0] == WEIGHTS}
        for name, path in paths.items():
            if path[0] == STATES:  # optimizer, parameter, key
                content[STATES][int(path[1])]["state"].setdefault(int(path[2]), {})[path[3]] = tensors[name]
    except MetaTTTError:
        raise
    except (Exception, dcp.CheckpointException) as error:  # as many kinds as there are ways to damage it
        raise _damaged(folder) from error
    return content


def read_plain(folder: Path) -> dict[str, Any]:
    """What the checkpoint holds beside tensors; of the optimizers' states, what is no tensor.

    Raises:
        MetaTTTError: a file that cannot be read.
    """
    try:
        content: dict[str, Any] = torch.load(folder / PLAIN, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise _damaged(folder) from error
    return content


def load_sharded(folder: Path, tensors: Mapping[str, Any]) -> None:
    """Fills nested dictionaries of tensors from the checkpoint, in place; all processes together, each with its own
    parts.

    Raises:
        MetaTTTError: parts that are missing or damaged, or tensors that the checkpoint does not have.
    """
    try:
        dcp.load(dict(tensors), storage_reader=_Reader(folder))
    except (Exception, dcp.CheckpointException) as error:
        raise _damaged(folder) from error


def write_sharded(folder: Path, checkpoint: Mapping[str, Any]) -> None:
    """Writes a checkpoint in place of what has this name: all processes together, each its own parts.

    A run that is killed meanwhile leaves the old one or the new one (`standing` finds it).

    Args:
        folder: the checkpoint.
        checkpoint: its `state_dict` and `optimizer_states` hold tensors that are whole or divided among the processes.
    """
    plain = {key: value for key, value in checkpoint.items() if key != WEIGHTS}
    states, plain[STATES] = plain.get(STATES, []), []
    tensors: dict[str, Any] = {WEIGHTS: checkpoint[WEIGHTS], STATES: {}}
    for number, optimizer in enumerate(states):
        tensors[STATES][str(number)], others = split_state(optimizer["state"])
        plain[STATES].append({"state": others, "param_groups": optimizer["param_groups"]})
    new, old = (folder.with_name(folder.name + suffix) for suffix in (NEW, OLD))
    first = not dist.is_initialized() or dist.get_rank() == 0
    if first:
        remove(new)
        new.mkdir(parents=True)
    _barrier()
    dcp.save(tensors, checkpoint_id=new)
    if first:
        torch.save(plain, new / PLAIN)
        remove(old)
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
        remove(old)
    _barrier()


def split_state(
    state: Mapping[int, Mapping[str, Any]],
) -> tuple[dict[str, dict[str, Tensor]], dict[int, dict[str, Any]]]:
    """The state of an optimizer, by parameter and key: its tensors, with the numbers as texts as the files have them,
    and the rest."""
    tensors = {
        str(number): {key: value for key, value in one.items() if isinstance(value, Tensor)}
        for number, one in state.items()
    }
    others = {
        number: {key: value for key, value in one.items() if not isinstance(value, Tensor)}
        for number, one in state.items()
    }
    return tensors, others


def standing(path: Path) -> Path:
    """The path, or the checkpoint that was about to be replaced by it when the run was killed."""
    old = path.with_name(path.name + OLD)
    return old if old.exists() and not path.exists() else path


def remove(path: Path) -> None:
    """Removes a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class _Index(pickle.Unpickler):
    """Reads the index; refuses every class but those that it is made of."""

    def find_class(self, module: str, name: str) -> Any:
        known: dict[str, Any] = {
            "torch.distributed.checkpoint.metadata": metadata, "torch.distributed.checkpoint.filesystem": filesystem,
            "torch": torch, "torch.serialization": torch.serialization, "pathlib": pathlib,
        }  # fmt: skip
        names = {
            "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING", "ChunkStorageMetadata",
            "MetadataIndex", "StorageMeta", "_StorageInfo", "Size", "_get_layout", "PosixPath", "WindowsPath",
        }  # fmt: skip
        found = getattr(known.get(module), name, None)
        if found is None or not (name in names or isinstance(found, torch.dtype)):
            raise pickle.UnpicklingError(f"{module}.{name} is not a part of an index")
        return found


class _Reader(dcp.FileSystemReader):
    """Torch's own reader, with an index that cannot run code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        with (Path(self.path) / INDEX).open("rb") as stream:
            index: metadata.Metadata = _Index(stream).load()
        index.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        return index


def _empty(entry: Any) -> Tensor:
    return torch.empty(entry.size, dtype=entry.properties.dtype)


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _damaged(folder: Path) -> MetaTTTError:
    return MetaTTTError(
        f"{folder} cannot be read as a sharded checkpoint: parts of it are missing, damaged or of another model"
    )
