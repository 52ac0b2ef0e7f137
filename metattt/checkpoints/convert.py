"""`metattt convert`: published checkpoints to ours and back. Tensors keep their types and values, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

from metattt.checkpoints.files import TOKENIZER, check_new, find_weights, read_json, read_tokenizer, read_weights, write_folder
from metattt.composition.compose import instantiate_model
from metattt.errors import MetaTTTError, check_choice
from metattt.models.language_model import LanguageModel
from metattt.models.published import Side, fill, from_ours, guess_side, to_ours
from metattt.models.published_config import PublishedConfig, build_empty

OURS, THEIRS = "config.yaml", "config.json"  # the configuration beside the weights
RUN = "metattt"  # where a checkpoint of `metattt train` holds its configuration
DIRECTIONS = ("auto", "from_published", "from_jax", "to_published", "to_jax")


def convert(cfg: DictConfig) -> None:
    """Reads one checkpoint and writes the other, then says what it wrote.

    Args:
        cfg: the configuration of the job `convert`.

    Raises:
        MetaTTTError: a file that cannot be read, names or shapes that do not fit, or a target that exists.
    """
    for key in ("source", "target"):
        if OmegaConf.is_missing(cfg, key) or not isinstance(cfg[key], str):
            raise MetaTTTError(f"no {key} is given: metattt convert source=<folder or file> target=<new folder>")
    check_choice("direction", cfg.direction, DIRECTIONS)
    target = check_new(cfg.target)
    file = find_weights(cfg.source)
    content = read_weights(file)
    side = _side(file, content)
    direction = f"from_{side}" if cfg.direction == "auto" else cfg.direction
    if side == "ours":
        if not direction.startswith("to_"):
            raise MetaTTTError(f"{file} is a checkpoint of ours: give direction=to_published or direction=to_jax")
        tensors, config = _export(file, content, "published" if direction == "to_published" else "jax")
        tokenizer = content[RUN].get("tokenizer") if RUN in content else read_tokenizer(file.parent)
        write_folder(target, tensors, {THEIRS: json.dumps(config, indent=2) + "\n", TOKENIZER: tokenizer})
    else:
        if direction != f"from_{side}":
            raise MetaTTTError(f"{file} has the names of direction=from_{side}, not of direction={direction}")
        published = PublishedConfig.read(read_json(file.parent / THEIRS))
        ours = published.compose()
        tensors = to_ours(content, build_empty(ours), side)
        write_folder(target, tensors, {OURS: OmegaConf.to_yaml(ours), TOKENIZER: read_tokenizer(file.parent)})
    count = sum(tensor.numel() for tensor in tensors.values())
    print(f"{target}  {len(tensors)} tensors, {count:,} parameters")


def load_pretrained(source: str | Path) -> LanguageModel:
    """A model from what `metattt convert` wrote, from a run of `metattt train`, or straight from a published checkpoint.

    Args:
        source: the folder, or the file with the weights in it. Parameters keep the types they were saved in.

    Raises:
        MetaTTTError: a file that cannot be read, or names or shapes that do not fit.
    """
    file = find_weights(source)
    content = read_weights(file)
    side = _side(file, content)
    if side != "ours":
        model = PublishedConfig.read(read_json(file.parent / THEIRS)).build()
        return fill(model, to_ours(content, model, side))
    cfg, tensors = _own(file, content)
    with torch.random.fork_rng(devices=[]):  # not on the meta device: a layer may compute buffers, which no checkpoint holds
        model = instantiate_model(cfg)
    return fill(model, to_ours(tensors, model, "ours"))


def pretrained_config(file: Path) -> DictConfig:
    """The configuration, as ours, of weights in a folder of `metattt convert` or of a published checkpoint.

    Raises:
        MetaTTTError: a configuration that is not there or cannot be read.
    """
    if (file.parent / OURS).is_file():
        return _own_config(file)
    return PublishedConfig.read(read_json(file.parent / THEIRS)).compose()


def _side(file: Path, content: dict[str, Any]) -> Side:
    if RUN in content:
        return "ours"
    if set(content) == {"state_dict"}:
        content.update(content.pop("state_dict"))
    side = guess_side(_paths(content))
    if side is None:
        names = ", ".join(list(content)[:3]) or "nothing"
        raise MetaTTTError(f"{file} has neither published names (model.embed_tokens.weight, wte/embedding) nor ours: it holds {names}")
    return side


def _paths(tree: dict[str, Any], prefix: str = "") -> list[str]:
    nested = (_paths(value, f"{prefix}{key}/") if isinstance(value, dict) else [f"{prefix}{key}"] for key, value in tree.items())
    return [path for paths in nested for path in paths]


def _export(file: Path, content: dict[str, Any], side: Side) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A checkpoint of ours as tensors and configuration of `side`."""
    cfg, tensors = _own(file, content)
    model = build_empty(cfg)
    config = PublishedConfig.of(model)
    keys = config.published() if side == "published" else config.jax()
    return from_ours(to_ours(tensors, model, "ours"), side), keys


def _own(file: Path, content: dict[str, Any]) -> tuple[DictConfig, dict[str, Any]]:
    """Configuration and tensors of a checkpoint of ours: a converted folder, or a run's checkpoint."""
    if RUN in content:
        weights = {name.removeprefix("model."): value for name, value in content["state_dict"].items() if name.startswith("model.")}
        return OmegaConf.create(content[RUN]["config"]), weights
    return _own_config(file), content


def _own_config(file: Path) -> DictConfig:
    """The configuration beside weights that were converted."""
    path = file.parent / OURS
    if not path.is_file():
        raise MetaTTTError(f"{path} does not exist: the configuration has to stand beside the weights")
    try:
        cfg = OmegaConf.load(path)
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, OSError) as error:
        raise MetaTTTError(f"{path} cannot be read as a configuration: {error}") from error
    assert isinstance(cfg, DictConfig)
    return cfg
