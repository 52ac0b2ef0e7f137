"""From overrides to objects: the same composition for the command line, a notebook and a test.

`build("layer=ttt_mlp", "dim=64")` returns one layer. `compose(...)` returns the configuration of a whole job, from
which `metattt.composition.instantiate` makes what the command line would train. None of them depends on the
working directory, and all can be called any number of times in one process.

Packages of others take part through two groups of entry points: `metattt.components` (modules to import, whose classes
are decorated with `metattt.registry.register`) and `metattt.configs` (packages with YAML, laid out like ours).
"""

import importlib
import pkgutil
import re
from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

import hydra
import torch
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from metattt.composition.instantiate import instantiate_layer
from metattt.composition.messages import (
    bad_interpolation,
    explain_composition,
    not_a_field,
    refused_value,
    unnamed_choice,
)
from metattt.errors import MetaTTTError
from metattt.registry import PARAMETERS, register

if TYPE_CHECKING:
    from metattt.layer import TTTLayer

COMPONENTS = ("metattt.learners", "metattt.tasks", "metattt.optimizers")
"""Packages of ours whose modules are imported so that their classes register their schemas."""

JOB_COMPONENTS = {
    "train": ("metattt.models", "metattt.data", "metattt.training"),
    "language_model": ("metattt.models",),
    "bench": ("metattt.bench",),
}
"""The same for one job only: training imports Lightning, which a notebook that builds a layer does not wait for."""

FREE_TEXT = (
    "prompt", "checkpoint", "data.path", "data.validation_path", "data.train_split", "data.validation_split", "resume", "init_from",
    "output_dir", "source", "target", "dataset_files", "tokenizer",
)  # fmt: skip
"""Keys whose value is text or a path: taken as written, without Hydra's rules for `=`, `(`, quotes or spaces."""

LISTS = ("data.path", "checkpoint", "source", "dataset_files")
"""Those of them that may also be a list, [a,b]."""


NOTHING = {"preset=null": "preset=none", "experiment=null": ""}
"""Choices of nothing, as they are by default."""


