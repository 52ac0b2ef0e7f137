"""Configurations on disk name components as `group=name` with a version, not by where their classes stand.

In memory a node of a component has `_target_`, a dotted path, which is what Hydra instantiates. On disk the same node
has `_component_: learner=mlp` and `_version_: 1` in its place: a class may be moved or renamed, and old runs still find
it. What a file names is looked up among registered components alone. Classes that are not ours to move (Lightning's, or
a user's own that no installed package announces) keep their `_target_`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from metattt.checkpoints.trust import check_keys, check_target
from metattt.composition.announced import announced
from metattt.composition.components import load_components
from metattt.errors import MetaTTTError
from metattt.registry import REGISTERED, version_of

COMPONENT, COMPONENT_VERSION = "_component_", "_version_"
HOMES = {
    "model": "metattt.models", "data": "metattt.data", "training": "metattt.training", "callback": "metattt.training",
    "strategy": "metattt.training", "logger": "metattt.training",
}  # fmt: skip
"""Group -> our package whose modules register it, where that is not one of the parts of a layer."""

OF_TRAINING = ("training", "callback", "logger", "strategy")
"""Groups that a model is trained with, and that nothing else needs."""


def to_names(node: Any) -> Any:
    """A plain configuration (dictionaries, lists, values) as it is written to disk."""
    return _named(node, {target: key for key, target in REGISTERED.items() if _is_announced(target)})


def _named(node: Any, names: dict[str, tuple[str, str]]) -> Any:
    if isinstance(node, list):
        return [_named(one, names) for one in node]
    if not isinstance(node, dict):
        return node
    written = {key: _named(value, names) for key, value in node.items()}
    target = node.get("_target_")
    if not isinstance(target, str) or target not in names:
        return written
    del written["_target_"]
    return {COMPONENT: "=".join(names[target]), COMPONENT_VERSION: version_of(*names[target])[0]} | written


def to_targets(node: Any, origin: object, skip: Collection[str] = (), trust: Collection[str] = ()) -> Any:
    """The configuration that `to_names` wrote, ready to be instantiated.

    Args:
        node: a plain configuration.
        origin: the file it comes from, for messages.
        skip: groups whose components stay names: they are not going to be instantiated.
        trust: modules of the user's whose classes the file may name.

    Raises:
        MetaTTTError: a component that nothing registers, or of a version that cannot be read; a class that is no
            component and not trusted; a key or a value that its constructor does not take.
    """
    if isinstance(node, list):
        return [to_targets(one, origin, skip, trust) for one in node]
    if not isinstance(node, dict):
        return node
    if COMPONENT not in node:
        if "_target_" in node:
            check_target(node["_target_"], node, origin, trust)
        return {key: to_targets(value, origin, skip, trust) for key, value in node.items()}
    group, equals, name = str(node[COMPONENT]).partition("=")
    if not equals or "_target_" in node:
        raise MetaTTTError(f"{origin} names a component as {node[COMPONENT]!r}: it must be group=name, and alone")
    if group in skip:
        return node
    if (group, name) not in REGISTERED:
        load_components()
    if (group, name) not in REGISTERED and group in HOMES:
        load_components((HOMES[group],))
    if (group, name) not in REGISTERED:
        raise MetaTTTError(
            f"{origin} was made with {group}={name}, which nothing here registers: install the package that does"
        )
    target, (now, upgrade), version = REGISTERED[group, name], version_of(group, name), node.get(COMPONENT_VERSION)
    parameters = {key: value for key, value in node.items() if key not in (COMPONENT, COMPONENT_VERSION)}
    if version != now or type(version) is not int:
        newer = type(version) is int and version > now
        if type(version) is not int or newer or upgrade is None:
            remedy = "update the package that registers it" if newer else "nothing brings it up to that"
            raise MetaTTTError(f"{origin} has version {version} of {group}={name}, and here is version {now}: {remedy}")
        parameters = upgrade(parameters, version)
    check_keys(f"{group}={name}", target, parameters, origin)
    return {"_target_": target} | to_targets(parameters, origin, skip, trust)


def _is_announced(target: str) -> bool:
    """Whether another process will find a registered class by its name: it is ours, or of a package that announces its
    components."""
    owner = target.partition(".")[0]
    return owner == "metattt" or any(
        entry.value.partition(".")[0] == owner for entry in announced("metattt.components")
    )
