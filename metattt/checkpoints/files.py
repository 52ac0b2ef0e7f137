"""Checkpoint files: tensors from safetensors or weights-only torch files, and a folder of weights and configuration."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from metattt.checkpoints.sharded import is_sharded, read_sharded, standing
from metattt.errors import MetaTTTError

WEIGHTS = "model.safetensors"
TOKENIZER = "tokenizer.json"  # of the `tokenizers` library, beside the weights
KNOWN = (WEIGHTS, f"{WEIGHTS}.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json", "last.ckpt")
SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")


def find_weights(source: str | Path) -> Path:
    """The file with the weights that a path names: a file, or a folder that holds one.

    Raises:
        MetaTTTError: no such path, or a folder with no such file or with several.
    """
    path = standing(Path(source).expanduser())
    if path.is_file() or is_sharded(path):
        return path
    if not path.is_dir():
        raise MetaTTTError(f"source={source} does not exist: give a checkpoint's folder or file")
    for name in KNOWN:
        if (found := standing(path / name)).is_file() or is_sharded(found):
            return found
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
    if len(files) == 1:
        return files[0]
    several = f"several: {', '.join(file.name for file in files)}" if files else f"none of {', '.join(SUFFIXES)}"
    raise MetaTTTError(f"which weights? The folder {path} holds {several}. Name the file: source={path}/<file>")


def read_weights(file: Path) -> dict[str, Any]:
    """What a file of weights holds: tensors by name. An index file, or the folder of a sharded checkpoint, stands for its parts.

    Raises:
        MetaTTTError: a file that is truncated, damaged, of another kind, or holds code; a part that is missing.
    """
    if file.name.endswith(".index.json"):
        parts = sorted(set(read_json(file).get("weight_map", {}).values()))
        missing = [part for part in parts if not (file.parent / part).is_file()]
        if missing or not parts:
            raise MetaTTTError(f"{file} names parts that are not there: {', '.join(missing) or 'no weight_map'}")
        return {name: tensor for part in parts for name, tensor in read_weights(file.parent / part).items()}
    if is_sharded(file):
        return read_sharded(file, weights_only=True)
    if file.suffix == ".safetensors":
        try:
            return load_file(file)
        except (SafetensorError, OSError) as error:
            raise MetaTTTError(f"{file} cannot be read as safetensors: it is truncated, damaged or of another kind ({error})") from error
    try:
        with warnings.catch_warnings(action="ignore"):  # of old pickle formats: what cannot be read is said below
            content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if "GLOBAL" in str(error):
            raise MetaTTTError(
                f"{file} holds pickled objects, which could run any code when loaded; only tensors are read.\n"
                "Save the state dict alone where the file comes from: torch.save(model.state_dict(), ...)"
            ) from error
        raise MetaTTTError(f"{file} is not a torch file, or it is damaged: give safetensors or a saved state dict") from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise MetaTTTError(f"{file} cannot be read as a torch file: it is truncated, damaged or of another kind") from error
    if not isinstance(content, Mapping):
        raise MetaTTTError(f"{file} holds {type(content).__name__}, not tensors by name: save model.state_dict()")
    return dict(content)


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
        raise MetaTTTError(f"target={target} is the name of a file: give a folder, {WEIGHTS} is written in it")
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
    """Writes weights and files of text by their names (None: no such file), all or nothing: interrupted, it leaves no folder `target`."""
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        save_file(dict(tensors), partial / WEIGHTS, metadata={"format": "pt"})
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
