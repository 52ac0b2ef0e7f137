"""What stands beside the weights: version, configuration, tokenizer. In a run's checkpoint under `RECORD`, in a folder
as `CONFIG`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from metattt.checkpoints.naming import to_names, to_targets
from metattt.checkpoints.version1 import from_version1
from metattt.errors import MetaTTTError

RECORD = "metattt"  # the entry of a run's checkpoint
CONFIG = "config.yaml"  # the record of a model in a folder of its own
PUBLISHED_CONFIG = "config.json"  # the configuration of a published model
VERSION = 2  # 1 named components by dotted paths


def make_record(cfg: DictConfig, **others: Any) -> dict[str, Any]:
    """The record of a configuration.

    Args:
        cfg: as it was composed.
        others: what else is to be kept, plain data.
    """
    return {"version": VERSION, "config": to_names(OmegaConf.to_container(cfg)), **others}


def checked_record(record: Any, origin: Path) -> dict[str, Any]:
    """A record of any version as this version writes it.

    Raises:
        MetaTTTError: it is none, or of a version that this release does not know.
    """
    if not isinstance(record, Mapping) or not isinstance(record.get("config"), Mapping):
        raise MetaTTTError(f"{origin} is not a checkpoint of metattt train: it holds no configuration")
    version = record.get("version")
    if version not in range(1, VERSION + 1):
        newer = type(version) is int and version > VERSION
        remedy = "update metattt" if newer else "it is damaged, or of another program"
        raise MetaTTTError(
            f"{origin} has checkpoint version {version}; this release reads versions 1 to {VERSION}: {remedy}"
        )
    return {
        **record,
        "version": VERSION,
        "config": from_version1(record["config"]) if version == 1 else record["config"],
    }


def record_config(record: Mapping[str, Any], origin: Path, skip: Collection[str] = ()) -> DictConfig:
    """The configuration of a checked record, ready to be instantiated but for the components of the groups in `skip`.

    Raises:
        MetaTTTError: a component that is not known here, or values that are no configuration.
    """
    try:
        config = OmegaConf.create(to_targets(record["config"], origin, skip))
    except OmegaConfBaseException as error:
        raise MetaTTTError(f"{origin} cannot be read as a configuration: {str(error).splitlines()[0]}") from error
    assert isinstance(config, DictConfig)
    return config


def write_config(cfg: DictConfig) -> str:
    """The text of a folder's `CONFIG`."""
    text: str = yaml.safe_dump(make_record(cfg), sort_keys=False, allow_unicode=True)
    return text


def read_config(folder: Path) -> dict[str, Any]:
    """The checked record in a folder's `CONFIG`; version 1 wrote the configuration alone.

    Raises:
        MetaTTTError: it is not there or cannot be read.
    """
    path = folder / CONFIG
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise MetaTTTError(f"{path} does not exist: the configuration has to stand beside the weights") from error
    except (yaml.YAMLError, ValueError, OSError) as error:
        raise MetaTTTError(f"{path} cannot be read as a configuration: {str(error).splitlines()[0]}") from error
    bare = isinstance(content, dict) and "version" not in content and "model" in content
    return checked_record({"version": 1, "config": content} if bare else content, path)
