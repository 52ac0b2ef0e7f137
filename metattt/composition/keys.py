"""The keys that belong to a job itself, beside those of the parts it chooses: their types and bounds.

A key means the same in every job that has it, unless one stands here as `<job>:<key>`. Parts say in their constructors
what they take.
"""

from __future__ import annotations

import numbers
import re
from dataclasses import replace
from typing import Any, Literal, get_origin

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from metattt.composition.choices import groups, keys_of
from metattt.composition.messages import first_line, not_a_field, wrong_type
from metattt.errors import MetaTTTError, shown
from metattt.setting import Setting, members

SEED = Setting(annotation=int, least=0, most=2**32 - 1)  # what numpy's and Lightning's generators take
MOST_ROWS = 2**20  # windows or images in a batch


def _each(names: str, annotation: Any, **bounds: Any) -> dict[str, Setting]:
    return dict.fromkeys(names.split(), Setting(annotation=annotation, **bounds))


KEYS: dict[str, Setting | None] = {
    "seed": replace(SEED, annotation=int | None),
    **dict.fromkeys(("train:seed", "adapt:seed", "prepare:seed"), SEED),
    "compile": Setting(annotation=bool | Literal["auto"]),
    **_each("sample inner_loss reset generate:compile", bool),
    **_each("descending", bool | None),
    **_each("dim num_heads segment num_bins inner_loss_windows", int),
    **_each("frozen_blocks audit max_new_tokens", int, least=0),
    **_each("batch_size top", int, most=MOST_ROWS),
    **_each("num_workers", int, least=0, most=MOST_ROWS),
    **_each("length batch rounds", int, most=2**24),
    **_each("threads", int, most=1024),
    **_each("batch_tokens", int | None),
    **_each(
        "limit rank top_k data.batch_size data.context_length data.documents data.validation_max_bytes "
        "data.validation_max_tokens", int | None, advice=", or null",
    ),
    **_each("context num_fewshot", int | None, least=0, advice=", or null"),
    **_each("workers", int | None, most=1024),
    **_each("data.max_tokens", int | None, least=2),
    **_each("temperature", float),
    **_each("validation_fraction", float, least=0, below=1),
    **_each("clip top_p", float | None),
    **_each("dataset_split device folder objective prompt text_key adapt:data.text_key prepare:tokenizer", str),
    **_each(
        "checkpoint dataset_config family init_from name output output_dir prompts resume sort source target task_path "
        "tokenizer data.dataset data.image_key data.label_key data.text_key data.validation_path "
        "data.validation_split", str | None,
    ),
    **_each("stop", list[str]),
    **_each("labels", list[str] | None),
    **_each("split", Literal["train", "validation", "test", "all"]),
    **_each("corrupt", Literal["error", "skip"]),
    **_each("data.corrupt", Literal["error", "skip"] | None),
    **_each("dtype", Literal["float32", "bfloat16", "float16"] | None),
    **_each("direction", Literal["forward", "both"]),
    **_each("convert:direction", Literal["auto", "from_published", "from_jax", "to_published", "to_jax"]),
    "eval:checkpoint": None, "prepare:source": None,  # lists, too: the jobs check them
}  # fmt: skip


def check_keys(cfg: DictConfig, job: str) -> None:
    """Refuses values of another type, and keys that the job has not.

    Args:
        cfg: the configuration of the job. Keys that its file has not may only be there to be pointed at, by `${...}`.
        job: the command.

    Raises:
        MetaTTTError: as said.
    """
    known = keys_of(job)
    for name in map(str, cfg):
        if name in known:
            _check(cfg, name, name, job)
        elif not re.search(rf"\$\{{{re.escape(name)}\b", OmegaConf.to_yaml(cfg, resolve=False)):
            raise _unknown(cfg, name, name, job)
    if "data" in known and "data" not in groups(job):  # what an evaluation changes of the data of a run
        for name in map(str, cfg.data):
            if f"data.{name}" not in known:
                raise _unknown(cfg.data, name, f"data.{name}", job)
            _check(cfg.data, name, f"data.{name}", job)
    if re.search(r"[/\\\0\n]|^\.+$", str(cfg.get("name"))):
        why = "it is a part of a folder's name, so without / and the like"
        raise MetaTTTError(f"name={cfg.name!r} is not allowed: {why}")


def _unknown(node: DictConfig, name: str, key: str, job: str) -> MetaTTTError:
    with open_dict(node):
        del node[name]  # else it would be its own nearest name
    return MetaTTTError(not_a_field(node, key, job))


def _check(node: DictConfig, name: str, key: str, job: str) -> None:
    """Refuses a value of another type or out of bounds; `key` is its full name. A number where a text belongs is one,
    as in `dataset_config=2024`."""
    setting = KEYS.get(f"{job}:{key}", KEYS.get(key))
    if setting is None or OmegaConf.is_missing(node, name):
        return
    try:
        value = node[name]
    except OmegaConfBaseException as error:
        raise MetaTTTError(f"{key}: {first_line(error)}") from error
    kinds = members(setting.annotation)
    if str in kinds and type(value) in (int, float):
        node[name] = value = str(value)
    if list[str] in kinds and isinstance(value, ListConfig):
        if not all(isinstance(one, str | int | float) for one in value):
            raise MetaTTTError(wrong_type(key, value, setting.annotation))
        node[name] = [shown(one) for one in value]
        return
    words = any(get_origin(one) is Literal for one in kinds)
    plain = tuple(numbers.Real if one is float else one for one in kinds if get_origin(one) is None)
    if not words and not isinstance(value, plain):
        raise MetaTTTError(wrong_type(key, value, setting.annotation))
    setting.check(key, value)
