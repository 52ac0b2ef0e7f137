"""Which checkpoint a path means, and what is in it: ours, or a published one."""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from metattt.checkpoints import folder as ours
from metattt.checkpoints import rolling
from metattt.checkpoints.folder import Tensors, standing
from metattt.checkpoints.record import PUBLISHED_CONFIG
from metattt.checkpoints.tensors import read_described
from metattt.errors import MetaTTTError
from metattt.io import check_own, digest, inside, parse, path_of, read_object

SAFETENSORS = "model.safetensors"  # of a model alone, with its configuration beside it
#: names that releases have
PUBLISHED = (f"{SAFETENSORS}.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
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
        advice = "give a run's folder, a checkpoint in it, or a folder or file of weights"
        raise MetaTTTError(f"no checkpoint: {path} does not exist; {advice}")
    run = given.parent if given.name == rolling.FOLDER else given
    if found := rolling.steps(run):
        return rolling.newest_good(run) if fall_back else found[0][1]
    files = [one for name in (SAFETENSORS, *PUBLISHED) if (one := given / name).is_file()][:1]
    files = files or sorted(file for file in given.iterdir() if file.suffix in SUFFIXES)
    if not files:
        raise MetaTTTError(
            f"no checkpoint: the folder {given} holds no {rolling.FOLDER}, and none of {', '.join(SUFFIXES)}"
        )
    if len(files) > 1:
        several = ", ".join(file.name for file in files)
        raise MetaTTTError(f"the folder {given} holds several checkpoints: {several}. Name the file: {given}/<file>")
    return files[0]


def home(checkpoint: Path) -> Path:
    """The folder of the run or of the model that a checkpoint belongs to."""
    if ours.is_checkpoint(checkpoint) and not ours.is_of_run(checkpoint):
        return checkpoint
    return rolling.run_of(checkpoint)


def read_content(file: Path, tensors: Tensors = "all") -> dict[str, Any]:
    """What a checkpoint holds, plain data and tensors only. One with an index is put together; what has checksums is
    compared with them.

    Args:
        file: as `find_checkpoint` found it.
        tensors: which of a checkpoint of ours are read (`metattt.checkpoints.folder.read_checkpoint`).

    Raises:
        MetaTTTError: a file that is truncated, damaged, of another kind, or holds code; a part that is missing.
    """
    if file.is_dir():
        return ours.read_checkpoint(file, tensors)
    if file.name.endswith(".index.json"):
        return _read_index(file)
    check_own(file)
    return _read_safetensors(file) if file.suffix == ".safetensors" else _read_torch(file)


def _read_safetensors(file: Path) -> dict[str, Any]:
    """Tensors; what `metattt convert` has written beside them is compared with its checksums."""
    tensors, about = read_described(file)
    known: Any = None
    with suppress(MetaTTTError):  # another program's words
        known = parse(about, str(file))
    for name in (PUBLISHED_CONFIG, ours.TOKENIZER):
        other = file.with_name(name)
        if isinstance(known, dict) and name in known and other.is_file() and digest(other.read_bytes()) != known[name]:
            raise MetaTTTError(
                f"{other} is not the one that was written with {file.name} (checksum): take both from the same place"
            )
    return dict(tensors)


def _read_torch(file: Path) -> dict[str, Any]:
    """What torch.save wrote: plain data and tensors alone are unpickled."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of old pickle formats: what cannot be read is said below
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:  # as many kinds as there are ways to damage it
        if isinstance(error, pickle.UnpicklingError) and "GLOBAL" in str(error):
            raise MetaTTTError(
                f"{file} holds pickled objects, which could run any code when loaded; only tensors are read.\n"
                "Save the state dict alone where the file comes from: torch.save(model.state_dict(), ...)"
            ) from error
        raise MetaTTTError(
            f"{file} cannot be read as a checkpoint: it is truncated, damaged or of another kind"
        ) from error
    if not isinstance(content, Mapping):
        held = type(content).__name__
        raise MetaTTTError(
            f"{file} is not a checkpoint of metattt train, nor tensors by name: it holds {held}; save "
            "model.state_dict()"
        )
    return dict(content)


def _read_index(file: Path) -> dict[str, Any]:
    """The tensors of several files of weights, from the index that names them."""
    names = read_object(file).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(part, str) for part in names.values()):
        raise MetaTTTError(f"{file} has no weight_map, which names its parts")
    parts = [inside(file.parent, part) for part in sorted(set(names.values()))]
    if missing := [part.name for part in parts if not part.is_file() or part.name.endswith(".index.json")]:
        raise MetaTTTError(f"{file} names files that do not exist: {', '.join(missing)}")
    return {name: tensor for part in parts for name, tensor in read_content(part).items()}


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
    if not path.name:
        raise MetaTTTError(
            f"target={target} is the folder that you are in: give a new one, {SAFETENSORS} is written in it"
        )
    return path
