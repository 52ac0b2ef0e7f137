"""The registry: a constructor's signature becomes the schema of its configuration.

`@register("learner", "mlp")` on a class reads the signature of `__init__` and stores a dataclass in Hydra's ConfigStore
as `schema/learner/mlp`. A YAML file that starts with `defaults: [/schema/learner/mlp@_here_]` then has exactly the
constructor's keys, types and defaults: a misspelt key or a wrong type is refused when the configuration is composed.

| annotation                                   | type in the schema                                    |
|----------------------------------------------|-------------------------------------------------------|
| int, float, bool, str, and unions of these   | the same                                              |
| X or None                                    | optional X                                            |
| Literal["a", "b"]                            | str; the choices are kept in `PARAMETERS` and checked |
| list, tuple or Sequence of the above scalars | list                                                  |
| anything else                                | Any                                                   |
"""

import collections.abc
import dataclasses
import importlib
import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Optional, TypeVar, Union

from metattt.errors import MetaTTTError
from metattt.setting import members, resolved

C = TypeVar("C", bound=type)

SCALARS: dict[str, Any] = {kind.__name__: kind for kind in (int, float, bool, str)}


class Field(NamedTuple):
    """One parameter of a constructor, as plain data.

    Attributes:
        name: of the parameter.
        kinds: names of the types in the schema: scalars, `list[int]`, `Any`, and `None` where it may be null.
        default: its value where none is given; `???` for a required one.
        allowed: the values that its `Literal` annotation allows, or () if it is not a Literal.
    """

    name: str
    kinds: tuple[str, ...]
    default: Any
    allowed: tuple[Any, ...] = ()


PARAMETERS: dict[str, dict[str, tuple[Any, ...]]] = {}
"""`_target_` -> parameter -> the values that its `Literal` annotation allows, or () if it is not a Literal."""

SCHEMAS: dict[str, type] = {}
"""`_target_` -> the dataclass that a configuration of it must fit."""

REGISTERED: dict[tuple[str, str], str] = {}
"""(group, name) -> `_target_` of the class registered under it."""

Upgrade = Callable[[dict[str, Any], int], dict[str, Any]]

VERSIONS: dict[tuple[str, str], tuple[int, Upgrade | None]] = {}
"""(group, name) -> the version of its parameters, and what brings those of an earlier version up to it."""


def register(group: str, name: str, version: int = 1, upgrade: Upgrade | None = None) -> Callable[[C], C]:
    """Class decorator that makes the class available to configurations as `schema/<group>/<name>`.

    Args:
        group: configuration group: `learner`, `task`, `optimizer`, or one of your own.
        name: name of the schema in that group, e.g. `linear`. Checkpoints name the class by group and name, never by
            its module: it may be moved and renamed, but keeps these two.
        version: of the parameters, kept in every checkpoint; raise it when a parameter changes its name or its meaning.
        upgrade: from the parameters of an earlier version, and that version, to those of this one. Without it,
            checkpoints of earlier versions are refused.

    Returns:
        A decorator that returns the class unchanged.

    Raises:
        MetaTTTError: if another class has the name already, or if the constructor takes `*args` or `**kwargs`,
            which would swallow a misspelt key.
    """

    def decorate(cls: C) -> C:
        target = f"{cls.__module__}.{cls.__qualname__}"
        _check_free(group, name, target)
        store(group, name, target, fields_of(cls))
        VERSIONS[group, name] = version, upgrade
        return cls

    return decorate


def fields_of(cls: type) -> list[Field]:
    """The parameters of a class's constructor.

    Raises:
        MetaTTTError: it takes `*args` or `**kwargs`.
    """
    init = cls.__init__  # type: ignore[misc]
    names = getattr(inspect.unwrap(init), "__globals__", {})
    found = []
    for one in list(inspect.signature(init).parameters.values())[1:]:
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            raise MetaTTTError(
                f"{cls.__module__}.{cls.__qualname__}: `*{one.name}` would swallow a misspelt key; name every parameter of the "
                "constructor"
            )
        hint = resolved(one.annotation, names)
        default = "???" if one.default is one.empty else one.default  # omegaconf.MISSING
        found.append(Field(one.name, _kinds(hint), default, literals(hint)))
    return found


