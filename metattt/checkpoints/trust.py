"""What a configuration in a file may say: plain data that names registered components, and no more.

A file comes from anywhere. What it names is looked up among registered components and a few classes of libraries, with
the keys of their constructors, before any of it is imported, called or allocated. A class of a user's own needs his
word on the command line, `trust=<module>`; a file cannot give it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from metattt.errors import MetaTTTError
from metattt.registry import PARAMETERS, SCHEMAS

REFERENCE = re.compile(r"\$\{\w+(\.\w+)*\}")  # to another value of the configuration; nothing that is computed
LIBRARIES = (
    "lightning.Trainer",
    *(f"lightning.pytorch.callbacks.{name}" for name in ("ModelCheckpoint", "EarlyStopping")),
    *(
        f"lightning.pytorch.loggers.{name}"
        for name in ("CSVLogger", "TensorBoardLogger", "WandbLogger", "MLFlowLogger")
    ),
)
"""Classes of libraries that configurations of ours name; torch's own modules, of which a learner may be made,
beside."""

MOST = {"num_workers": 256, "devices": 1024, "num_nodes": 2**16, "steps": 2**14, "prefetch_factor": 1024}
"""Settings that start processes or go round loops: the most that a file may ask for."""

COUNTS, OF_MODEL = ("num_layers", "depth"), ("model", "layer", "learner", "task", "optimizer")
"""Settings that make a number of tensors (at most as many as the file has), and where they stand."""


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


def check_plain(config: Any, origin: object) -> None:
    """Refuses values that are computed.

    Raises:
        MetaTTTError: naming the place in the file.
    """
    for path, value in leaves(config):
        if is_computed(value):
            where = ".".join(map(str, path))
            raise MetaTTTError(
                f"{origin} has {value[:80]!r} as `{where}`: only ${{key}} is filled in, nothing is computed"
            )


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
    """Refuses keys that the constructor does not have or that mean something to Hydra, and values of other types.

    Args:
        what: the component, for messages: `learner=mlp`.
        target: dotted path of its class.
        node: its parameters.
        origin: the file.

    Raises:
        MetaTTTError: naming the key.
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
    """Refuses numbers of processes, rounds and blocks that no run of ours asks for. Shapes are compared with the
    weights before any is allocated (`metattt.checkpoints.trained.check_shapes`).

    Args:
        config: plain, or of OmegaConf.
        origin: the file.
        tensors: how many are beside the configuration.

    Raises:
        MetaTTTError: naming the key and its value.
    """
    for path, value in leaves(OmegaConf.to_container(config) if OmegaConf.is_config(config) else config):
        counted = path and path[-1] in COUNTS and not set(OF_MODEL).isdisjoint(path[:-1])
        limit = tensors if counted else MOST.get(path[-1]) if path else None
        if type(value) is int and limit is not None and value > limit:
            raise MetaTTTError(
                f"{origin} has {'.'.join(map(str, path))}={value:,}, and {limit:,} at most is possible: it is damaged"
            )


def _is_module(target: str) -> bool:
    """Whether it is a module of torch by its own name."""
    if not re.fullmatch(r"torch\.nn\.[A-Z]\w*", target):
        return False
    from torch import nn

    found = getattr(nn, target.rpartition(".")[2], None)
    return isinstance(found, type) and issubclass(found, nn.Module)