class ThirdPartyConfigs(SearchPathPlugin):
    """Adds the packages named by the entry points `metattt.configs` to Hydra's search path, after our own."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for entry in entry_points(group="metattt.configs"):
            search_path.append(provider=entry.name, path=f"pkg://{entry.value}")


Plugins.instance().register(ThirdPartyConfigs)


def build(*overrides: str) -> "TTTLayer":
    """A sequence layer from overrides, e.g. `build("layer=ttt_mlp", "dim=64", "num_heads=4")`.

    Its parameters are drawn from `seed` (0 by default), so that two calls with the same overrides give equal layers;
    torch's global generator is left as it was. `seed=null` draws from the global generator instead.

    Raises:
        MetaTTTError: for an override that is misspelt, of a wrong type or not among the choices.
    """
    cfg = compose(*overrides, job="build")
    if cfg.seed is None:
        return instantiate_layer(cfg)
    with torch.random.fork_rng():
        torch.manual_seed(cfg.seed)
        return instantiate_layer(cfg)


def compose(*overrides: str, job: str = "train") -> DictConfig:
    """The configuration of a job: `configs/<job>.yaml` with its groups, and the overrides applied.

    Args:
        overrides: in Hydra's syntax, e.g. `learner=mlp`, `learner.depth=3`, `+trainer.max_time=...`.
        job: `build`, `language_model`, `train`, `eval`, `generate`, `convert`, `layers`, `bench` or `check`.

    Raises:
        MetaTTTError: as `build`.
    """
    load_components(COMPONENTS + JOB_COMPONENTS.get(job, ()))
    named = [NOTHING.get(override, override) for override in overrides]
    prepared = _open_custom_parts([quote_free_text(override) for override in named if override])
    outer = GlobalHydra.instance().hydra  # set if the caller is itself a Hydra application
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_module("metattt.configs", job_name=job, version_base="1.3"):
            cfg = hydra.compose(job, prepared)
    except (HydraException, OmegaConfBaseException) as error:
        raise MetaTTTError(explain_composition(error, job)) from error
    except ValueError as error:  # Hydra's, for a choice that is no name
        message = unnamed_choice(prepared)
        if message is None:
            raise
        raise MetaTTTError(message) from error
    finally:
        GlobalHydra.instance().hydra = outer
    _check_parameters(cfg, job)
    if "given" in cfg:
        cfg.given = [override for override in overrides if override not in NOTHING]
    return cfg


def load_components(packages: Iterable[str] = COMPONENTS) -> None:
    """Import every module that registers components: those of our packages, and of the installed packages of others.

    Raises:
        MetaTTTError: if a package that announces components cannot be imported.
    """
    from metattt.layer import TTTLayer

    for package in packages:
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
            importlib.import_module(module.name)
    register(group="layer", name="ttt_layer")(TTTLayer)
    for entry in entry_points(group="metattt.components"):
        try:
            importlib.import_module(entry.value)
        except Exception as error:  # whatever a module of others raises when imported
            owner = entry.dist.name if entry.dist else entry.name
            raise MetaTTTError(
                f"{entry.value}, which the installed package {owner} announces, cannot be imported: {error}\n"
                f"Repair the package, or remove it: pip uninstall {owner}"
            ) from error


def quote_free_text(override: str) -> str:
    """Quote the value of an override of a free-text key, so that Hydra takes it as written.

    Left as they are: `null`, a value that is in quotes already, a list for a key of `LISTS`, and interpolations in paths.
    """
    match = re.fullmatch(r"(\+{0,2})([\w.]+)=(.*)", override, flags=re.DOTALL)
    if match is None or match[2] not in FREE_TEXT:
        return override
    prefix, key, value = match.groups()
    in_quotes = re.fullmatch(r"'([^'\\]|\\.)*'|\"([^\"\\]|\\.)*\"", value, flags=re.DOTALL)
    if value == "null" or in_quotes or (key in LISTS and value.startswith("[") and value.endswith("]")):
        return override
    if key == "prompt":
        value = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)  # source code has `${`, which is no interpolation there
    return f"{prefix}{key}={QuotedString(text=value, quote=Quote.single).with_quotes()}"


def _open_custom_parts(overrides: list[str]) -> list[str]:
    """`learner=custom` (task, optimizer) has no schema: `learner.<key>=` may then add a key without Hydra's `+`."""
    opened = {match[1] for override in overrides if (match := re.fullmatch(r"(\w+)=custom", override))}
    return ["++" + override if override.partition(".")[0] in opened else override for override in overrides]


def _check_parameters(cfg: DictConfig, job: str) -> None:
    """Check what merging cannot: choices of Literal parameters, keys that `+` added, types behind `${...}`."""
    if not isinstance(cfg.get("seed"), int | None):
        raise MetaTTTError(f"`seed={cfg.seed}` is not allowed: expected an integer or null.")
    for part, node in cfg.items_ex(resolve=False):
        if not isinstance(node, DictConfig) or node._is_interpolation() or OmegaConf.is_missing(node, "_target_"):
            continue
        parameters = PARAMETERS.get(str(node.get("_target_")))
        if parameters is None:  # no registered class: a plain node, or a class of the user's without a schema
            continue
        for key in map(str, node):
            full_key = f"{part!s}.{key}"
            if OmegaConf.is_missing(node, key) or key in ("_target_", "_partial_", "_convert_", "_recursive_"):
                continue
            if key not in parameters:
                raise MetaTTTError(not_a_field(node, full_key, job))
            try:
                value = node[key]
            except OmegaConfBaseException as error:
                raise MetaTTTError(bad_interpolation(node, full_key, error)) from error
            if parameters[key] and value not in parameters[key]:
                raise MetaTTTError(refused_value(full_key, value, parameters[key]))
