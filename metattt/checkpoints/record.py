"""What stands beside the weights: version and configuration. In what is read and written it is the entry `RECORD`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from metattt.checkpoints.naming import to_names, to_targets
from metattt.checkpoints.trust import check_plain, is_computed, leaves
from metattt.errors import MetaTTTError
from metattt.io import inside, read_text

RECORD = "metattt"  # the entry of a run's checkpoint
PUBLISHED_CONFIG = "config.json"  # the configuration of a published model
VERSION = 4  # of the format; no other is read
PARTS = ("task", "learner", "optimizer", "layer", "model", "data", "training", "trainer", "callbacks", "logger")
LONGEST_YAML = 2**20  # bytes


def make_record(cfg: DictConfig, **others: Any) -> dict[str, Any]:
    """The record of a configuration.

    Args:
        cfg: as it was composed.
        others: what else is to be kept, plain data.
    """
    return {"version": VERSION, "config": to_names(_computed(cfg)), **others}


def _computed(cfg: DictConfig) -> Any:
    """The plain configuration, with values in the place of what resolvers compute: `${oc.env:...}` means nothing
    elsewhere, and a file may not say what is computed. References from key to key stay."""
    plain: Any = OmegaConf.to_container(cfg)
    for path, text in list(leaves(plain)):
        if is_computed(text):
            written, live = plain, cfg
            for key in path[:-1]:
                written, live = written[key], live[key]
            value = live[path[-1]]
            written[path[-1]] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    return plain


def checked_record(record: Any, origin: Path) -> dict[str, Any]:
    """A record that this release reads.

    Raises:
        MetaTTTError: it is none, or of another version.
    """
    if not isinstance(record, Mapping) or not isinstance(record.get("config"), Mapping):
        raise MetaTTTError(f"{origin} is not a checkpoint of metattt train: it holds no configuration")
    version, config = record.get("version"), record["config"]
    if type(version) is not int or version != VERSION:
        remedy = "train the model again, or use the release that wrote it"
        if type(version) is not int or version < 1:
            remedy = "it is damaged, or of another program"
        elif version > VERSION:
            remedy = "update metattt"
        raise MetaTTTError(f"{origin} has checkpoint version {version}; this release reads version {VERSION}: {remedy}")
    check_plain(config, origin)
    for part in PARTS:
        if not isinstance(config.get(part), dict | None):
            raise MetaTTTError(f"{origin} has a configuration whose `{part}` is no part of one: it is damaged")
    if type(seed := config.get("seed", 0)) is not int:  # a run that is resumed hands it to random generators
        raise MetaTTTError(f"{origin} has seed={seed!r:.40}, which is no integer: it is damaged")
    return dict(record)


def record_config(
    record: Mapping[str, Any], origin: Path, skip: Collection[str] = (), trust: Collection[str] = ()
) -> DictConfig:
    """The configuration of a checked record, ready to be instantiated but for the components of the groups in `skip`.

    Args:
        record: as `checked_record` returns it.
        origin: the file that it is from.
        skip: groups whose components need not be known here.
        trust: modules of the user's whose classes it may name (`metattt.checkpoints.trust`).

    Raises:
        MetaTTTError: a component that is not known here or not allowed, or values that are no configuration.
    """
    try:
        config = OmegaConf.create(to_targets(record["config"], origin, skip, trust))
        OmegaConf.to_container(config, resolve=True)  # references that lead nowhere, or in a circle
    except (OmegaConfBaseException, RecursionError) as error:
        reason = (str(error).splitlines() or ["values refer to each other in a circle"])[0]
        raise MetaTTTError(f"{origin} cannot be read as a configuration: {reason}") from error
    assert isinstance(config, DictConfig)
    return config


def read_yaml(path: Path) -> Any:
    """The plain data of a short YAML file.

    Raises:
        MetaTTTError: it cannot be read, is too long, or refers to parts of itself.
    """
    try:
        return yaml.load(read_text(inside(path.parent, path.name), LONGEST_YAML), Loader=_NoAliases)
    except MetaTTTError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise MetaTTTError(f"{path} cannot be read as a configuration: {reason}") from error


class _NoAliases(yaml.SafeLoader):
    """Plain data without `*aliases`: a few lines of them can stand for more values than fit in memory."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.YAMLError("it has *aliases, which are not read")
        return super().compose_node(parent, index)
