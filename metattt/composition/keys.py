"""The keys that belong to a job itself, beside those of the parts it chooses: their types and bounds.

A key means the same in every job that has it. Parts say in their constructors what they take; `eval`, `generate` and
`prepare` have a dataclass of their own for the others (`metattt.composition.settings`).
"""

from __future__ import annotations

import re
from typing import Any, Literal, get_origin

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from metattt.composition.messages import first_line, not_a_field, wrong_type
from metattt.errors import MetaTTTError
from metattt.setting import Setting, members

KEYS = {
    "dim": Setting(annotation=int),
    "num_heads": Setting(annotation=int),
    "seed": Setting(annotation=int | None, least=0, most=2**32 - 1),  # what numpy's and Lightning's generators take
    "batch_tokens": Setting(annotation=int | None),
    "threads": Setting(annotation=int, most=1024),
    "sample": Setting(annotation=bool),
    "compile": Setting(annotation=bool | Literal["auto"]),
    "descending": Setting(annotation=bool | None),
    **{name: Setting(annotation=str) for name in ("objective", "folder")},
    **{
        name: Setting(annotation=str | None)
        for name in ("name", "output_dir", "resume", "init_from", "sort", "family", "output")
    },
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
            if not re.search(rf"\$\{{{re.escape(name)}\b", OmegaConf.to_yaml(cfg, resolve=False)):
                rest = OmegaConf.masked_copy(cfg, [key for key in map(str, cfg) if key != name])
                raise MetaTTTError(not_a_field(rest, name, job))
        elif name in KEYS and not OmegaConf.is_missing(cfg, name):
            try:
                value = cfg[name]
            except OmegaConfBaseException as error:
                raise MetaTTTError(f"{name}: {first_line(error)}") from error
            hint: Any = KEYS[name].annotation
            if name == "seed" and job == "train":  # its data points at it, and needs one
                hint = int
            words = any(get_origin(one) is Literal for one in members(hint))
            if not words and not isinstance(value, hint):
                raise MetaTTTError(wrong_type(name, value, hint))
            KEYS[name].check(name, value)
    if re.search(r"[/\\\0\n]|^\.+$", str(cfg.get("name"))):
        why = "it is a part of a folder's name, so without / and the like"
        raise MetaTTTError(f"name={cfg.name!r} is not allowed: {why}")
