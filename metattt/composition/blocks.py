"""Stacks of different layers: a pattern of known layers over the blocks of a model, each with settings of its own.

`model.blocks` is a text, `ttt_mlp*3+window_attention`, or a list of names; in a file or a list an entry may also be a
mapping, `{layer: ttt_mlp, optimizer: {mini_batch_size: 64}}`. `model.blocks.<layer>.<key>=<value>` sets a key of every
entry of that layer, `model.blocks.<place>.<key>=<value>` of one entry, counted from 0. An entry is what `layer=<name>`
would be with the other overrides of the command. Composed, `model.blocks` is `pattern`, a list of names, and `layers`,
the configuration of each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from metattt.composition.messages import nearest
from metattt.errors import MetaTTTError

KEY = "model.blocks"
OWN = ("num_heads", "learner", "task", "optimizer", "layer")
"""What a block has of its own: a key, and the parts of a layer."""

PARTS = ("layer", "learner", "task", "optimizer")
MOST = 10_000  # entries

OVERRIDE = re.compile(r"(\+{0,2}|~)model\.blocks\.([^.=]+)(?:\.([^=]+))?(=.*)?", re.DOTALL)
NAME = re.compile(r"(\w[\w/-]*)(?:\s*\*\s*(\d+))?")


class Entry(NamedTuple):
    """One place of a pattern: the name of its layer, and overrides for it alone."""

    layer: str
    overrides: tuple[str, ...] = ()


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
    rest, settings = [], []
    for override in overrides:
        match = OVERRIDE.fullmatch(override)
        if match is None:
            rest.append(override)
            continue
        mode, owner, key, value = match.groups()
        part = "" if key is None else key.partition(".")[0]
        if part not in OWN or key == "layer":
            guess = f" Did you mean `{KEY}.{owner}.{near}`?" if (near := nearest(part, OWN)) else ""
            raise MetaTTTError(
                f"`{override}` sets nothing of a block: it has "
                f"{', '.join([OWN[0], *(f'{one}.<key>' for one in OWN[1:])])}.{guess}"
            )
        settings.append(Setting(owner, f"{mode}{key}{value or ''}", override))
    return rest, settings


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
    model = cfg.get("model")
    pattern = model.get("blocks") if isinstance(model, DictConfig) else None
    if pattern is None:
        if settings:
            raise MetaTTTError(
                f"`{settings[0].written}` sets an entry of a pattern, and there is none: give "
                f"{KEY}=[<layer>,<layer>,...]"
            )
        return None
    entries = read_pattern(OmegaConf.to_container(pattern) if OmegaConf.is_config(pattern) else pattern)
    if chosen := next((one for one in overrides if re.match(r"\+{0,2}layer=", one)), None):
        raise MetaTTTError(
            f"`{chosen}` is the layer of every block, and {KEY} a pattern of layers: leave out one of them"
        )
    known = list(dict.fromkeys([one.layer for one in entries])) + [str(place) for place in range(len(entries))]
    for setting in settings:
        if setting.owner not in known:
            guess = nearest(setting.owner, known)
            hint = f" Did you mean `{KEY}.{guess}`?" if guess else ""
            raise MetaTTTError(
                f"`{setting.written}`: {setting.owner} is not in the pattern of "
                f"{', '.join(map(str, known[: -len(entries)]))}, "
                f"whose places are 0 to {len(entries) - 1}.{hint}"
            )
    composed: dict[tuple[str, ...], dict[str, Any]] = {}
    layers: dict[str, dict[str, Any]] = {}
    names = []
    for place, entry in enumerate(entries):
        given = [
            *entry.overrides,
            *(one.override for who in (entry.layer, str(place)) for one in settings if one.owner == who),
        ]
        key = (entry.layer, *given)
        if key not in composed:
            composed[key] = _layer(entry.layer, place, given, overrides, compose)
        names.append(_named(layers, entry.layer, place, composed[key]))
    with open_dict(cfg):
        OmegaConf.update(cfg, KEY, {"pattern": names, "layers": layers}, merge=False)
        for part in PARTS:
            del cfg[part]
            cfg[part] = None
    return "-".join(known[: -len(entries)])


def read_pattern(pattern: Any) -> list[Entry]:
    """The entries of a pattern.

    Raises:
        MetaTTTError: it is none.
    """
    entries: list[Entry] = []
    for one in pattern.split("+") if isinstance(pattern, str) else pattern if isinstance(pattern, list) else [pattern]:
        if isinstance(one, Mapping) and isinstance(one.get("layer"), str):
            entries.append(Entry(one["layer"], tuple(_overrides({k: v for k, v in one.items() if k != "layer"}))))
            continue
        match = NAME.fullmatch(one.strip()) if isinstance(one, str) else None
        count = int(match[2] or 1) if match and len(match[2] or "") < 7 else 0
        if match is None or not 1 <= count <= MOST - len(entries):
            shown = str(one)[:60] if match else str(pattern)[:60]
            raise MetaTTTError(
                f"`{KEY}={shown}` is no pattern of at most {MOST:,} layers: write "
                f"{KEY}=[ttt_mlp,ttt_mlp,window_attention], or "
                f'"{KEY}=ttt_mlp*2+window_attention"'
            )
        entries += [Entry(match[1])] * count
    if not entries:
        raise MetaTTTError(f"`{KEY}=[]` has no layer: name one, or {KEY}=null for the same layer in every block")
    return entries


def _overrides(settings: Mapping[Any, Any], prefix: str = "") -> list[str]:
    """A nested mapping as overrides."""
    found = []
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if not prefix and name.partition(".")[0] not in OWN:
            raise MetaTTTError(f"`{name}` in an entry of {KEY} is nothing of a block: it has {', '.join(OWN)}")
        if isinstance(value, Mapping):
            found += _overrides(value, f"{name}.")
        else:
            shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
            found.append(f"{name}={shown}")
    return found


def _layer(
    name: str, place: int, given: list[str], overrides: Sequence[str], compose: Callable[[list[str]], DictConfig]
) -> dict[str, Any]:
    """The configuration of one entry's layer, with its parts inside."""
    said = {_key(one) for one in given}
    shared = [one for one in overrides if _key(one) not in said and _key(one) != KEY]
    try:
        cfg = compose([*shared, f"layer={name}", *given])
        found: Any = OmegaConf.to_container(cfg.layer, resolve=True)
    except (MetaTTTError, OmegaConfBaseException) as error:
        for_all = next((one for one in shared if _key(one).partition(".")[0] in OWN and _key(one) in str(error)), None)
        advice = f"\n`{for_all}` is for all blocks: for some, {KEY}.<layer>.{for_all}" if for_all else ""
        raise MetaTTTError(f"{KEY}.{place} ({name}): {str(error).splitlines()[0]}{advice}") from error
    return dict(found)


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _named(layers: dict[str, dict[str, Any]], name: str, place: int, layer: dict[str, Any]) -> str:
    """The name of a layer among those of the stack; one that differs from the first of its name has its place, too."""
    name = name.replace("/", "_")
    same = next((one for one, known in layers.items() if known == layer and one.startswith(name)), None)
    if same is None:
        same = name if name not in layers else f"{name}_{place}"
        layers[same] = layer
    return same
