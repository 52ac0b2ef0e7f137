"""From overrides to objects: the same composition for the command line, a notebook and a test.

`build("ttt_mlp", dim=64)` returns one layer. `compose(...)` returns the configuration of a whole job, from
which `metattt.composition.instantiate` makes what the command line would train. None of them depends on the
working directory, and all can be called any number of times in one process.

Packages of others take part through two groups of entry points: `metattt.components` (modules to import, whose classes
are decorated with `metattt.registry.register`) and `metattt.configs` (packages with YAML, laid out like ours).
"""

import numbers
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from metattt.composition.announced import announced
from metattt.composition.application import ALONE, application
from metattt.composition.blocks import fill_blocks, take_settings
from metattt.composition.choices import groups
from metattt.composition.components import COMPONENTS, JOB_COMPONENTS, load_components
from metattt.composition.instantiate import instantiate_layer
from metattt.composition.keys import check_keys
from metattt.composition.messages import explain_composition, first_line, not_a_field, refused_value
from metattt.composition.overrides import ENTRIES, SEARCH_PATH, key_of, prepare, without_null
from metattt.composition.signatures import ranges
from metattt.errors import MetaTTTError, check_heads, shown
from metattt.registry import PARAMETERS

if TYPE_CHECKING:
    from metattt.layer import TTTLayer


LAYER_PARTS = ("task", "learner", "optimizer")


