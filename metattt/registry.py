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
from typing import Any, Literal, Optional, TypeVar, Union

from metattt.errors import MetaTTTError
from metattt.setting import members, resolved

C = TypeVar("C", bound=type)

SCALARS = (int, float, bool, str)

PARAMETERS: dict[str, dict[str, tuple[Any, ...]]] = {}
"""`_target_` -> parameter -> the values that its `Literal` annotation allows, or () if it is not a Literal."""

SCHEMAS: dict[str, type] = {}
"""`_target_` -> the dataclass that a configuration of it must fit."""

REGISTERED: dict[tuple[str, str], str] = {}
"""(group, name) -> `_target_` of the class registered under it."""

VERSIONS: dict[tuple[str, str], int] = {}
"""(group, name) -> the version of its parameters."""


def register(group: str, name: str, version: int = 1) -> Callable[[C], C]:
    """Class decorator that makes the class available to configurations as `schema/<group>/<name>`.

    Args:
        group: configuration group: `learner`, `task`, `optimizer`, or one of your own.
        name: name of the schema in that group, e.g. `linear`. Checkpoints name the class by group and name, never by
            its module: it may be moved and renamed, but keeps these two.
        version: of the parameters, kept in every checkpoint; raise it when a parameter changes its name or its meaning:
            checkpoints of other versions are refused.

    Returns:
        A decorator that returns the class unchanged.

    Raises:
        MetaTTTError: if another class has the name already, if the constructor takes `*args` or `**kwargs`,
            which would swallow a misspelt key, or if a default is no plain data, as a member of an enum.
    """

    def decorate(cls: C) -> C:
        init = cls.__init__  # type: ignore[misc]
        names = getattr(inspect.unwrap(init), "__globals__", {})
        given = list(inspect.signature(init).parameters.values())[1:]
        given = [one.replace(annotation=resolved(one.annotation, names)) for one in given]
        store(group, name, f"{cls.__module__}.{cls.__qualname__}", given)
        VERSIONS[group, name] = version
        return cls

    return decorate


def version_of(group: str, name: str) -> int:
    """The version of a registered class's parameters."""
    if (group, name) not in VERSIONS:  # known from its source alone
        importlib.import_module(REGISTERED[group, name].rpartition(".")[0])
    return VERSIONS.get((group, name), 1)


def store(group: str, name: str, target: str, parameters: Sequence[inspect.Parameter]) -> None:
    """As `register`, for a class that is not imported yet.

    Args:
        group, name: as for `register`.
        target: dotted path of the class.
        parameters: those of its constructor, without `self`; annotations are types, not strings.

    Raises:
        MetaTTTError: as `register`.
    """
    owner = REGISTERED.get((group, name), target)
    if owner != target:  # the same class again: a notebook cell or module was run twice; the newer one is used
        raise MetaTTTError(f"{group}={name} is already registered by {owner}: give {target} another name")
    fields: list[tuple[str, Any, Any]] = [("_target_", str, dataclasses.field(default=target))]
    allowed: dict[str, tuple[Any, ...]] = {}
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise MetaTTTError(
                f"{target}: `*{parameter.name}` would swallow a misspelt key; name every parameter of the constructor"
            )
        allowed[parameter.name] = literals(parameter.annotation)
        if not _is_plain(parameter.default):
            raise MetaTTTError(
                f"{target}: the default of {parameter.name} is {parameter.default!r:.60}, which no configuration or "
                "checkpoint can hold: give a text, a number, true or false, None, or a list or dictionary of these"
            )
        fields.append((parameter.name, _field_type(parameter.annotation), _field_default(parameter.default)))
    REGISTERED[group, name], PARAMETERS[target] = target, allowed  # a class that is refused leaves nothing behind
    from hydra.core.config_store import ConfigStore  # not before: --help reads signatures without Hydra

    module, _, cls = target.rpartition(".")
    node = dataclasses.make_dataclass(cls, fields)
    SCHEMAS[target] = node
    ConfigStore.instance().store(group=f"schema/{group}", name=name, node=node, provider=module)


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


def _field_type(hint: Any) -> Any:
    """The OmegaConf type for one annotation; Any where OmegaConf has none."""
    kinds: list[Any] = []
    for member in members(hint):
        origin = typing.get_origin(member)
        if origin is Literal:
            kinds += [type(value) for value in typing.get_args(member)]
        elif origin in (list, tuple, collections.abc.Sequence):
            elements = {_field_type(e) for e in typing.get_args(member) if e is not Ellipsis}
            element = elements.pop() if len(elements) == 1 else Any
            kinds.append(list[element])  # type: ignore[valid-type]
        else:
            kinds.append(member)
    optional = type(None) in kinds
    kinds = list(dict.fromkeys(kind for kind in kinds if kind is not type(None)))
    if len(kinds) == 1 and (kinds[0] in SCALARS or typing.get_origin(kinds[0]) is list):
        kind = kinds[0]
    elif len(kinds) > 1 and all(kind in SCALARS for kind in kinds):
        kind = Union[tuple(kinds)]  # noqa: UP007
    else:
        return Any
    return Optional[kind] if optional else kind  # noqa: UP045


def _is_plain(default: Any) -> bool:
    if isinstance(default, (list, tuple, dict)):
        return all(map(_is_plain, default.values() if isinstance(default, dict) else default))
    return isinstance(default, (*SCALARS, type(None))) or default is inspect.Parameter.empty


def _field_default(default: Any) -> Any:
    """A dataclass default: MISSING for a required parameter, a fresh container for a mutable one."""
    if default is inspect.Parameter.empty:
        return dataclasses.field(default="???")  # omegaconf.MISSING
    if isinstance(default, (list, tuple, dict)):
        return dataclasses.field(default_factory=lambda: dict(default) if isinstance(default, dict) else list(default))
    return dataclasses.field(default=default)
