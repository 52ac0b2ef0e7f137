"""Checkpoints as versions 1 and 2 wrote them, read only: `last.ckpt`, a file of torch.save, or a folder in which every
process wrote its part (torch.distributed.checkpoint).

Nothing in them is run: tensors and plain data alone are unpickled, and the index of a folder with its own classes. The
checksums that zip archives carry are compared.
"""

from __future__ import annotations

import io
import pathlib
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata

from metattt.checkpoints.folder import STATES, WEIGHTS
from metattt.disk import check_own
from metattt.errors import MetaTTTError

PLAIN, INDEX = "meta.pt", ".metadata"  # of a folder: everything that is no tensor, and where the tensors are
LONGEST_INDEX = 2**28  # bytes


def is_parts(path: Path) -> bool:
    """Whether a path is a folder with the parts of several processes."""
    return (path / PLAIN).is_file() and (path / INDEX).is_file()


def read_file(file: Path, mmap: bool = False) -> Any:
    """What torch.save wrote: plain data and tensors.

    Args:
        file: the checkpoint, or any weights-only file of torch.
        mmap: leave the tensors on the disk until they are used, where the file allows it.

    Raises:
        MetaTTTError: a file that is truncated, damaged, of another kind, or holds code.
    """
    check_own(file)
    try:
        archive = zipfile.is_zipfile(file)
        if archive:
            _check_archive(file, file)
        with warnings.catch_warnings(action="ignore"):  # of old pickle formats: what cannot be read is said below
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap and archive)
    except MetaTTTError:
        raise
    except Exception as error:  # as many kinds as there are ways to damage it
        if isinstance(error, pickle.UnpicklingError) and "GLOBAL" in str(error):
            raise MetaTTTError(
                f"{file} holds pickled objects, which could run any code when loaded; only tensors are read.\n"
                "Save the state dict alone where the file comes from: torch.save(model.state_dict(), ...)"
            ) from error
        raise MetaTTTError(
            f"{file} cannot be read as a checkpoint: it is truncated, damaged or of another kind"
        ) from error


def read_parts(folder: Path, weights_only: bool = False) -> dict[str, Any]:
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
        _check_parts(folder, index)
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
    """What a folder holds beside tensors; of the optimizers' states, what is no tensor.

    Raises:
        MetaTTTError: a file that cannot be read.
    """
    content = read_file(folder / PLAIN)
    if not isinstance(content, dict):
        raise _damaged(folder)
    return content


def _check_archive(archive: Any, origin: Path) -> None:
    """Compares the members of a zip archive with their checksums."""
    with zipfile.ZipFile(archive) as opened:
        if (bad := opened.testzip()) is not None:
            raise MetaTTTError(f"{origin} is damaged: {bad} in it is not what was written (checksum)")


def _check_parts(folder: Path, index: metadata.Metadata) -> None:
    """Every tensor of a part is an archive of its own, with checksums; and no part is more than its file."""
    total = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    for entry in index.state_dict_metadata.values():
        if not isinstance(entry, metadata.TensorStorageMetadata):  # a pickle inside
            raise MetaTTTError(f"{folder} holds pickled objects, which could run any code when loaded; it is not read")
        if entry.size.numel() > total:
            raise _damaged(folder)
    for place in index.storage_data.values():
        file = folder / place.relative_path
        if file.parent != folder:
            raise MetaTTTError(f"{folder} names a part outside of it: {place.relative_path}")
        check_own(file)
        with file.open("rb") as stream:
            stream.seek(place.offset)
            piece = io.BytesIO(stream.read(place.length))
        _check_archive(piece, file)


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
        path = Path(self.path) / INDEX
        check_own(path)
        if path.stat().st_size > LONGEST_INDEX:
            raise _damaged(Path(self.path))
        with path.open("rb") as stream:
            index: metadata.Metadata = _Index(stream).load()
        index.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        return index


def _empty(entry: Any) -> Tensor:
    return torch.empty(entry.size, dtype=entry.properties.dtype)


def _damaged(folder: Path) -> MetaTTTError:
    return MetaTTTError(
        f"{folder} cannot be read as a sharded checkpoint: parts of it are missing, damaged or of another model"
    )
