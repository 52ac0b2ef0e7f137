"""The settings that a component declares: what its constructor takes, and what values are allowed.

A class body says `momentum_init: float = setting(default=0.9, fixed=True)`. From that line come the parameter of the
constructor, the attribute, the check of its value and its key in configurations. This module imports no torch: the
settings of a class are also read from its source alone.
"""

import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Union

from metattt.errors import check_choice, check_flag, check_integer, check_number

REQUIRED = inspect.Parameter.empty
VALUES = (int, float, str, list, tuple, dict)  # defaults by a setting's alias; of another kind, the name is a method's


@dataclass(frozen=True)
class Setting:
    """One declared setting; the fields are explained in `setting`."""

    default: Any = REQUIRED
    init: bool = True
    fixed: bool = False
    kw_only: bool = False
    always: bool = False
    alias: str | None = None
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    advice: str = ""
    among: Iterable[str] | None = None
    null: Any = None
    annotation: Any = Any

    def check(self, key: str, value: object) -> None:
        """Raises an error for a value that the annotation or the range does not allow. Types of torch and containers
        are not checked.

        Args:
            key: the override that sets it, such as `task.loss`.

        Raises:
            MetaTTTError: naming the value, and what is allowed.
        """
        kinds = set(members(self.annotation))
        choices = [one for kind in kinds if typing.get_origin(kind) is Literal for one in typing.get_args(kind)]
        kinds = {kind for kind in kinds if typing.get_origin(kind) is not Literal}
        if (type(None) in kinds and value in (None, self.null)) or (choices and value in choices):
            return
        kinds -= {type(None)}
        ends = ("least", "most", "above", "below")
        bounds = {name: bound for name in ends if (bound := getattr(self, name)) is not None}
        if self.among is not None or (choices and not kinds):
            check_choice(key, value, choices if self.among is None else self.among)
        elif kinds == {bool}:
            check_flag(key, value, choices, self.advice)
        elif kinds == {int}:
            check_integer(key, value, advice=self.advice, **bounds)
        elif kinds == {float}:
            check_number(key, value, advice=self.advice, **bounds)


def setting(**options: Any) -> Any:
    """Declares a setting in the body of a component; its annotation says the type.

    Args:
        default: the default value; without one the setting is required. A subclass changes the default by a plain
            attribute of that name or of its alias.
        init: the constructor takes it. False: a subclass sets it, or `setup` does.
        fixed: used once, by `setup`: assigning it later would do nothing, and raises an error.
        kw_only: the constructor takes it after the settings that subclasses add. It takes it by position, too, but
            type checkers can only be told that it is a keyword.
        always: a keyword of every subclass, also of one whose own `__init__` does not name it.
        alias: what the constructor and configurations call it, where that is the name of a method.
        least, most: the range of a number, with its ends. Integers are at least 1 where nothing else is said.
        above, below: ends that are not in the range, in their places.
        advice: added to the end of an error message about the number; or, for words beside true and false, the meaning
            of true.
        among: the allowed strings, if the annotation does not list them.
        null: what None, or null in configurations, is kept as; it allows None beside the annotation.
    """
    return Setting(**options)


def declared(
    inherited: Mapping[str, Setting],
    body: Mapping[str, Any],
    hint: Callable[[str], Any],
    takes: Sequence[str] | None = None,
) -> dict[str, Setting]:
    """The settings of a class by attribute, in order.

    Args:
        inherited: those of its base class.
        body: what the class body sets, by name.
        hint: the annotation of a name in it, as a type.
        takes: the inherited settings that the constructor of the class takes, beside those of every subclass; they come
            first, in this order, and so do its own that are named. None: all.
    """
    found, called = dict(inherited), {one.alias: name for name, one in inherited.items() if one.alias}
    if takes is not None:
        takes = [called.get(name, name) for name in takes]
        found = {name: replace(one, init=one.init and (one.always or name in takes)) for name, one in inherited.items()}
    for name, value in body.items():
        if isinstance(value, Setting):
            if name in found and not found[name].init:
                found.pop(name)  # its place is among the settings of this class
            kind = hint(name) if value.null is None else hint(name) | None
            found[name] = replace(value, annotation=kind)
        elif (name := called.get(name, name) if isinstance(value, VALUES) else name) in found:
            found[name] = replace(found[name], default=value)
    return {name: found[name] for name in (*(takes or ()), *found)}


def parameters(settings: Mapping[str, Setting]) -> list[inspect.Parameter]:
    """Those of the constructor that takes these settings, without `self`."""
    taken = [(name, one) for name, one in settings.items() if one.init]
    taken.sort(key=lambda pair: (pair[1].always, pair[1].kw_only, pair[1].default is not REQUIRED))
    kinds = {True: inspect.Parameter.KEYWORD_ONLY, False: inspect.Parameter.POSITIONAL_OR_KEYWORD}
    return [
        inspect.Parameter(one.alias or name, kinds[one.always], default=one.default, annotation=one.annotation)
        for name, one in taken
    ]


def with_always(own: list[inspect.Parameter], settings: Mapping[str, Setting]) -> list[inspect.Parameter]:
    """The parameters of an `__init__` that is written out, and the settings that every subclass takes besides."""
    named = {one.name for one in own}
    added = [one for one in parameters(settings) if one.kind is one.KEYWORD_ONLY and one.name not in named]
    return sorted([*own, *added], key=lambda one: one.kind)


def members(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the hint alone."""
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)


def resolved(annotation: Any, names: Mapping[str, Any]) -> Any:
    """An annotation as a type, also if it is a string; Any if it is imported under TYPE_CHECKING only.

    Args:
        names: those of the module.
    """
    try:
        return eval(annotation, dict(names)) if isinstance(annotation, str) else annotation
    except NameError:
        return Any