class ThirdPartyConfigs(SearchPathPlugin):
    """Adds the packages named by the entry points `metattt.configs` to Hydra's search path, after our own."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for entry in announced("metattt.configs"):
            search_path.append(provider=entry.name, path=f"pkg://{entry.value}")


Plugins.instance().register(ThirdPartyConfigs)


def build(*overrides: str, **settings: Any) -> "TTTLayer":
    """A sequence layer: `build("ttt_mlp", dim=64, num_heads=4)`, or `build("layer=ttt_mlp", "dim=64", "num_heads=4")`.

    Its parameters are drawn from torch's global generator, as every module's. With `seed=0` they are drawn from that
    seed: two such calls give equal layers, and the global generator is left as it was.

    Args:
        overrides: as for the command line; a name alone is that of a layer.
        settings: the same by keyword; dotted ones in a dictionary, `**{"optimizer.base_lr": 0.5}`.

    Raises:
        MetaTTTError: for an override that is misspelt, of a wrong type or not among the choices; for a key that is
            given both ways.
    """
    names = [one for one in overrides if isinstance(one, str) and one.isidentifier()]
    named = [*names, *(one for one in overrides if names and isinstance(one, str) and key_of(one) == "layer")]
    if len(named) > 1:
        raise MetaTTTError(f"build makes one layer, and {', '.join(named)} are {len(named)} names: give one")
    given = [f"layer={one}" if one in names else one for one in overrides]
    for key, value in settings.items():
        if twice := next((one for one in given if isinstance(one, str) and key_of(one) == key), None):
            raise MetaTTTError(f"{key}={shown(value)} and {twice} set the same key: give one of them")
        if value is not None and not isinstance(value, str | numbers.Real | list | tuple | dict):
            raise MetaTTTError(
                f"{key} is a {type(value).__name__}, which cannot be an override: give a name or a number, or pass "
                "objects to metattt.TTTLayer"
            )
        given.append(f"{key}={shown(value)}")
    cfg = compose(*given, job="build")
    import torch  # not before: a mistake in an override need not wait for it

    if cfg.seed is None:
        return instantiate_layer(cfg)
    used = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # no other GPU is touched
    with ALONE, torch.random.fork_rng(devices=used):
        torch.manual_seed(cfg.seed)
        return instantiate_layer(cfg)


def compose(*overrides: str, job: str = "train") -> DictConfig:
    """The configuration of a job: `configs/<job>.yaml` with its groups, and the overrides applied.

    Args:
        overrides: in Hydra's syntax, e.g. `learner=mlp`, `learner.depth=3`, `+trainer.max_time=...`.
        job: a command of metattt, `build` or `language_model`.

    Raises:
        MetaTTTError: as `build`.
    """
    prepared = prepare(overrides, job)
    for name in [one.partition("=")[2] for one in prepared if one.startswith("recipe=") and "recipe" in groups(job)]:
        known = groups(job)["recipe"]  # which Hydra does not look at: a preset need not have a recipe
        if name not in known and not any(one.startswith(SEARCH_PATH) for one in prepared):
            raise MetaTTTError(f"recipe={name} is not allowed: it must be {', '.join(sorted(known))}")
    load_components(COMPONENTS + JOB_COMPONENTS.get(job, ()))
    prepared, settings = take_settings(prepared) if "model" in groups(job) else (prepared, [])
    cfg, chosen = _checked(prepared, job)
    stack = fill_blocks(cfg, prepared, settings, lambda of_block: _checked(of_block, job)[0])
    for _, target, node in _parts(cfg):
        if target == "metattt.layer.TTTLayer" and {"dim", "num_heads"} <= set(node):
            check_heads(node.dim, node.get("of_heads") or node.num_heads)
    if "name" in cfg and cfg.name is None:
        cfg.name = stack or (chosen["layer"] if chosen["layer"] != "custom" else chosen["learner"])
    if "given" in cfg:
        cfg.given = without_null(overrides)
    return cfg


def _checked(overrides: list[str], job: str) -> tuple[DictConfig, DictConfig]:
    """As `_compose`, with all that can be wrong said in the words of `metattt.composition.messages`."""
    removed = [one for one in overrides if re.fullmatch(r"~[\w.]+", one) and key_of(one) not in groups(job)]
    kept = [one for one in overrides if one not in removed]
    try:
        cfg, chosen = _compose(kept, job)
        _clear_custom(cfg, chosen, kept, job)
    except (HydraException, OmegaConfBaseException) as error:
        raise MetaTTTError(explain_composition(error, job)) from error
    for key in map(key_of, removed):
        _take_away(cfg, key, job)
    for group in ENTRIES:
        entries = cfg.get(group)
        for name in list(entries) if isinstance(entries, DictConfig) else ():
            if entries._get_node(name)._is_none():  # null in a file, as `left_out` on the command line
                _take_away(cfg, f"{group}.{name}", job)
    _apply_block_style(cfg, overrides, str(chosen.get("block_style")))
    check_keys(cfg, job)
    _check_parameters(cfg, job)
    _check_chosen(cfg, overrides)
    return cfg, chosen


def _take_away(cfg: DictConfig, key: str, job: str) -> None:
    """Removes a key that no constructor has. (Hydra would name neither the near ones nor the way.)"""
    owner, _, name = key.rpartition(".")
    node = OmegaConf.select(cfg, owner) if owner else cfg
    if not isinstance(node, DictConfig) or name not in node.keys():  # noqa: SIM118 (null is not `in` a node)
        raise MetaTTTError(not_a_field(node, key, job))
    if name in PARAMETERS.get(str(node.get("_target_")), ()):
        raise MetaTTTError(f"`{key}` cannot be removed: set it with {key}=<value>, or leave it as it is")
    with open_dict(node):
        del node[name]


def _compose(overrides: list[str], job: str) -> tuple[DictConfig, DictConfig]:
    """The configuration that Hydra composes, and the name that was chosen for each group."""
    with application(job):
        cfg = hydra.compose(job, overrides, return_hydra_config=True)
    chosen = cfg.hydra.runtime.choices
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg, chosen


def _clear_custom(cfg: DictConfig, chosen: DictConfig, overrides: list[str], job: str) -> None:
    """A part that is `custom` in the place of the layer's own has none of the keys that the layer sets for that: what
    it has is composed without the layer. Where there is a schema, it refuses such keys."""
    for part in LAYER_PARTS:
        if chosen.get("layer", "custom") == "custom" or chosen.get(part) != "custom":
            continue
        others = {"layer", *LAYER_PARTS} - {part}
        known = {*groups(job), SEARCH_PATH} - others
        given = [one for one in overrides if key_of(one) in known] + [f"{one}=custom" for one in sorted(others)]
        if _compose(given, job)[1][part] == "custom":  # otherwise the file of the layer has chosen it
            of_part = [one for one in overrides if key_of(one).startswith(f"{part}.")]
            cfg[part] = _compose([*given, *of_part], job)[0][part]


def _apply_block_style(cfg: DictConfig, overrides: list[str], name: str) -> None:
    """Sets what `cfg.block_style` says of what stands around a layer's rule, a mapping of parts to keys and values, in
    the parts that have such a key; one that an override sets stays as it is."""
    style, given, known = cfg.get("block_style"), set(map(key_of, overrides)), False
    for part, settings in style.items() if isinstance(style, DictConfig) else ():
        part = str(part)
        if not isinstance(settings, DictConfig):
            raise MetaTTTError(
                f"block_style={name} gives {part} no keys: it must be a mapping such as `{part}: {{gate: false}}`"
            )
        node = cfg.get(part)
        keys = list(node.keys()) if isinstance(node, DictConfig) else []  # those whose value is null, too
        for key in [key for key in settings if key in keys]:
            known = True
            if f"{part}.{key!s}" not in given:
                node[key] = settings[key]
    if style and not known:
        raise MetaTTTError(
            f"block_style={name} changes nothing in this layer, which has no task, learner and optimizer: leave it "
            "out, or choose another layer"
        )


def _check_chosen(cfg: DictConfig, overrides: list[str]) -> None:
    """Refuses the choice of a part that the layer does not have, as one that is a single recurrence has none, and its
    settings."""
    layer = cfg.get("layer")
    written = OmegaConf.to_yaml(layer) if isinstance(layer, DictConfig) else ""
    for override in overrides if written else ():
        key, _, value = override.partition("=")
        part, _, setting = key.lstrip("+").partition(".")
        if part in LAYER_PARTS and value != "null" and f"${{{part}}}" not in written:
            does = "sets" if setting else "chooses"
            raise MetaTTTError(
                f"`{override}` {does} nothing: this layer has no {part}; leave it out, or choose a layer that has one, "
                "e.g. layer=ttt_linear"
            )


def _parts(cfg: DictConfig, prefix: str = "") -> Iterator[tuple[str, str, DictConfig]]:
    """Every node that makes an object, by its dotted key, with its class; those that only point at another are left to
    it."""
    for key, node in cfg.items_ex(resolve=False):
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_interpolation():
            if "_target_" in node:  # and has a value
                yield f"{prefix}{key!s}", str(node._target_), node
            yield from _parts(node, f"{prefix}{key!s}.")


def _check_parameters(cfg: DictConfig, job: str) -> None:
    """Check what merging cannot: choices of Literal parameters, declared ranges, keys that `+` added."""
    for part, target, node in _parts(cfg):
        if target not in PARAMETERS:  # a class of the user's without a schema
            continue
        parameters, declared = PARAMETERS[target], ranges(target)
        for key in map(str, node):
            full_key = f"{part}.{key}"
            if OmegaConf.is_missing(node, key) or key in ("_target_", "_partial_", "_convert_", "_recursive_"):
                continue
            if key not in parameters:
                raise MetaTTTError(not_a_field(node, full_key, job))
            try:
                value = node[key]
            except OmegaConfBaseException as error:  # a key that takes its value from another, which is not there
                raise MetaTTTError(f"{full_key}: {first_line(error)}") from error
            if parameters[key] and value not in parameters[key]:
                raise MetaTTTError(refused_value(full_key, value, parameters[key]))
            if key in declared:
                declared[key].check(full_key, value)
