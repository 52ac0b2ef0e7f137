"""Stacks of different layers: a pattern of known layers over the blocks of a model, each with settings of its own.

`model.blocks` is a text, `ttt_mlp*3+window_attention`, or a list of names; in a file or a list an entry may also be a
mapping, `{layer: ttt_mlp, optimizer: {mini_batch_size: 64}}`. `model.blocks.<layer>.<key>=<value>` sets a key of every
entry of that layer, `model.blocks.<place>.<key>=<value>` of one entry, counted from 0. An entry is what `layer=<name>`
would be with the other overrides of the command. Composed, `model.blocks` is `pattern`, a list of names, and `layers`,
the configuration of each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from metattt.composition.messages import nearest
from metattt.composition.overrides import key_of
from metattt.errors import MetaTTTError, shown

KEY = "model.blocks"
PARTS = ("layer", "learner", "task", "optimizer")
OWN = ("num_heads", *PARTS)
"""What a block has of its own: a key, and the parts of a layer."""

MOST = 10_000  # entries

OVERRIDE = re.compile(r"(\+{0,2}|~)model\.blocks\.([^.=]+)(?:\.([^=]+))?(=.*)?", re.DOTALL)
NAME = re.compile(r"(\w[\w/-]*)(?:\s*\*\s*(\d{1,6}))?")


class Setting(NamedTuple):
    """An override of one entry, or of all of a layer: what it names, and the override as that block's own."""

    owner: str
    override: str
    written: str


def take_settings(overrides: Sequence[str]) -> tuple[list[str], list[Setting]]:
    """The overrides of the job, and those of entries.

    Raises:
        MetaTTTError: an override of an entry that no block has.
    """
    of_entries = [override for override in overrides if OVERRIDE.fullmatch(override)]
    return [one for one in overrides if one not in of_entries], [_read_setting(one) for one in of_entries]


def _read_setting(override: str) -> Setting:
    mode, owner, key, value = OVERRIDE.fullmatch(override).groups()  # type: ignore[union-attr]
    part = (key or "").partition(".")[0]
    if part not in OWN or key == "layer":
        guess = f" Did you mean `{KEY}.{owner}.{near}`?" if (near := nearest(part, OWN)) else ""
        allowed = ", ".join([OWN[0], *(f"{one}.<key>" for one in PARTS)])
        raise MetaTTTError(f"`{override}` does not set anything in a block, which has {allowed}.{guess}")
    return Setting(owner, f"{mode}{key}{value or ''}", override)


def fill_blocks(
    cfg: DictConfig, overrides: Sequence[str], settings: Sequence[Setting], compose: Callable[[list[str]], DictConfig]
) -> str | None:
    """Puts the composed layers in the place of the pattern that a job's configuration has; the parts of the one layer
    that it would have without are then null.

    Args:
        cfg: of the job.
        overrides: that it was composed of.
        settings: of entries.
        compose: the configuration of the job for other overrides.

    Returns:
        A name for the stack; None: there is no pattern.

    Raises:
        MetaTTTError: no pattern where there are settings, one that cannot be read, or `layer=` beside it; what is wrong
            with an entry.
    """
    pattern = OmegaConf.select(cfg, KEY) if isinstance(cfg.get("model"), DictConfig) else None
    if pattern is None:
        if settings:
            needs = f"sets an entry of a pattern, but there is no pattern: give {KEY}=[<layer>,<layer>,...]"
            raise MetaTTTError(f"`{settings[0].written}` {needs}")
        return None
    entries = read_pattern(OmegaConf.to_container(pattern) if OmegaConf.is_config(pattern) else pattern)
    if chosen := next((one for one in overrides if re.match(r"\+{0,2}layer=", one)), None):
        raise MetaTTTError(
            f"`{chosen}` is the layer of every block, and {KEY} a pattern of layers: leave out one of them"
        )
    names, places = list(dict.fromkeys(name for name, _ in entries)), [str(place) for place in range(len(entries))]
    for one in settings:
        if one.owner not in (*names, *places):
            guess = nearest(one.owner, (*names, *places))
            hint = f" Did you mean `{KEY}.{guess}`?" if guess else ""
            raise MetaTTTError(
                f"`{one.written}`: {one.owner} is not in the pattern of {', '.join(names)}, whose places are 0 to "
                f"{places[-1]}.{hint}"
            )
    composed: dict[tuple[str, ...], dict[str, Any]] = {}
    layers: dict[str, dict[str, Any]] = {}
    given_names = []
    for place, (name, own) in enumerate(entries):
        given = [*own, *(one.override for owner in (name, str(place)) for one in settings if one.owner == owner)]
        if (name, *given) not in composed:
            composed[name, *given] = _layer(name, place, given, overrides, compose)
        given_names.append(_named(layers, name, place, composed[name, *given]))
    with open_dict(cfg):
        OmegaConf.update(cfg, KEY, {"pattern": given_names, "layers": layers}, merge=False)
        for part in PARTS:
            del cfg[part]
            cfg[part] = None
    return "-".join(names)


