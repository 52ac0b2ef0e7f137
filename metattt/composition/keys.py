"""The keys that belong to a job itself, beside those of the parts it chooses: their types and bounds.

A key means the same in every job that has it. Parts say in their constructors what they take; `eval`, `generate` and
`prepare` have a dataclass of their own for the others (`metattt.composition.settings`).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from metattt.composition.messages import TYPE_NAMES, not_a_field, shown
from metattt.errors import MetaTTTError, check_integer


class Key(NamedTuple):
    """What a key may be.

    Attributes:
        kind: its type.
        null: it may be null.
        least, most: of an integer.
    """

    kind: type
    null: bool = False
    least: int = 1
    most: int = 2**63 - 1


KEYS = {
    "dim": Key(int),
    "num_heads": Key(int),
    "seed": Key(int, True, 0, 2**32 - 1),  # what numpy's and Lightning's generators take
    "batch_tokens": Key(int, True),
    "threads": Key(int, most=1024),
    "jobs": Key(int, most=256),
    "size": Key(str),
    "cells_dir": Key(str),
    "compile": Key(bool),
    "sample": Key(bool),
    "name": Key(str, True),
    "output_dir": Key(str, True),
    "resume": Key(str, True),
    "init_from": Key(str, True),
    "objective": Key(str),
    "folder": Key(str),
    "sort": Key(str, True),
    "descending": Key(bool, True),
    "family": Key(str, True),
    "output": Key(str, True),
}


def check_keys(cfg: DictConfig, known: set[str], job: str) -> None:
    """Refuses values of another type, and keys that the job has not.

    Args:
        cfg: the configuration of the job.
        known: the keys that its file has. Others may only be there to be pointed at, by `${...}`.
        job: for messages.

    Raises:
        MetaTTTError: as said.
    """
    for name in map(str, cfg):
        if name not in known:
            text = OmegaConf.to_yaml(cfg, resolve=False)
            if not re.search(rf"\$\{{{re.escape(name)}\b", text):
                rest = OmegaConf.masked_copy(cfg, [key for key in map(str, cfg) if key != name])
                raise MetaTTTError(not_a_field(rest, name, job))
        elif name in KEYS and not OmegaConf.is_missing(cfg, name):
            try:
                value = cfg[name]
            except OmegaConfBaseException as error:
                raise MetaTTTError(f"{name}: {str(error).splitlines()[0]}") from error
            _check(name, value, KEYS[name])


def _check(name: str, value: object, key: Key) -> None:
    if value is None and key.null:
        return
    if type(value) is not key.kind:
        expected = TYPE_NAMES[key.kind] + (" or null" if key.null else "")
        raise MetaTTTError(f"`{name}={shown(value)}` is not allowed: expected {expected}.")
    if key.kind is int:
        check_integer(name, value, key.least, key.most)
    if name == "name" and isinstance(value, str) and re.search(r"[/\\\0\n]|^\.+$", value):
        raise MetaTTTError(f"name={value!r} is not allowed: it is a part of a folder's name, so without / and the like")
