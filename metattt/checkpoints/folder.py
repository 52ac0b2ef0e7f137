"""A checkpoint: a folder with tensors as safetensors, and `checkpoint.json` with everything else as plain data.

    checkpoint.json       format, version, configuration, state of the training; files with sizes and checksums
    model.safetensors     the weights
    training.safetensors  what optimizers and callbacks hold in tensors; not of a model alone
    tokenizer.json        where there is one

Several processes that divide the tensors write a file each, `model-00001-of-00004.safetensors`, as
`torch.distributed.checkpoint` lays them out; any number of processes read them. A checkpoint is written under another
name, and renamed when all of it is on the disk: a process that is killed leaves the old one or the new one.
"""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint import (
    CheckpointException,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.futures import Future

from metattt.checkpoints.record import RECORD
from metattt.checkpoints.tensors import TENSOR, UNREADABLE, alone, damaged, put_together, save, take_apart
from metattt.composition.messages import first_line
from metattt.errors import MetaTTTError
from metattt.io import check_own, checksum, inside, read_object, read_text, seal, sync, write_whole

CONTENT = "checkpoint.json"
TOKENIZER = "tokenizer.json"  # of the `tokenizers` library
FORMAT = "metattt checkpoint"
WEIGHTS, STATES = "state_dict", "optimizer_states"  # the entries with the many tensors
MODEL, TRAINING = "model", "training"  # how the names of the files with tensors begin
NEW, OLD = ".part", ".old"  # after a folder's name while it is written, and while another takes its place
PLACES = "DCP_SHARDING_INFO"  # the entry of a header that says where its tensors lie in the whole ones

Tensors = Literal["all", "weights", "small", "none"]
Files = dict[str, dict[str, Any]]


def is_checkpoint(path: Path) -> bool:
    """Whether a path is a folder with a checkpoint."""
    return (path / CONTENT).is_file()


def is_of_run(path: Path) -> bool:
    """Whether a checkpoint is of a run that can be resumed, and not of a model alone."""
    return "global_step" in (read_object(path / CONTENT).get("content") or ())


def standing(path: Path) -> Path:
    """The path, or the checkpoint that was about to be replaced by it when the process was killed."""
    old = path.parent / (path.name + OLD)  # (the current folder has no name)
    return old if old.exists() and not path.exists() else path


# -- reading -----------------------------------------------------------------------------------------------------------


def read_content(folder: Path) -> dict[str, Any]:
    """What `checkpoint.json` says, compared with its checksum; no tensors are read.

    Raises:
        MetaTTTError: a file that is missing, of another size or checkpoint, or damaged; tensors that it does not name.
    """
    path = folder / CONTENT
    content = read_object(path)
    if content.get("format") != FORMAT:
        raise MetaTTTError(f"{path} is not a checkpoint of metattt: its format is {str(content.get('format'))[:40]!r}")
    if content.pop("checksum", None) != seal(content):
        raise MetaTTTError(f"{path} is damaged or was edited: it is not what was written (checksum)")
    files = content.get("files")
    if not isinstance(files, dict) or not isinstance(content.get("content"), dict):
        raise MetaTTTError(f"{path} lists no files: another program wrote it")
    for name, about in files.items():
        check_own(file := inside(folder, name))
        expected = about.get("bytes") if isinstance(about, dict) else None
        if (size := file.stat().st_size) != expected:
            raise MetaTTTError(f"{file} has {size} bytes and not {expected}: it is truncated or of another checkpoint")
    if more := sorted(file.name for file in folder.glob("*.safetensors") if file.name not in files):
        raise MetaTTTError(f"{folder} holds {', '.join(more)}, which is not of this checkpoint: move it away")
    return content


def verify(folder: Path, kind: str = "") -> dict[str, Any]:
    """As `read_content`, and compares files, whose names begin with `kind`, with their checksums.

    Raises:
        MetaTTTError: naming the first file that is not what was written.
    """
    content = read_content(folder)
    for name, about in sorted(content["files"].items()):
        if name.startswith(kind) and checksum(folder / name) != about.get("xxh3"):
            raise MetaTTTError(
                f"{folder / name} is damaged or of another checkpoint: it is not what was written (checksum)"
            )
    return content


def read_checkpoint(folder: Path, tensors: Tensors = "all") -> dict[str, Any]:
    """The content of a checkpoint with tensors on the CPU, put together from the pieces of all processes; those that
    one file holds may lie on the disk until they are used.

    Args:
        folder: the checkpoint.
        tensors: `all` or `weights`, whose files are compared with their checksums; `small`: neither weights nor what
            optimizers hold for them; or `none`. Tensors that are not read are left out with their keys.

    Raises:
        MetaTTTError: as `verify`; a tensor that is not all there.
    """
    kinds = {"all": "", "weights": MODEL}
    content = verify(folder, kinds[tensors]) if tensors in kinds else read_content(folder)
    names = set(weights(content).values())
    metadata = _metadata(folder)
    found: dict[str, Tensor] = {}
    pieces: dict[str, Tensor] = {}
    for place, stored in metadata.storage_data.items():
        name, known = place.fqn, metadata.state_dict_metadata[place.fqn]
        small = name not in names and not (name.startswith(f"{STATES}/") and "/state/" in name)
        wanted = {"all": True, "weights": name in names, "small": small, "none": False}[tensors]
        if not wanted or isinstance(known, BytesStorageMetadata):  # (the files hold tensors alone)
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
    if tensors in ("small", "none"):
        read.pop(WEIGHTS, None)
    return {RECORD: {key: value for key, value in content.items() if key not in ("format", "files", "content")}} | read


def weights(content: Mapping[str, Any]) -> dict[str, str]:
    """The names of the weights, each with that of its tensor: that of another weight, where the two are one."""
    held = content["content"].get(WEIGHTS)
    held = held if isinstance(held, dict) else {}
    return {name: one[TENSOR] for name, one in held.items() if isinstance(one, dict) and TENSOR in one}


def load_parts(folder: Path, tensors: Mapping[str, Tensor], together: bool = False) -> None:
    """Fills tensors in place, whole or divided among processes, from the pieces that others wrote; every process reads
    what it needs. `verify` compares the files.

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
        raise MetaTTTError(f"{folder} does not fit this model, or is damaged: {first_line(_cause(error))}") from error


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights by name; no tensors are read."""
    known = _metadata(folder).state_dict_metadata
    tensors = {name: one.size for name, one in known.items() if isinstance(one, TensorStorageMetadata)}
    return {name: tuple(tensors[one]) for name, one in weights(read_content(folder)).items() if one in tensors}


def read_tokenizer(folder: Path) -> str | None:
    """The text of the tokenizer.json in a folder; None if there is none."""
    file = folder / TOKENIZER
    return read_text(inside(folder, TOKENIZER)) if file.exists() or file.is_symlink() else None


def _metadata(folder: Path) -> Metadata:
    """What the headers of all files say: the names, shapes and places of tensors and pieces."""
    try:
        return HuggingFaceStorageReader(str(folder)).read_metadata()
    except UNREADABLE as error:
        raise damaged(folder, error) from error


def _cause(error: CheckpointException) -> BaseException:
    """What a process raised first."""
    return next(iter(error.failures.values()))[0]


# -- writing -----------------------------------------------------------------------------------------------------------


class _Writer(HuggingFaceStorageWriter):
    """`torch.distributed.checkpoint` decides which process writes what of each tensor, and tells all if one fails.

    The files are its own, but weights and the rest are apart, and safetensors writes them as they are (torch puts a
    file together in memory first, as much again as all tensors).

    Args:
        new: the folder.
        weights: names of the tensors that go into files of their own.
        end: called in the first process with the files of all.
    """

    def __init__(self, new: Path, weights: Collection[str], end: Callable[[Files], None]):
        super().__init__(str(new), save_distributed=True)
        self.new, self.weights, self.end = new, weights, end

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
            tensors: dict[str, Tensor] = {}
            places: dict[str, Any] = {}
            seen = {0}  # of tensors without elements
            for item in plan.items:
                name = item.index.fqn
                if (name in self.weights) != (kind == MODEL):
                    continue
                tensor = alone(planner.resolve_data(item))  # type: ignore[arg-type]
                if tensor.data_ptr() in seen:  # tied and divided: every name has its own
                    tensor = tensor.clone()
                seen.add(tensor.data_ptr())
                tensors[name] = tensor
                places[name] = {"saved_offsets": list(item.tensor_data.chunk.offsets)}  # type: ignore[union-attr]
            if tensors:
                piece = f"-{number:05}-of-{count:05}" if count > 1 else ""
                file = self.new / f"{kind}{piece}.safetensors"
                save(file, tensors, {PLACES: json.dumps(places)})
                files[file.name] = _about(file)
        done: Future[list[Any]] = Future()
        done.set_result([files])
        return done

    def finish(self, metadata: Any, results: list[list[Any]]) -> None:
        self.end({name: about for result in results for files in result for name, about in files.items()})


def write_checkpoint(folder: Path, content: Mapping[str, Any], together: bool = False) -> None:
    """Writes a checkpoint in place of what has this name.

    Args:
        folder: the checkpoint.
        content: as `read_checkpoint` returns it: the record (plain data, with the text of its tokenizer.json as
            `tokenizer`), `state_dict`, and what else there is to keep of a run: plain data and tensors.
        together: all processes of the run call this, and each writes the tensors, or the pieces of them, that it holds.

    Raises:
        MetaTTTError: it cannot be written; what was there before is still there.
    """
    together = together and dist.is_initialized()
    record = dict(content[RECORD])
    tokenizer = record.pop("tokenizer", None)
    tensors: dict[str, Tensor] = {}
    held = take_apart(dict(content[WEIGHTS]), tensors)
    weights = set(tensors)
    others = {key: value for key, value in content.items() if key not in (RECORD, WEIGHTS)}
    rest = {WEIGHTS: held, **take_apart(others, tensors)}
    new = folder.with_name(folder.name + NEW)

    def end(files: Files) -> None:
        if tokenizer is not None:
            write_whole(new / TOKENIZER, tokenizer.encode())
            files[TOKENIZER] = _about(new / TOKENIZER)
        said = {"format": FORMAT, **record, "files": files, "content": rest}
        signed = {"checksum": seal(said), **said}
        write_whole(new / CONTENT, (json.dumps(signed, indent=1) + "\n").encode())
        take_place(new, folder)

    try:
        with warnings.catch_warnings(action="ignore"):  # that there is one process
            dcp.save(tensors, storage_writer=_Writer(new, weights, end), no_dist=not together)
    except CheckpointException as error:
        if not together or dist.get_rank() == 0:
            shutil.rmtree(new, ignore_errors=True)
        raise _unwritten(folder, _cause(error)) from error


def write_model(folder: Path, record: Mapping[str, Any], tensors: Mapping[str, Tensor], tokenizer: str | None) -> None:
    """As `write_checkpoint`, of a model alone, without the state of its training."""
    write_checkpoint(folder, {RECORD: {**record, "tokenizer": tokenizer}, WEIGHTS: tensors})


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
        raise _unwritten(folder, error) from error
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


def _unwritten(folder: Path, error: BaseException) -> MetaTTTError:
    full = "No space left" in str(error)
    advice = "; the disk is full: free some, or choose a folder on another disk" if full else ""
    return MetaTTTError(f"{folder} cannot be written: {getattr(error, 'strerror', None) or first_line(error)}{advice}")