def read_pattern(pattern: Any) -> list[tuple[str, list[str]]]:
    """The entries of a pattern: the name of each layer, and overrides for it alone.

    Raises:
        MetaTTTError: it is none.
    """
    entries: list[tuple[str, list[str]]] = []
    for one in pattern.split("+") if isinstance(pattern, str) else pattern if isinstance(pattern, list) else [pattern]:
        name, own = one, {}
        if isinstance(one, dict):
            name, own = one.get("layer"), {key: value for key, value in one.items() if key != "layer"}
        match = NAME.fullmatch(name.strip()) if isinstance(name, str) else None
        count = int(match[2] or 1) if match else 0
        if match is None or not 1 <= count <= MOST - len(entries):
            raise MetaTTTError(
                f"`{KEY}={str(pattern)[:60]}` is no pattern of at most {MOST:,} layers: write "
                f'{KEY}=[ttt_mlp,ttt_mlp,window_attention], or "{KEY}=ttt_mlp*2+window_attention"'
            )
        pairs = [(key, value if isinstance(value, dict) else {"": value}) for key, value in own.items()]
        pairs = [(key, {"": "custom"} | inside if "_target_" in inside else inside) for key, inside in pairs]
        written = {f"{key}.{inner}".rstrip("."): one for key, inside in pairs for inner, one in inside.items()}
        settings = [_read_setting(f"{KEY}.{len(entries)}.{key}={shown(value)}") for key, value in written.items()]
        entries += [(match[1], [setting.override for setting in settings])] * count
    if not entries:
        raise MetaTTTError(f"`{KEY}=[]` has no layer: name one, or {KEY}=null for the same layer in every block")
    return entries


def _layer(
    name: str, place: int, given: list[str], overrides: Sequence[str], compose: Callable[[list[str]], DictConfig]
) -> dict[str, Any]:
    """The configuration of one entry's layer, with its parts inside."""
    said = {KEY, *map(key_of, given)}
    shared = [one for one in overrides if key_of(one) not in said]
    own = tuple(f"{part}." for part in PARTS if f"{part}=custom" in given)  # their keys need no `+`, as in `prepare`
    given = [f"++{one}" if one.startswith(own) else one for one in given]
    try:
        cfg = compose([*shared, f"layer={name}", *given])
        found: Any = OmegaConf.to_container(cfg.layer, resolve=True)
    except (MetaTTTError, OmegaConfBaseException) as error:
        said_of = {one: (key_of(one), key_of(one).partition(".")[0]) for one in shared}
        mentioned = [one for one, (key, part) in said_of.items() if part in OWN and key in str(error)]
        for_all = next(iter(mentioned + [one for one in said_of if f"no {said_of[one][1]}:" in str(error)]), None)
        advice = f"\n`{for_all}` is for all blocks: for some, {KEY}.<layer>.{for_all}" if for_all else ""
        lines = str(error).replace("`layer=", "`").splitlines()  # here a name stands alone
        raise MetaTTTError(f"{KEY}.{place} ({name}): " + (lines[0] + advice if advice else "\n".join(lines))) from error
    return dict(found)


def _named(layers: dict[str, dict[str, Any]], name: str, place: int, layer: dict[str, Any]) -> str:
    """The name of a layer among those of the stack; one that differs from the first of its name has its place, too."""
    name = name.replace("/", "_")
    for known, other in layers.items():
        if other == layer and known.startswith(name):
            return known
    while name in layers:  # a layer of the user's may have this very name
        name = f"{name}_{place}"
    layers[name] = layer
    return name
