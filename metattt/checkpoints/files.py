"""Files that hold weights: found, read and written; tensors and plain data, never code."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from metattt.checkpoints import rolling
from metattt.checkpoints.sharded import NEW, is_sharded, read_plain, read_sharded, remove, standing
from metattt.errors import MetaTTTError

Tensors = Literal["all", "weights", "none"]
LAST = "last.ckpt"  # of a run: a file; a folder, where the processes of the run wrote their parts
SAFETENSORS = "model.safetensors"  # of a model alone, with its configuration beside it
PUBLISHED = (
    f"{SAFETENSORS}.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)  # other names that releases have
TOKENIZER = "tokenizer.json"  # of the `tokenizers` library, beside the weights
SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint that a path names: a file, or what is in a folder: a run's `last.ckpt`, or a model's weights.

    Returns:
        A file, or the folder of a sharded checkpoint.

    Raises:
        MetaTTTError: no such path, or a folder with no such file or with several.
    """
    given = standing(Path(path).expanduser())
    if given.is_file() or is_sharded(given):
        return given
    if not given.is_dir():
        raise MetaTTTError(
            f"no checkpoint: {path} does not exist; give a run's folder, its {LAST}, or a folder or file of weights"
        )
    run = given.parent if given.name == rolling.FOLDER else given
    if rolling.steps(run):
        return rolling.newest_good(run, lambda path: read_content(path, "none", mmap=True))
    for name in (LAST, SAFETENSORS, *PUBLISHED):
        if (found := standing(given / name)).is_file() or is_sharded(found):
            return found
    files = sorted(file for file in given.iterdir() if file.suffix in SUFFIXES)
    if len(files) == 1:
        return files[0]
    if not files:
        raise MetaTTTError(f"no checkpoint: the folder {given} holds no {LAST}, and none of {', '.join(SUFFIXES)}")
    several = ", ".join(file.name for file in files)
    raise MetaTTTError(
        f"no checkpoint: which one? The folder {given} holds several: {several}. Name the file: {given}/<file>"
    )


def read_content(file: Path, tensors: Tensors = "all", mmap: bool = False) -> dict[str, Any]:
    """What a checkpoint holds, plain data and tensors only. A sharded one, or one with an index, is put together.

    Args:
        file: as `find_checkpoint` found it.
        tensors: `all`; `weights` or `none` leave out the others where these can be told apart.
        mmap: leave the tensors on the disk until they are used, where the file allows it.

    Raises:
        MetaTTTError: a file that is truncated, damaged, of another kind, or holds code; a part that is missing.
    """
    if is_sharded(file):
        return read_plain(file) if tensors == "none" else read_sharded(file, weights_only=tensors != "all")
    if file.name.endswith(".index.json"):
        parts = sorted(set(read_json(file).get("weight_map", {}).values()))
        missing = [part for part in parts if not (file.parent / part).is_file()]
        if missing or not parts:
            raise MetaTTTError(f"{file} names parts that are not there: {', '.join(missing) or 'no weight_map'}")
        return {name: tensor for part in parts for name, tensor in read_content(file.parent / part).items()}
    if file.suffix == ".safetensors":
        try:
            return load_file(file)
        except (SafetensorError, OSError) as error:
            raise MetaTTTError(
                f"{file} cannot be read as safetensors: it is truncated, damaged or of another kind ({error})"
            ) from error
    try:
        with warnings.catch_warnings(action="ignore"):  # of old pickle formats: what cannot be read is said below
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap and zipfile.is_zipfile(file))
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
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
            f"{file} is not a checkpoint of metattt train, nor tensors by name: it holds {held}; save model.state_dict()"
        )
    return dict(content)


def write_file(file: Path, checkpoint: Mapping[str, Any]) -> None:
    """Writes a run's checkpoint in place of what has this name, a file or a folder: a kill leaves the old one or the
    new one.

    Raises:
        MetaTTTError: it cannot be written.
    """
    new = file.with_name(file.name + NEW)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(dict(checkpoint), new)
        if file.is_dir():  # of a run that went on from a sharded one
            remove(file)
        new.replace(file)
    except (OSError, RuntimeError) as error:  # torch's own writer raises the latter when the disk is full
        raise MetaTTTError(f"{file} cannot be written: {error}") from error


def read_json(file: Path) -> dict[str, Any]:
    """A JSON file with an object.

    Raises:
        MetaTTTError: no such file, or it is not JSON.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise MetaTTTError(f"{file} does not exist: the configuration has to stand beside the weights") from error
    except (ValueError, OSError) as error:
        raise MetaTTTError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise MetaTTTError(f"{file} holds no configuration, but {type(content).__name__}")
    return content


def check_new(target: str | Path) -> Path:
    """The folder that a command is going to make.

    Raises:
        MetaTTTError: it exists and is not empty, or has the name of a file.
    """
    path = Path(target).expanduser()
    if path.suffix in SUFFIXES:
        raise MetaTTTError(f"target={target} is the name of a file: give a folder, {SAFETENSORS} is written in it")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise MetaTTTError(f"target={target} exists and is not empty: give another folder, or remove it")
    return path


def read_tokenizer(folder: Path) -> str | None:
    """The text of the tokenizer.json in a folder; None if there is none.

    Raises:
        MetaTTTError: it cannot be read.
    """
    file = folder / TOKENIZER
    try:
        return file.read_text(encoding="utf-8") if file.is_file() else None
    except (OSError, UnicodeDecodeError) as error:
        raise MetaTTTError(f"{file} cannot be read: {error}") from error


def write_folder(target: Path, tensors: Mapping[str, Tensor], texts: Mapping[str, str | None]) -> None:
    """Writes weights and files of text by their names (None: no such file), all or nothing: interrupted, it leaves no
    folder `target`."""
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        save_file(dict(tensors), partial / SAFETENSORS, metadata={"format": "pt"})
        for name, text in texts.items():
            if text is not None:
                (partial / name).write_text(text, encoding="utf-8")
        if target.exists():
            target.rmdir()
        partial.rename(target)
    except (OSError, SafetensorError) as error:
        raise MetaTTTError(f"{target} cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
