"""The record beside the weights: version and configuration, and what a configuration in a file may say.

In memory a node of a component has `_target_`, a dotted path, which is what Hydra instantiates. On disk the same node
has `_component_: learner=mlp` and `_version_: 1` in its place: a class may be moved or renamed, and old runs still find
it. Classes that are not ours to move (Lightning's, or a user's own that no installed package announces) keep their
`_target_`.

A file comes from anywhere. What it names is looked up among registered components and a few classes of libraries, with
the keys of their constructors, before any of it is imported, called or allocated. A class of a user's own needs
`trust=<module>` on the command line; a file cannot give it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from metattt.composition.announced import announced
from metattt.composition.components import load_components
from metattt.composition.messages import first_line
from metattt.errors import MetaTTTError, shown
from metattt.registry import PARAMETERS, REGISTERED, SCHEMAS, version_of

RECORD = "metattt"  # the entry of a run's checkpoint
PUBLISHED_CONFIG = "config.json"  # the configuration of a published model
VERSION = 4  # of the format; no other is read
PARTS = ("task", "learner", "optimizer", "layer", "model", "data", "training", "trainer", "callbacks", "logger")

COMPONENT, COMPONENT_VERSION = "_component_", "_version_"
HOMES = {
    "model": "metattt.models", "data": "metattt.data", "training": "metattt.training", "callback": "metattt.training",
    "strategy": "metattt.training", "logger": "metattt.training",
}  # fmt: skip
"""Group -> our package whose modules register it, where that is not one of the parts of a layer."""

OF_TRAINING = ("training", "trainer", "callbacks", "logger")
"""Keys of a configuration with which a model is trained, and which nothing else needs."""

REFERENCE = re.compile(r"\$\{\w+(\.\w+)*\}")  # to another value of the configuration; nothing that is computed
LIBRARIES = (
    "lightning.Trainer",
    "lightning.pytorch.callbacks.ModelCheckpoint",
    "lightning.pytorch.callbacks.EarlyStopping",
    "lightning.pytorch.callbacks.EMAWeightAveraging",
    "lightning.pytorch.callbacks.LearningRateMonitor",
    "lightning.pytorch.callbacks.Timer",
    "lightning.pytorch.loggers.CSVLogger",
    "lightning.pytorch.loggers.TensorBoardLogger",
    "lightning.pytorch.loggers.WandbLogger",
    "lightning.pytorch.loggers.MLFlowLogger",
)
"""Classes of libraries that configurations of ours name, beside torch's own modules, of which a learner may be made."""

MOST = {"num_workers": 256, "devices": 1024, "num_nodes": 2**16, "steps": 2**14, "prefetch_factor": 1024}
"""Settings that start processes or go round loops: the most that a file may ask for."""

COUNTS, OF_MODEL = ("num_layers", "depth"), ("model", "layer", "learner", "task", "optimizer")
"""Settings that make a number of tensors (at most as many as the file has), and where they stand."""


# -- records -----------------------------------------------------------------------------------------------------------


def make_record(cfg: DictConfig, **others: Any) -> dict[str, Any]:
    """The record of a composed configuration, with `others`, plain data.

    What resolvers compute is kept as its value: `${oc.env:...}` means nothing elsewhere, and a file may not say what is
    computed. References from key to key stay.

    Raises:
        MetaTTTError: a mapping with other keys than texts.
    """
    plain: Any = OmegaConf.to_container(cfg)
    _check_names(plain)
    for path, text in list(leaves(plain)):
        if is_computed(text):
            written, live = plain, cfg
            for key in path[:-1]:
                written, live = written[key], live[key]
            value = live[path[-1]]
            written[path[-1]] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    return {"version": VERSION, "config": to_names(plain), **others}


