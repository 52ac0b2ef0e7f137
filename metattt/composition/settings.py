"""The settings of a job that makes no components (`eval`, `generate`, `prepare`), with their types checked."""

from __future__ import annotations

from typing import Any, TypeVar, get_type_hints

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from metattt.composition.messages import first_line, wrong_type
from metattt.errors import MetaTTTError

S = TypeVar("S")


NO_CHECKPOINT = "no checkpoint is given: add checkpoint=<a run's folder, or a checkpoint in it>"


def settings(schema: type[S], cfg: DictConfig, **required: str) -> S:
    """The configuration of a job as an instance of its dataclass.

    Args:
        schema: the dataclass; its fields are the keys of the job.
        cfg: the configuration.
        required: key -> the message where it has no value.

    Raises:
        MetaTTTError: a value of another type, or none where one is required.
    """
    for needed, message in required.items():
        if OmegaConf.is_missing(cfg, needed) or not cfg[needed]:
            raise MetaTTTError(message)
    try:
        typed: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), cfg))
    except OmegaConfBaseException as error:
        key, reason = getattr(error, "full_key", None), first_line(error)
        hints = get_type_hints(schema)
        if isinstance(error, ValidationError) and key in hints:
            raise MetaTTTError(wrong_type(key, cfg[key], hints[key])) from error
        raise MetaTTTError(f"{key}: {reason}" if key else reason) from error
    return typed


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
