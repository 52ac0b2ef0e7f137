"""Which checkpoint a path means, and what is in it: ours, or a published one."""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from metattt.checkpoints import folder as ours
from metattt.checkpoints import rolling
from metattt.checkpoints.folder import standing
from metattt.checkpoints.record import RECORD
from metattt.checkpoints.tensors import open_tensors
from metattt.errors import MetaTTTError
from metattt.io import check_own, digest, path_of, read_object

Tensors = Literal["all", "weights", "none"]
SAFETENSORS = "model.safetensors"  # of a model alone, with its configuration beside it
PUBLISHED = (
    f"{SAFETENSORS}.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)  # other names that releases have
SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")


def find_checkpoint(path: str | Path, fall_back: bool = False) -> Path:
    """The checkpoint that a path names: itself, or what is in a folder: the newest of a run, or a model's weights.

    Args:
        path: a checkpoint, or a folder with some.
        fall_back: a run's checkpoints are read and compared with their checksums, the newest first, and the first that
            is not damaged is taken, said aloud if it is an older one. Else the newest is taken, and what is damaged in
            it is found when it is read: nobody evaluates another model than he thinks.

    Returns:
        A folder (`metattt.checkpoints.folder`); of other programs a file.

    Raises:
        MetaTTTError: no such path, or a folder with no such file or with several.
    """
    given = standing(path_of(str(path), "checkpoint"))
    given = given.resolve() if given.is_symlink() else given  # named by the user; links in a folder are the file's word
    if given.is_file() or ours.is_checkpoint(given):
        return given
    if not given.is_dir():
        raise MetaTTTError(
            f"no checkpoint: {path} does not exist; give a run's folder, a checkpoint in it, or a folder or file of weights"
        )
    run = given.parent if given.name == rolling.FOLDER else given
    if rolling.steps(run):
        return rolling.newest_good(run, ours.verify) if fall_back else rolling.steps(run)[0][1]
    for name in (SAFETENSORS, *PUBLISHED):
        if (one := given / name).is_file():
            return one
    files = sorted(file for file in given.iterdir() if file.suffix in SUFFIXES)
    if len(files) == 1:
        return files[0]
    if not files:
        raise MetaTTTError(
            f"no checkpoint: the folder {given} holds no {rolling.FOLDER}, and none of {', '.join(SUFFIXES)}"
        )
    several = ", ".join(file.name for file in files)
    raise MetaTTTError(
        f"no checkpoint: which one? The folder {given} holds several: {several}. Name the file: {given}/<file>"
    )


def home(checkpoint: Path) -> Path:
    """The folder of the run or of the model that a checkpoint belongs to."""
    if ours.is_checkpoint(checkpoint) and not ours.is_of_run(checkpoint):
        return checkpoint
    return rolling.run_of(checkpoint)


def read_content(file: Path, tensors: Tensors = "all", mmap: bool = False) -> dict[str, Any]:
    """What a checkpoint holds, plain data and tensors only. One with an index is put together; what has checksums is
    compared with them.

    Args:
        file: as `find_checkpoint` found it.
        tensors: `all`; `weights` or `none` leave out the others where these can be told apart.
        mmap: leave the tensors on the disk until they are used, where the file allows it.

    Raises:
        MetaTTTError: a file that is truncated, damaged, of another kind, or holds code; a part that is missing.
    """
    if ours.is_checkpoint(file):
        content = ours.read_content(file)
        record = {key: value for key, value in content.items() if key not in ("format", "files", "content")}
        return {RECORD: record} | ours.read_checkpoint(file, content, tensors != "none", tensors == "all")
    if file.name.endswith(".index.json"):
        return _read_index(file)
    if file.suffix == ".safetensors":
        return dict(_read_alone(file))
    content = _read_torch(file, mmap)
    if not isinstance(content, Mapping):
        held = type(content).__name__
        raise MetaTTTError(
            f"{file} is not a checkpoint of metattt train, nor tensors by name: it holds {held}; save model.state_dict()"
        )
    return dict(content)


def _read_torch(file: Path, mmap: bool) -> Any:
    """What torch.save wrote: plain data and tensors alone are unpickled; checksums of the archive are compared."""
    check_own(file)
    try:
        archive = zipfile.is_zipfile(file)
        if archive:
            with zipfile.ZipFile(file) as opened:
                if (bad := opened.testzip()) is not None:
                    raise MetaTTTError(f"{file} is damaged: {bad} in it is not what was written (checksum)")
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


def _read_index(file: Path) -> dict[str, Any]:
    """The tensors of several files of weights, from the index that names them."""
    names = read_object(file).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(part, str) for part in names.values()):
        raise MetaTTTError(f"{file} names parts that are not there: no weight_map")
    parts = sorted(set(names.values()))
    for part in parts:
        if Path(part).name != part or part.endswith(".index.json"):
            raise MetaTTTError(f"{file} names the part {part[:80]!r}: names of files beside it are allowed")
    missing = [part for part in parts if not (file.parent / part).is_file()]
    if missing or not parts:
        raise MetaTTTError(f"{file} names parts that are not there: {', '.join(missing) or 'no weight_map'}")
    return {name: tensor for part in parts for name, tensor in read_content(file.parent / part).items()}


def _read_alone(file: Path) -> dict[str, Tensor]:
    """The tensors of a file of safetensors, which may carry checksums of its own and of what stands beside it."""
    check_own(file)
    with open_tensors(file) as opened:
        for name, checksum in opened.beside.items():
            other = file.parent / Path(name).name
            if other.is_file() and digest(other.read_bytes()) != checksum:
                raise MetaTTTError(
                    f"{other} is not the one that was written with {file.name} (checksum): take it from the same place"
                )
        return {name: opened[name] for name in opened.names}


def check_new(target: str | Path) -> Path:
    """The folder that a command is going to make.

    Raises:
        MetaTTTError: it exists and is not empty, or has the name of a file.
    """
    path = Path(target).expanduser()
    if path.suffix in SUFFIXES:
        raise MetaTTTError(f"target={target} is the name of a file: give a folder, {SAFETENSORS} is written in it")
    if path.is_symlink() or (path.exists() and (not path.is_dir() or any(path.iterdir()))):
        raise MetaTTTError(f"target={target} exists and is not empty: give another folder, or remove it")
    return path
