"""Classes whose constructor is made from settings that they declare: layers, tasks, learners, optimizers, data."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, dataclass_transform

from torch import nn

from metattt.errors import MetaTTTError, did_you_mean
from metattt.setting import REQUIRED, VALUES, Setting, declared, parameters, resolved, setting, with_always

SELF = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
PLAIN = [object.__init__, nn.Module.__init__]  # torch.compile puts another one into the place of the latter


@dataclass_transform(field_specifiers=(setting,))
class WithSettings:
    """What has a constructor that takes settings.

    A class declares them in its body, each as `name: type = setting(default=...)`; the constructor is made from these
    lines, unless the class writes an `__init__` of its own. A plain attribute of a subclass with the name of a setting
    is its default there. `class Mine(Momentum, takes=("read", "base_lr"))` has a constructor that takes these two and
    what Mine declares itself; the other settings have their values on the class.
    """

    _group: ClassVar[str] = ""  #: of configurations: `layer`, `task`, `learner`, `optimizer` or `data`
    #: settings that are used once: assigned later, they would do nothing
    fixed: tuple[str, ...] = ()
    _settings: ClassVar[dict[str, Setting]] = {}  #: by attribute, those of base classes first

    def __init_subclass__(cls, takes: Sequence[str] | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        own, module = dict(vars(cls)), sys.modules.get(cls.__module__)  # no module: code that was given to `exec`
        inherited: dict[str, Setting] = {}
        for base in reversed(cls.__bases__):
            inherited |= getattr(base, "_settings", {})
        annotations = inspect.get_annotations(cls)
        cls._settings = declared(
            inherited, own, lambda name: resolved(annotations.get(name, Any), vars(module) if module else {}), takes
        )
        for name, one in cls._settings.items():
            if one.alias in own and one.default is own[one.alias] and isinstance(one.default, VALUES):
                delattr(cls, one.alias)  # what has that name in a base class stays
                setattr(cls, name, one.default)
        mine = {name: one for name, one in own.items() if isinstance(one, Setting)}
        for name, one in mine.items():
            if one.default is REQUIRED:
                delattr(cls, name)
            else:
                setattr(cls, name, one.default)
            if one.fixed:
                cls.fixed = (*cls.fixed, name, *([one.alias] if one.alias else []))
        made = cls.__init__ in (*PLAIN, nn.Module.__init__) or hasattr(cls.__init__, "made_of_settings")
        if mine and not made and "__init__" not in own:
            raise MetaTTTError(
                f"{cls.__name__} declares {', '.join(mine)}, and inherits an __init__ that does not take them: "
                "write one that does, or declare its parameters as settings"
            )
        cls.__init__ = _constructor(cls) if made else _written(cls, cls.__init__)  # type: ignore[method-assign]

    def configure(self) -> None:
        """Sets the attributes that follow from the settings. The constructor calls it before it checks them."""

    def check_settings(self) -> None:
        """Checks the settings, alone and together. Called by the constructor, and again if a setting of a rule is
        assigned.

        Raises:
            MetaTTTError: naming the value, and what is allowed.
        """
        for name, one in self._settings.items():
            if (value := getattr(self, name, REQUIRED)) is not REQUIRED:
                one.check(self._key(one.alias or name), value)

    def refuse_late(self, name: str, value: object) -> None:
        """Raises an error for another value of a setting that was used when the layer was built."""
        if name in self.fixed and not callable(value) and value != getattr(self, name, None):
            raise MetaTTTError(
                f"{type(self).__name__}.{name} = {value!r} comes too late, it was used when the layer was built: "
                f"build a new layer with {name}={value}"
            )

    def create_modules(self) -> None:
        """Creates the modules and parameters that depend on the settings alone. The settings have been checked
        before."""

    def _key(self, name: str) -> str:
        """The override that sets a setting."""
        return f"{self._group}.{name}"


def _constructor(cls: type[WithSettings]) -> Callable[..., None]:
    """The `__init__` of a class whose body declares its settings."""
    attributes = {one.alias or name: name for name, one in cls._settings.items() if one.init}
    for name in attributes.values():  # of several bases, the first that sets it
        if hasattr(cls, name) and getattr(cls, name) is not cls._settings[name].default:
            cls._settings[name] = replace(cls._settings[name], default=getattr(cls, name))
    signature = inspect.Signature([SELF, *parameters(cls._settings)])

    def __init__(self: WithSettings, *args: Any, **kwargs: Any) -> None:
        try:
            given = signature.bind(self, *args, **kwargs).arguments
        except TypeError as error:
            unknown = next((key for key in kwargs if key not in attributes), "")
            hint = did_you_mean(unknown, attributes)
            if unknown in vars(cls).keys() - cls._settings.keys():  # a plain attribute of this class
                hint = f" Declare it as a setting: `{unknown}: <type> = setting(default=...)` (metattt.setting)"
            raise TypeError(f"{cls.__qualname__}.__init__() {error}{hint and '.'}{hint}") from None
        super(WithSettings, self).__init__()
        for key, name in attributes.items():
            setattr(self, name, given[key] if key in given else getattr(type(self), name))
        self.configure()
        self.check_settings()
        self.create_modules()

    __init__.__annotations__ = {one.name: one.annotation for one in signature.parameters.values() if one is not SELF}
    __init__.__signature__, __init__.made_of_settings = signature, True  # type: ignore[attr-defined]
    return __init__


def _written(cls: type[WithSettings], init: Callable[..., None]) -> Callable[..., None]:
    """An `__init__` that a class writes itself; it takes the settings of every subclass, whatever it names."""
    own = inspect.signature(init)
    every = with_always(list(own.parameters.values()), cls._settings)
    added = {one.name: one.annotation for one in every if one.name not in own.parameters}
    if not added:
        return init

    @functools.wraps(init)
    def __init__(self: WithSettings, *args: Any, **kwargs: Any) -> None:
        given = {name: kwargs.pop(name) for name in added.keys() & kwargs.keys()}
        init(self, *args, **kwargs)
        for name, value in given.items():
            setattr(self, name, value)

    __init__.__annotations__ = {**init.__annotations__, **added}
    __init__.__signature__ = own.replace(parameters=every)  # type: ignore[attr-defined]
    return __init__


class Declared(WithSettings, nn.Module):
    """A module of torch whose constructor takes settings."""


Declared.__init__ = PLAIN[1]  # type: ignore[method-assign]  # a subclass may write one, and call this
