"""The base of tasks, learners and inner optimizers. A component is made from declared settings and built once, for one
layer."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import Tensor, nn

from metattt.declared import Declared
from metattt.errors import MetaTTTError

DESCRIBED = (
    *("views", "loss", "forward", "predict", "wrap", "scan"),
    *("gates", "gates_at", "prepare", "token_steps", "coefficients", "current", "commit", "move"),
)  # methods that equations are about
REGISTRIES = ("_parameters", "_buffers", "_modules")  # of a torch module, each a dictionary of its own


class Component(Declared):
    """A module that a layer builds: its constructor takes settings, its `setup` creates parameters, once.

    Its settings (numbers, strings and None) are kept by name for `print(layer)`. A layer plans its computation (exact
    form, kernels) from its components. If a setting or a module is assigned later, `changes` increases, and the
    layer plans again.
    """

    belongs = False  #: a layer has claimed this component
    changes = 0  #: settings assigned since then
    #: attributes that only the base class sets
    _reserved: ClassVar[frozenset[str]] = frozenset({"belongs", "changes", "_made_with"})
    _made_with: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        for name in set().union(*(getattr(base, "_reserved", ()) for base in cls.__bases__)) & vars(cls).keys():
            raise MetaTTTError(_taken(cls, name))
        super().__init_subclass__(**options)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        component = super().__new__(cls)
        component.__dict__["_made_with"] = _shown(cls, args, kwargs)
        return component

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """A context around `setup`: afterwards the part belongs to a layer. If `setup` raises, the part is restored.

        Raises:
            MetaTTTError: the part already belongs to a layer.
        """
        if self.belongs:
            raise MetaTTTError(
                f"this {type(self).__name__} already belongs to a layer: give every layer one of its own"
            )
        with unchanged_on_error(self):
            yield
            self.__dict__["belongs"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        if self.belongs:
            self.refuse_late(name, value)
        kind = type(self)
        if (name in self._reserved and not self.belongs) or _shadows(kind, name, value):
            raise MetaTTTError(_taken(kind, name))
        if value is None and name in self._settings:
            value = self._settings[name].null
        same = isinstance(value, nn.Module) and self.__dict__.get("_modules", {}).get(name) is value
        super().__setattr__(name, value)
        # the plan holds for training and evaluation mode, and for all values of parameters
        if self.belongs and name != "training" and not (same or isinstance(value, Tensor)):
            self.__dict__["changes"] = self.changes + 1

    def extra_repr(self) -> str:
        """The settings that differ from the constructor's defaults, as arguments in Python."""
        defaults = inspect.signature(type(self).__init__).parameters
        always = {name: getattr(self, name) for name, one in self._settings.items() if one.always}
        made = {name: value for name, value in self._made_with.items() if name not in always} | always
        changed = {
            name: value
            for name, value in made.items()
            if name not in defaults or not _same(value, defaults[name].default)
        }
        return ", ".join(f"{name}={value!r}" for name, value in changed.items())

    def equations(self) -> list[str]:
        """The equations of the part, one per line, for `metattt layers layer=<name>`. By default: its name, its
        settings and the first paragraph of its docstring.

        The symbols: x_t is a token, k_t, v_t, q_t (and p_t, b_t) are its views, ℓ_t(W) is its loss, f(x; W) the
        learner, η_t, α_t, β_t, κ_t are the gates, a_t a decay for every channel, G_t the gradient, and W_t the weights
        after the token (W_j: after mini-batch j). If the lines of an optimizer do not mention W, the recurrence of its
        gates is added.
        """
        summary = " ".join((type(self).__doc__ or "").strip().partition("\n\n")[0].split())
        settings = self.extra_repr()
        return [type(self).__name__ + (f"({settings})" if settings else "") + (f": {summary}" if summary else "")]

    def __copy__(self) -> Any:
        """A shallow copy: it shares the tensors, and can be set up independently."""
        copied = object.__new__(type(self))
        copied.__dict__.update(_snapshot(self))
        return copied


def assigned(module: nn.Module) -> list[Any]:
    """The attributes and submodules of a module, without tensors and its mode."""
    values = {**vars(module), **module._modules}
    return [value for name, value in values.items() if name != "training" and not isinstance(value, Tensor)]


def _base(kind: type) -> type:
    """The base class of `kind`: Task, Learner or InnerOptimizer."""
    return kind.__mro__[kind.__mro__.index(Component) - 1]


def _shadows(kind: type, name: str, value: Any) -> bool:
    """Whether an attribute would hide a method or property of the base class. A function may replace a method."""
    there = getattr(kind, name, None) if any(name in vars(one) for one in (_base(kind), Component, Declared)) else None
    unset = isinstance(there, property) and there.fset is None
    return unset or (callable(there) and (isinstance(value, nn.Module) or not callable(value)))


def _taken(kind: type, name: str) -> str:
    base = _base(kind).__name__
    return f"{kind.__name__} sets an attribute called {name!r}, which {base} has for its own use: choose another name"


def says(part: nn.Module, method: str = "equations", about: Iterable[str] = DESCRIBED) -> bool:
    """Whether the equations in `method` hold for this object: no subclass has overridden a method that they
    describe, and no function has been assigned in the place of one."""
    kinds = type(part).__mro__
    owner = next((kind for kind in kinds if method in vars(kind)), kinds[0])  # `method` may be assigned to the object
    below = {name for kind in kinds[: kinds.index(owner)] for name in vars(kind)}
    below |= {name for name, value in vars(part).items() if callable(value)}
    left_open: frozenset[str] = getattr(owner, "__abstractmethods__", frozenset())
    return not below.intersection(about) - left_open


@contextmanager
def unchanged_on_error(*parts: nn.Module) -> Iterator[None]:
    """A context around code that builds `parts`: if it raises, the parts and their modules are restored."""
    before = [(module, _snapshot(module)) for part in parts for module in part.modules()]
    try:
        yield
    except BaseException:
        for module, attributes in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)
        raise


def _snapshot(module: nn.Module) -> dict[str, Any]:
    return {name: dict(value) if name in REGISTRIES else value for name, value in module.__dict__.items()}


def _shown(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that can be shown. Empty if they do not fit the signature: then the constructor raises the
    error."""
    try:
        given = inspect.signature(cls.__init__).bind(None, *args, **kwargs).arguments  # type: ignore[misc]
    except TypeError:
        return {}
    shown = (int, float, str, type(None))
    given = dict(list(given.items())[1:]) | kwargs  # also those that `**kwargs` passes on
    return {name: value for name, value in given.items() if isinstance(value, shown)}


def _same(value: Any, default: Any) -> bool:
    return value is default or (isinstance(default, int | float | str) and value == default)
