"""What tasks, learners and inner optimizers have in common: made from declared settings, built once, for one layer, and
printed by their settings."""

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

    What it was made with (numbers, texts and None) is kept by name for `print(layer)`. What a layer finds out about its
    components when it is built (which form is exact, which kernel computes them) rests on their settings: one that is
    assigned later raises `changes`, and the layer asks again.
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
        """Around `setup`: the part belongs to a layer after it, and is as it was before if it raises.

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
        if self.belongs and name in self.fixed and not callable(value) and value != getattr(self, name, None):
            raise MetaTTTError(
                f"{type(self).__name__}.{name} = {value!r} comes too late, it was used when the layer was built: "
                "build a new "
                f"layer with {name}={value}"
            )
        kind = type(self)
        if not self.belongs and (name in self._reserved or _shadows(kind, name, value)):
            raise MetaTTTError(_taken(kind, name))
        if isinstance(value, nn.Module | nn.Parameter) and "_modules" not in self.__dict__:
            raise MetaTTTError(f"{kind.__name__}.__init__ sets {name!r} before super().__init__(): call that first")
        super().__setattr__(name, value)
        # Both modes are looked at, and what is found holds for all values of parameters.
        if self.belongs and name != "training" and not isinstance(value, (Tensor, nn.Module)):
            self.__dict__["changes"] = self.changes + 1

    def extra_repr(self) -> str:
        """The settings that differ from the constructor's defaults, as one would write them."""
        defaults = inspect.signature(type(self).__init__).parameters
        always = {name: getattr(self, name) for name, one in self._settings.items() if one.always}
        made = {name: value for name, value in self._made_with.items() if name not in always} | always
        changed = {name: value for name, value in made.items() if not _same(value, defaults[name].default)}
        return ", ".join(f"{name}={value!r}" for name, value in changed.items())

    def equations(self) -> list[str]:
        """What the part computes, an equation a line, for `metattt layers layer=<name>`; a part without symbols of its
        own says its name, its settings and what its docstring begins with.

        The symbols: x_t is a token, k_t, v_t, q_t (and p_t, b_t) are its views, ℓ_t(W) is its loss, f(x; W) the
        learner, η_t, α_t, β_t, κ_t are the gates, a_t a decay for every channel, G_t the gradient, and W_t the weights
        after the token (W_j: after mini-batch j). An optimizer that says nothing of W gets the recurrence of its gates.
        """
        summary = " ".join((type(self).__doc__ or "").strip().partition("\n\n")[0].split())
        settings = self.extra_repr()
        return [type(self).__name__ + (f"({settings})" if settings else "") + (f": {summary}" if summary else "")]

    def __copy__(self) -> Any:
        """A part that shares the tensors, and whose own setup is none of the original's business."""
        copied = object.__new__(type(self))
        copied.__dict__.update(_snapshot(self))
        return copied


def _base(kind: type) -> type:
    """Task, Learner or InnerOptimizer, of whichever `kind` is one."""
    return kind.__mro__[kind.__mro__.index(Component) - 1]


def _shadows(kind: type, name: str, value: Any) -> bool:
    """Whether an attribute would take the place of a method or property of the base class (a function may)."""
    there = getattr(kind, name, None) if any(name in vars(one) for one in (_base(kind), Component, Declared)) else None
    unset = isinstance(there, property) and there.fset is None
    return unset or (callable(there) and (isinstance(value, nn.Module) or not callable(value)))


def _taken(kind: type, name: str) -> str:
    base = _base(kind).__name__
    return f"{kind.__name__} sets an attribute called {name!r}, which {base} has for its own use: choose another name"


def says(part: Component, method: str = "equations", about: Iterable[str] = DESCRIBED) -> bool:
    """Whether what a class says of its parts in `method` holds for this one: no subclass of it has changed one of the
    methods that it is about."""
    kinds = type(part).__mro__
    owner = next(kind for kind in kinds if method in vars(kind))
    below = {name for kind in kinds[: kinds.index(owner)] for name in vars(kind)}
    left_open: frozenset[str] = getattr(owner, "__abstractmethods__", frozenset())
    return not below.intersection(about) - left_open


@contextmanager
def unchanged_on_error(*parts: nn.Module) -> Iterator[None]:
    """Around what builds `parts`: if it raises, they and the modules in them are as they were before.

    Raises:
        MetaTTTError: a part whose constructor has left out that of its base class.
    """
    for part in parts:
        if "_modules" not in vars(part):
            raise MetaTTTError(f"{type(part).__name__}.__init__ does not call super().__init__(): do that first in it")
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
    """The arguments that can be shown; none where they do not fit, which the constructor itself will say."""
    try:
        given = inspect.signature(cls.__init__).bind(None, *args, **kwargs).arguments  # type: ignore[misc]
    except TypeError:
        return {}
    shown = (int, float, str, type(None))
    return {name: value for name, value in list(given.items())[1:] if isinstance(value, shown)}


def _same(value: Any, default: Any) -> bool:
    return value is default or (isinstance(default, int | float | str) and value == default)
