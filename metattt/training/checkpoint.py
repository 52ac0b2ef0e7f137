"""Checkpoints: Lightning's, with the configuration inside, so that a file alone is enough to go on."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from metattt.compose import instantiate_model
from metattt.errors import MetaTTTError
from metattt.models.language_model import LanguageModel

FILE_NAME = "last.ckpt"
KEY = "metattt"  # under it: {"version": VERSION, "config": the resolved configuration}
VERSION = 1
WEIGHTS = "model."  # prefix of the model's parameters in Lightning's state_dict


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint file that a path names: a file, or a run's folder.

    Raises:
        MetaTTTError: if there is none.
    """
    given = Path(path).expanduser()
    file = given / FILE_NAME if given.is_dir() else given
    if not file.is_file():
        where = f"the folder {given} holds no {FILE_NAME}" if given.is_dir() else f"{given} does not exist"
        raise MetaTTTError(f"no checkpoint: {where}; give a run's folder or its {FILE_NAME}")
    return file


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Reads a checkpoint of ours on the CPU, plain data and tensors only.

    Raises:
        MetaTTTError: no such file, a file that is truncated or not a checkpoint, or one of another program.
    """
    file = find_checkpoint(path)
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise MetaTTTError(f"{file} cannot be read as a checkpoint: it is truncated, damaged or of another kind") from error
    if not isinstance(content, dict) or not isinstance(content.get(KEY), dict) or "state_dict" not in content:
        raise MetaTTTError(f"{file} is not a checkpoint of metattt train: it holds no configuration")
    if content[KEY].get("version") != VERSION:
        raise MetaTTTError(f"{file} has checkpoint version {content[KEY].get('version')}; this release reads version {VERSION}")
    return content


def checkpoint_config(content: dict[str, Any]) -> DictConfig:
    """The configuration of the run that wrote the checkpoint."""
    config = OmegaConf.create(content[KEY]["config"])
    assert isinstance(config, DictConfig)
    return config


def load_model(path: str | Path, device: torch.device | str = "cpu") -> tuple[LanguageModel, DictConfig]:
    """The model of a checkpoint, in evaluation mode, and its configuration.

    Raises:
        MetaTTTError: as `read_checkpoint`, or parameters that are not those of the configured model.
    """
    content = read_checkpoint(path)
    config = checkpoint_config(content)
    model = instantiate_model(config)
    _fill(model, content, f"{path} does not fit the model of its own configuration")
    return model.to(device).eval(), config


def load_weights(model: LanguageModel, path: str | Path) -> None:
    """Gives a model the weights of a checkpoint of a model alike, trained on windows of any length.

    Raises:
        MetaTTTError: as `read_checkpoint`, or parameters that are not those of `model`.
    """
    _fill(model, read_checkpoint(path), f"init_from={path} does not fit this model")


def _fill(model: LanguageModel, content: dict[str, Any], complaint: str) -> None:
    weights = {name.removeprefix(WEIGHTS): value for name, value in content["state_dict"].items() if name.startswith(WEIGHTS)}
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise MetaTTTError(f"{complaint}: {str(error).splitlines()[-1].strip()}") from error