def _check_names(node: Any, where: str = "") -> None:
    """Refuses a mapping with other keys than texts: a checkpoint would return them as texts."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        if isinstance(node, dict) and not isinstance(key, str):
            raise MetaTTTError(
                f"{where} has the key {shown(key)}: give a text, such as {{k{shown(key)}: ...}}, or a list"
            )
        _check_names(value, f"{where}.{key}".lstrip("."))


def checked_record(record: Any, origin: Path) -> dict[str, Any]:
    """A record that this release reads; one of another version, or with a configuration in which something is computed,
    raises an error."""
    if not isinstance(record, Mapping) or not isinstance(record.get("config"), Mapping):
        raise MetaTTTError(f"{origin} is not a checkpoint of metattt train: it holds no configuration")
    version, config = record.get("version"), record["config"]
    if type(version) is not int or version != VERSION:
        raise MetaTTTError(
            f"{origin} has checkpoint version {version!s:.20}; this release reads version {VERSION}: use the release "
            "that wrote it, or train the model again"
        )
    for path, value in leaves(config):
        if is_computed(value):
            where = ".".join(map(str, path))
            raise MetaTTTError(
                f"{origin} has {value[:80]!r} as `{where}`: only ${{key}} is filled in, nothing is computed"
            )
    for part in PARTS:
        if not isinstance(config.get(part), dict | None):
            raise MetaTTTError(
                f"{origin} has a configuration with the key `{part}`, which configurations do not have: it is damaged"
            )
    if type(seed := config.get("seed", 0)) is not int:  # a run that is resumed hands it to random generators
        raise MetaTTTError(f"{origin} has seed={seed!r:.40}, which is not an integer: it is damaged")
    return dict(record)


def record_config(
    record: Mapping[str, Any], origin: Path, skip: Collection[str] = (), trust: Collection[str] = ()
) -> DictConfig:
    """The configuration of a checked record, ready to be instantiated but for the keys in `skip`.

    Args:
        record: as `checked_record` returns it.
        origin: the file that it is from.
        skip: keys of which only the settings are kept: their classes need not be known here, or trusted.
        trust: modules of the user's whose classes it may name.

    Raises:
        MetaTTTError: a component that is not known here or not allowed, or values that are no configuration.
    """
    trust = modules(trust)
    try:
        written = {
            key: _settings_of(node) if key in skip else to_targets(node, origin, trust)
            for key, node in record["config"].items()
        }
        config = OmegaConf.create(written)
        OmegaConf.to_container(config, resolve=True)  # references that lead nowhere, or in a circle
    except Untrusted as error:
        used = {key: node for key, node in record["config"].items() if key not in skip}
        needed = [*trust, *(one for one in own_modules(used) if one not in trust)]
        advice = f"If you trust that code, and the file was written with it: add {as_override(needed)}"
        raise MetaTTTError(f"{error}\n{advice}") from error
    except (OmegaConfBaseException, RecursionError) as error:
        raise MetaTTTError(f"{origin} cannot be read as a configuration: {first_line(error)}") from error
    assert isinstance(config, DictConfig)
    return config


# -- components by name ------------------------------------------------------------------------------------------------


def to_names(node: Any, names: Mapping[str, tuple[str, str]] | None = None) -> Any:
    """A plain configuration (dictionaries, lists, values) as it is written to disk; `names`: those of classes."""
    if names is None:
        # another process will find a registered class by its name if it is ours, or of a package that announces its own
        owners = {"metattt", *(entry.value.partition(".")[0] for entry in announced("metattt.components"))}
        names = {target: key for key, target in REGISTERED.items() if target.partition(".")[0] in owners}
    if isinstance(node, list):
        return [to_names(one, names) for one in node]
    if not isinstance(node, dict):
        return node
    written = {key: to_names(value, names) for key, value in node.items()}
    target = node.get("_target_")
    if not isinstance(target, str) or target not in names:
        return written
    del written["_target_"]
    return {COMPONENT: "=".join(names[target]), COMPONENT_VERSION: version_of(*names[target])} | written


def _settings_of(node: Any) -> Any:
    """A configuration without the classes that it names, which cannot be instantiated."""
    if isinstance(node, list):
        return [_settings_of(one) for one in node]
    if not isinstance(node, dict):
        return node
    return {key: _settings_of(value) for key, value in node.items() if key != "_target_"}


def to_targets(node: Any, origin: object, trust: Collection[str] = ()) -> Any:
    """The configuration that `to_names` wrote, ready to be instantiated; arguments and errors as of `record_config`."""
    if isinstance(node, list):
        return [to_targets(one, origin, trust) for one in node]
    if not isinstance(node, dict):
        return node
    if COMPONENT not in node:
        if "_target_" in node:
            check_target(node["_target_"], node, origin, trust)
        return {key: to_targets(value, origin, trust) for key, value in node.items()}
    group, equals, name = str(node[COMPONENT]).partition("=")
    if not equals or "_target_" in node:
        raise MetaTTTError(f"{origin} names a component as {node[COMPONENT]!r}: it must be group=name, and alone")
    if (group, name) not in REGISTERED:
        load_components()
        load_components((HOMES[group],) if group in HOMES else ())
    if (group, name) not in REGISTERED:
        raise MetaTTTError(
            f"{origin} was made with {group}={name}, which no installed package registers: install the package that "
            "has it"
        )
    target, now, version = REGISTERED[group, name], version_of(group, name), node.get(COMPONENT_VERSION)
    if version != now or type(version) is not int:
        raise MetaTTTError(
            f"{origin} has version {version!s:.20} of {group}={name}, and here is version {now}: use the release that "
            "wrote it"
        )
    parameters = {key: value for key, value in node.items() if key not in (COMPONENT, COMPONENT_VERSION)}
    check_keys(f"{group}={name}", target, parameters, origin)
    return {"_target_": target} | to_targets(parameters, origin, trust)


# -- what a file may say -----------------------------------------------------------------------------------------------


def modules(given: Any) -> tuple[str, ...]:
    """The modules that `trust=` names: none, one, or a list."""
    names = [] if given is None else [given] if isinstance(given, str) else list(given)
    if not all(isinstance(name, str) and re.fullmatch(r"\w+(\.\w+)*", name) for name in names):
        raise MetaTTTError(f"trust={given} is not allowed: give the module of your class, trust=my_package.my_module")
    return tuple(names)


def leaves(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The values of nested dictionaries and lists, each with the keys that lead to it."""
    if isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from leaves(value, (*path, key))
    else:
        yield path, node