def version_of(group: str, name: str) -> tuple[int, Upgrade | None]:
    """The version of a registered class's parameters, and what brings those of an earlier version up to it."""
    if (group, name) not in VERSIONS:  # known without an import
        importlib.import_module(REGISTERED[group, name].rpartition(".")[0])
    return VERSIONS.get((group, name), (1, None))


def store(group: str, name: str, target: str, fields: Sequence[Field]) -> None:
    """What `register` does, for a class that need not be imported.

    Args:
        group, name: as for `register`.
        target: dotted path of the class.
        fields: the parameters of its constructor.

    Raises:
        MetaTTTError: another class has the name.
    """
    from hydra.core.config_store import ConfigStore  # not before: --help reads fields without Hydra

    _check_free(group, name, target)
    REGISTERED[group, name], PARAMETERS[target] = target, {one.name: one.allowed for one in fields}
    module, _, cls = target.rpartition(".")
    typed = [(one.name, _type(one.kinds), _default(one.default)) for one in fields]
    SCHEMAS[target] = node = dataclasses.make_dataclass(
        cls, [("_target_", str, dataclasses.field(default=target)), *typed]
    )
    ConfigStore.instance().store(group=f"schema/{group}", name=name, node=node, provider=module)


def _check_free(group: str, name: str, target: str) -> None:
    owner = REGISTERED.get((group, name), target)
    if owner != target:  # the same class again is a notebook cell or module that was run twice: the newer one wins
        raise MetaTTTError(f"{group}={name} is already registered by {owner}: give {target} another name")


def literals(hint: Any) -> tuple[Any, ...]:
    """The values that a Literal annotation allows (None included if it is optional), or ()."""
    values: list[Any] = []
    for member in members(hint):
        if typing.get_origin(member) is Literal:
            values += typing.get_args(member)
        elif member is type(None):
            values.append(None)
        else:
            return ()
    return tuple(values) if any(value is not None for value in values) else ()


def _kinds(hint: Any) -> tuple[str, ...]:
    """The names of the types of one annotation; Any where OmegaConf has none."""
    kinds: list[str] = []
    for member in members(hint):
        origin = typing.get_origin(member)
        if origin is Literal:
            kinds += [type(value).__name__ for value in typing.get_args(member)]
        elif origin in (list, tuple, collections.abc.Sequence):
            elements = {kind for one in typing.get_args(member) if one is not Ellipsis for kind in _kinds(one)}
            kinds.append(
                f"list[{elements.pop()}]" if len(elements) == 1 and elements <= SCALARS.keys() else "list[Any]"
            )
        else:
            name = "None" if member is type(None) else getattr(member, "__name__", "Any")
            kinds.append(name if name == "None" or SCALARS.get(name) is member else "Any")
    return tuple(dict.fromkeys(kinds))


def _type(kinds: Sequence[str]) -> Any:
    """The OmegaConf type for the names of `_kinds`."""
    lists = {f"list[{name}]": list[kind] for name, kind in (SCALARS | {"Any": Any}).items()}  # type: ignore[valid-type]
    known = [(SCALARS | lists).get(kind, Any) for kind in kinds if kind != "None"]
    if Any in known or (len(known) > 1 and not all(kind in SCALARS.values() for kind in known)):
        return Any
    kind = known[0] if len(known) == 1 else Union[tuple(known)]  # noqa: UP007
    return Optional[kind] if "None" in kinds else kind  # noqa: UP045


def _default(default: Any) -> Any:
    """A dataclass default: a fresh container for a mutable one."""
    if isinstance(default, list | tuple):
        return dataclasses.field(default_factory=lambda: list(default))
    return (
        dataclasses.field(default_factory=lambda: dict(default))
        if isinstance(default, dict)
        else dataclasses.field(default=default)
    )
