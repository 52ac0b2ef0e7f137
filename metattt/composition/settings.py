"""The settings of a job that makes no components itself: `eval`, `generate`, `prepare`, ..."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from metattt.composition.messages import first_line
from metattt.errors import MetaTTTError

NO_CHECKPOINT = "no checkpoint is given: add checkpoint=<a run's folder, or a checkpoint in it>"


def settings(cfg: DictConfig, **required: str) -> Any:
    """The keys of a job as attributes, with plain lists and dictionaries inside.

    Args:
        cfg: as `metattt.composition.compose.compose` makes it; types and bounds were checked there.
        required: key -> the message where it has no value.

    Raises:
        MetaTTTError: no value where one is required, or one that leads nowhere.
    """
    for needed, message in required.items():
        if OmegaConf.is_missing(cfg, needed) or not cfg[needed]:
            raise MetaTTTError(message)
    try:
        plain: Any = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        raise MetaTTTError(f"{error.full_key}: {first_line(error)}") from error
    return SimpleNamespace(**plain)


def pick_device(name: str) -> torch.device:
    """A torch device; `auto` is the first GPU, or the CPU without one.

    Raises:
        MetaTTTError: a device that this machine does not have.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise MetaTTTError(f"device={name} is not available: use auto, cpu or cuda") from error
    return device