def is_computed(value: Any) -> bool:
    """Whether a value is a text in which something is filled in other than another value."""
    return isinstance(value, str) and "${" in REFERENCE.sub("", value)


def check_target(target: Any, node: Mapping[str, Any], origin: object, trust: Collection[str]) -> None:
    """Raises an error for a class that is not registered, unless it is torch's own module, one of `LIBRARIES`, or
    trusted."""
    if not isinstance(target, str):
        raise MetaTTTError(f"{origin} names a class as {str(target)[:60]!r}: it must be a string")
    if any(target == one or target.startswith(f"{one}.") for one in trust):
        return
    if target not in LIBRARIES and not _is_module(target):
        raise Untrusted(
            f"{origin} names {target[:200]!r}, which is no component of an installed package; a file may not say what "
            "is run"
        )
    if target in LIBRARIES:
        check_keys(target, target, node, origin)


class Untrusted(MetaTTTError):
    """A configuration names a class that is neither registered nor trusted."""


def own_modules(config: Any) -> list[str]:
    """The modules that `trust=` must name for a configuration as it is written: of classes that no name stands for."""
    targets = [str(value) for path, value in leaves(config) if path and path[-1] == "_target_"]
    return sorted({one.rpartition(".")[0] or one for one in targets if one not in LIBRARIES and not _is_module(one)})


def as_override(needed: Sequence[str]) -> str:
    """`trust=` with these modules."""
    return f"trust={needed[0]}" if len(needed) == 1 else f"trust=[{','.join(needed)}]"


def _is_module(target: str) -> bool:
    """Whether it is a module of torch by its own name."""
    if not re.fullmatch(r"torch\.nn\.[A-Z]\w*", target):
        return False
    from torch import nn

    found = getattr(nn, target.rpartition(".")[2], None)
    return isinstance(found, type) and issubclass(found, nn.Module)


def check_keys(what: str, target: str, node: Mapping[str, Any], origin: object) -> None:
    """Raises an error for keys that the constructor does not have or that mean something to Hydra, and for values of
    other types.

    Args:
        what: the component, for messages: `learner=mlp`.
        target: dotted path of its class.
        node: its parameters.
        origin: the file.
    """
    for key, value in node.items():
        if key.startswith("_") and key != "_target_" and not (key == "_partial_" and isinstance(value, bool)):
            raise MetaTTTError(f"{origin} has the key `{key}` for {what}, which a file may not set")
        if target in PARAMETERS and not key.startswith("_") and key not in PARAMETERS[target]:
            raise MetaTTTError(
                f"{origin} has `{key}` for {what}, which has no such parameter: it is of another version, or damaged"
            )
    if target in SCHEMAS:
        plain = {key: value for key, value in node.items() if not key.startswith("_") and not isinstance(value, dict)}
        try:
            OmegaConf.merge(OmegaConf.structured(SCHEMAS[target]), plain)
        except OmegaConfBaseException as error:
            raise MetaTTTError(f"{origin}: {what}: {str(error).splitlines()[0]}") from error


def check_amounts(config: Any, origin: object, tensors: int) -> None:
    """Raises an error for numbers of processes, rounds and blocks that no run of ours asks for; of blocks, more than
    the `tensors` that are beside the configuration."""
    for path, value in leaves(OmegaConf.to_container(config) if OmegaConf.is_config(config) else config):
        counted = path and path[-1] in COUNTS and not set(OF_MODEL).isdisjoint(path[:-1])
        limit = tensors if counted else MOST.get(path[-1]) if path else None
        if type(value) is int and limit is not None and value > limit:
            raise MetaTTTError(
                f"{origin} has {'.'.join(map(str, path))}={value:,}, and {limit:,} at most is possible: it is damaged"
            )
