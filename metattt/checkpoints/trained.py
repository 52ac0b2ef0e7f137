"""Checkpoints: Lightning's, with configuration and tokenizer inside, so that a checkpoint alone is enough to go on."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig, OmegaConf
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule

from metattt.checkpoints.convert import load_pretrained, pretrained_config
from metattt.checkpoints.files import find_weights, read_tokenizer
from metattt.checkpoints.sharded import is_sharded, read_plain, read_sharded, standing
from metattt.composition.compose import instantiate_model
from metattt.errors import MetaTTTError
from metattt.models.language_model import LanguageModel

FILE_NAME = "last.ckpt"  # a file; a folder, where the processes of a run wrote their parts
KEY = "metattt"  # under it: {"version": VERSION, "config": the resolved configuration, "tokenizer": text of a tokenizer.json or None}
VERSION = 1
CONFIGURATIONS = ("config.yaml", "config.json")  # beside the weights of metattt convert, and of published models
WEIGHTS = "model."  # prefix of the model's parameters in Lightning's state_dict


class Trained(NamedTuple):
    """What is known of a model without its weights.

    Attributes:
        path: the checkpoint: a file, or the folder of a sharded one.
        config: of the run; of the model alone, where it does not come from a run of ours.
        tokenizer: `bytes`, or the text of its tokenizer.json; None: not known.
    """

    path: Path
    config: DictConfig
    tokenizer: str | None


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint that a path names: a run's folder, its `last.ckpt`, or a model with its configuration beside it.

    Returns:
        A file, or the folder of a sharded checkpoint.

    Raises:
        MetaTTTError: if there is none.
    """
    given = Path(path).expanduser()
    if _is_pretrained(given):
        return find_weights(given)
    found = standing(given / FILE_NAME if given.is_dir() and not is_sharded(given) else given)
    if not found.is_file() and not is_sharded(found):
        where = f"the folder {given} holds no {FILE_NAME}" if given.is_dir() else f"{given} does not exist"
        raise MetaTTTError(f"no checkpoint: {where}; give a run's folder, its {FILE_NAME}, or a folder of metattt convert")
    return found


def read_checkpoint(path: str | Path, tensors: str = "all") -> dict[str, Any]:
    """Reads a checkpoint of `metattt train` on the CPU, plain data and tensors only. A sharded one is put together.

    Args:
        path: as for `find_checkpoint`.
        tensors: `all`; `state_dict`, or `none`, read no others where these can be told apart.

    Raises:
        MetaTTTError: no such file, a file that is truncated or not a checkpoint, or one of another program.
    """
    found = find_checkpoint(path)
    try:
        if is_sharded(found):
            content = read_plain(found) if tensors == "none" else read_sharded(found, weights_only=tensors != "all")
        else:
            content = torch.load(found, map_location="cpu", weights_only=True, mmap=tensors != "all")
    except MetaTTTError:
        raise
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise MetaTTTError(f"{found} cannot be read as a checkpoint: it is truncated, damaged or of another kind") from error
    if not isinstance(content, dict) or not isinstance(content.get(KEY), dict) or ("state_dict" not in content and not found.is_dir()):
        raise MetaTTTError(f"{found} is not a checkpoint of metattt train: it holds no configuration")
    if content[KEY].get("version") != VERSION:
        raise MetaTTTError(f"{found} has checkpoint version {content[KEY].get('version')}; this release reads version {VERSION}")
    return content


def describe(path: str | Path) -> Trained:
    """Configuration and tokenizer of a checkpoint, or of a model in a folder of `metattt convert`; no weights are read.

    Raises:
        MetaTTTError: as `read_checkpoint`, or a configuration that cannot be read.
    """
    found = find_checkpoint(path)
    if _is_pretrained(found):
        return Trained(found, pretrained_config(found), read_tokenizer(found.parent))
    content = read_checkpoint(found, tensors="none")
    return Trained(found, checkpoint_config(content), content[KEY].get("tokenizer") or "bytes")


def _is_pretrained(path: Path) -> bool:
    """Whether a folder, or a file's folder, has a model with its configuration in a file of its own."""
    folder = path if path.is_dir() else path.parent
    ours = path.suffix == ".ckpt" or (folder / FILE_NAME).exists() or is_sharded(path)
    return path.exists() and not ours and any((folder / name).is_file() for name in CONFIGURATIONS)


def checkpoint_config(content: dict[str, Any]) -> DictConfig:
    """The configuration of the run that wrote the checkpoint."""
    config = OmegaConf.create(content[KEY]["config"])
    assert isinstance(config, DictConfig)
    return config


def load_model(path: str | Path, device: torch.device | str = "cpu") -> tuple[LanguageModel, DictConfig]:
    """The model of a checkpoint, or of a folder of `metattt convert`, in evaluation mode, and its configuration.

    Raises:
        MetaTTTError: as `read_checkpoint`, or parameters that are not those of the configured model.
    """
    found = find_checkpoint(path)
    if _is_pretrained(found):
        return load_pretrained(found).to(device).eval(), pretrained_config(found)
    content = read_checkpoint(found, "state_dict")
    config = checkpoint_config(content)
    model = instantiate_model(config)
    _fill(model, content, f"{path} does not fit the model of its own configuration")
    return model.to(device).eval(), config


def load_weights(model: LanguageModel, path: str | Path) -> None:
    """Gives a model the weights of a checkpoint of a model alike, trained on windows of any length.

    Raises:
        MetaTTTError: as `read_checkpoint`, or parameters that are not those of `model`.
    """
    found = find_checkpoint(path)
    complaint = f"init_from={path} does not fit this model"
    if _is_pretrained(found):
        weights = load_pretrained(found).state_dict()
        _fill(model, {"state_dict": {WEIGHTS + name: value for name, value in weights.items()}}, complaint)
    else:
        _fill(model, read_checkpoint(found, "state_dict"), complaint)


def _fill(model: LanguageModel, content: dict[str, Any], complaint: str) -> None:
    """Gives a model, whole or divided among processes, the weights of a checkpoint."""
    weights = {name.removeprefix(WEIGHTS): value for name, value in content["state_dict"].items() if name.startswith(WEIGHTS)}
    try:
        if isinstance(model, FSDPModule):
            set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
        else:
            model.load_state_dict(weights)
    except (RuntimeError, ValueError) as error:
        raise MetaTTTError(f"{complaint}: {str(error).splitlines()[-1].strip()}") from error
