"""What a configuration in a file may say: plain data that names registered components, and no more.

A file comes from anywhere. What it names is looked up among registered components and a few classes of libraries, with
the keys and types of their constructors, before any of it is imported, called or allocated. A class of a user's own
needs his word on the command line, `trust=<module>`; a file cannot give it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from metattt.errors import MetaTTTError
from metattt.registry import PARAMETERS

DEEPEST, MOST_VALUES, LONGEST_TEXT = 32, 20_000, 100_000
REFERENCE = re.compile(r"\$\{\w+(\.\w+)*\}")  # to another value of the configuration; nothing that is computed

LIBRARIES = (
    "lightning.Trainer", "lightning.pytorch.callbacks.ModelCheckpoint", "lightning.pytorch.callbacks.EarlyStopping",
    *(f"lightning.pytorch.loggers.{name}" for name in ("CSVLogger", "TensorBoardLogger", "WandbLogger", "MLFlowLogger")),
)  # fmt: skip
"""Classes of libraries that configurations of ours name."""

MODULE = re.compile(r"torch\.nn\.[A-Z]\w*")
"""Modules of torch, which any learner may be made of."""

OF_HYDRA = {"_partial_": bool, "_args_": list}
"""Keys with a meaning of their own, and their type."""

MOST = {"num_workers": 256, "devices": 1024, "num_nodes": 2**16, "steps": 2**14, "prefetch_factor": 1024}
"""Settings that start processes or go round loops: the most that a file may ask for."""

COUNTS = ("num_layers", "depth")
"""Settings that make a number of tensors: at most as many as the file has."""

OF_MODEL = ("model", "layer", "learner", "task", "optimizer")


def modules(given: Any) -> tuple[str, ...]:
    """The modules that `trust=` names: none, one, or a list.

    Raises:
        MetaTTTError: what is no dotted name.
    """
    names = [] if given is None else [given] if isinstance(given, str) else list(given)
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(r"\w+(\.\w+)*", name):
            raise MetaTTTError(
                f"trust={given} is not allowed: give the module of your class, trust=my_package.my_module"
            )
    return tuple(names)


def check_plain(config: Any, origin: object) -> None:
    """Refuses what no configuration of ours is: too deep, too much, keys that are no names, values that are computed.

    Raises:
        MetaTTTError: naming the place in the file.
    """
    left = [MOST_VALUES]

    def walk(node: Any, path: str, depth: int) -> None:
        left[0] -= 1
        if depth > DEEPEST or left[0] < 0:
            raise MetaTTTError(f"{origin} has a configuration that is nested too deeply or too long: it is damaged")
        if isinstance(node, dict):
            for key, value in node.items():
                if not isinstance(key, str) or not re.fullmatch(r"[\w./-]{1,200}", key):
                    raise MetaTTTError(
                        f"{origin} has a configuration with the key {str(key)[:60]!r} in `{path}`: keys are names"
                    )
                walk(value, f"{path}.{key}".lstrip("."), depth + 1)
        elif isinstance(node, list):
            for index, value in enumerate(node):
                walk(value, f"{path}[{index}]", depth + 1)
        elif isinstance(node, str):
            if len(node) > LONGEST_TEXT:
                raise MetaTTTError(f"{origin} has a text of {len(node):,} characters as `{path}`: it is damaged")
            if "${" in REFERENCE.sub("", node):
                raise MetaTTTError(
                    f"{origin} has {node[:80]!r} as `{path}`: only ${{key}} is filled in, nothing is computed"
                )
        elif not isinstance(node, bool | int | float | type(None)):
            raise MetaTTTError(f"{origin} has {type(node).__name__} as `{path}`: a configuration is plain data")
        elif type(node) is int and abs(node) >= 2**63:
            raise MetaTTTError(f"{origin} has {str(node)[:40]}… as `{path}`: it is too large")

    walk(config, "", 0)


def check_target(target: Any, node: Mapping[str, Any], origin: object, trust: Collection[str]) -> None:
    """Refuses a class that is not registered, unless it is torch's own module, one of `LIBRARIES`, or trusted.

    Raises:
        MetaTTTError: naming the class and the word that allows it.
    """
    if not isinstance(target, str):
        raise MetaTTTError(f"{origin} names a class as {str(target)[:60]!r}: it must be a text")
    if any(target == one or target.startswith(f"{one}.") for one in trust):
        return
    if target not in LIBRARIES and not _is_module(target):
        module = target.rpartition(".")[0] or target
        raise MetaTTTError(
            f"{origin} names {target[:200]!r}, which is no registered component; a file may not say what is run.\n"
            f"If you trust that code, and know that the file means it: add trust={module[:200]}"
        )
    if target in LIBRARIES:
        check_keys(target, target, node, origin)


def check_keys(what: str, target: str, node: Mapping[str, Any], origin: object) -> None:
    """Refuses keys that the constructor does not have, and values that are not among its choices or not of its types.

    Args:
        what: the component, for messages: `learner=mlp`.
        target: dotted path of its class.
        node: its parameters.
        origin: the file.

    Raises:
        MetaTTTError: naming the key.
    """
    allowed = PARAMETERS.get(target)
    for key, value in node.items():
        if key in OF_HYDRA and isinstance(value, OF_HYDRA[key]) and key != "_args_":
            continue
        if key.startswith("_") and key != "_target_":
            raise MetaTTTError(f"{origin} has the key `{key}` for {what}, which a file may not set")
        if allowed is None or key == "_target_":
            continue
        if key not in allowed:
            raise MetaTTTError(
                f"{origin} has `{key}` for {what}, which has no such parameter: it is of another version, or damaged"
            )
        if allowed[key] and value not in allowed[key] and not _is_reference(value):
            raise MetaTTTError(
                f"{origin} has {key}={str(value)[:60]} for {what}: choose from {', '.join(map(str, allowed[key]))}"
            )
    _check_types(what, node, origin)


def _check_types(what: str, node: Mapping[str, Any], origin: object) -> None:
    group, equals, name = what.partition("=")
    store = ConfigStore.instance()
    if not equals or not store.repo.get("schema", {}).get(group, {}).get(f"{name}.yaml"):
        return
    plain = {key: value for key, value in node.items() if not key.startswith("_") and not isinstance(value, dict)}
    try:
        OmegaConf.merge(store.load(f"schema/{group}/{name}.yaml").node, plain)
    except OmegaConfBaseException as error:
        raise MetaTTTError(f"{origin}: {what}: {str(error).splitlines()[0]}") from error


def check_amounts(config: Any, origin: object, tensors: int) -> None:
    """Refuses numbers of processes, rounds and blocks that no run of ours asks for. Shapes are compared with the weights
    before any is allocated (`metattt.checkpoints.trained.check_shapes`).

    Args:
        config: plain, or of OmegaConf.
        origin: the file.
        tensors: how many are beside the configuration.

    Raises:
        MetaTTTError: naming the key and its value.
    """

    def walk(node: Any, path: str, in_model: bool) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                limit = MOST.get(key, tensors if in_model and key in COUNTS else None)
                if type(value) is int and limit is not None and value > limit:
                    raise MetaTTTError(
                        f"{origin} has {path}{key}={value:,}, and {limit:,} at most is possible: it is damaged"
                    )
                walk(value, f"{path}{key}.", in_model or key in OF_MODEL)
        elif isinstance(node, list):
            for value in node:
                walk(value, path, in_model)

    walk(OmegaConf.to_container(config) if OmegaConf.is_config(config) else config, "", False)


def _is_module(target: str) -> bool:
    """Whether it is a module of torch by its own name."""
    if not MODULE.fullmatch(target):
        return False
    from torch import nn

    found = getattr(nn, target.rpartition(".")[2], None)
    return isinstance(found, type) and issubclass(found, nn.Module)


def _is_reference(value: Any) -> bool:
    return isinstance(value, str) and bool(REFERENCE.fullmatch(value))
