"""Constructors read from their source: `@register` classes become known without importing them, and torch with them.

A mistake in an override then shows in a second. Only what a schema needs is read: the names, annotations and defaults
of a constructor's parameters, or of the settings that it is made from (`metattt.setting`). An annotation that names a
class of ours or of a library stands for that class without its attributes; what cannot be read so raises `Unreadable`,
and the module is imported instead.
"""

import ast
import builtins
import collections.abc
import importlib.util
import inspect
import re
import typing
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from metattt import setting
from metattt.setting import Setting, declared, members, parameters, with_always

PLAIN_MODULES = {"typing": typing, "collections.abc": collections.abc, "metattt.setting": setting}
BASES = ("metattt.declared", "Declared"), ("metattt.declared", "WithSettings")


class Unreadable(Exception):
    """A constructor that only an import can tell."""


class Registered(NamedTuple):
    """A class with the decorator `@register(group, name)`, and its constructor's parameters without `self`."""

    group: str
    name: str
    target: str
    parameters: list[inspect.Parameter]


def registering(package: str) -> Iterator[tuple[str, str]]:
    """The modules of a package that register classes, or the module of that name, each with its source.

    Raises:
        Unreadable: there is no source.
    """
    source = find_source(package)
    whole = source.name == "__init__.py"
    for file in sorted(source.parent.rglob("*.py")) if whole else [source]:
        text = file.read_text(encoding="utf-8")
        if "@register(" in text:
            inside = file.relative_to(source.parent).with_suffix("").parts if whole else ()
            yield ".".join((package, *inside)).removesuffix(".__init__"), text


def registered(module: str) -> Iterator[Registered]:
    """The classes that a module registers.

    Raises:
        Unreadable: for want of source, or of a constructor that can be read.
    """
    for node in _tree(module).body:
        for call in node.decorator_list if isinstance(node, ast.ClassDef) else ():
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "register":
                assert isinstance(node, ast.ClassDef)
                given = dict(zip(("group", "name"), call.args, strict=False))
                given |= {str(keyword.arg): keyword.value for keyword in call.keywords}
                group, name = (_value(module, given[key]) for key in ("group", "name"))
                if not isinstance(group, str) or not isinstance(name, str):
                    raise Unreadable(f"{module}: the arguments of @register")
                yield Registered(group, name, f"{module}.{node.name}", constructor(module, node.name))


def constructor(module: str, name: str) -> list[inspect.Parameter]:
    """The parameters of a class's constructor without `self`, its own or the one that it inherits.

    Raises:
        Unreadable: as `registered`.
    """
    settings, (home, node) = _settings(module, name), _class(module, name)
    while (home, node.name) not in BASES:
        for one in node.body:
            if isinstance(one, ast.FunctionDef) and one.name == "__init__":
                return with_always(_parameters(home, one.args), settings)
        base = next((base.id for base in node.bases if isinstance(base, ast.Name)), None)
        if base is None:
            raise Unreadable(f"{module}.{name}")
        home, node = _class(home, base)
    return parameters(settings)


def explained(module: str, name: str) -> dict[str, str]:
    """What the docstrings of a class and of its bases say of each argument: the first sentence.

    Raises:
        Unreadable: as `registered`.
    """
    home, node = _class(module, name)
    found: dict[str, str] = {}
    for base in reversed(node.bases):
        if isinstance(base, ast.Name):
            with suppress(Unreadable):  # a class of a library
                found |= explained(home, base.id)
    said = re.split(r"\n(?:Attributes|Returns|Raises):\n", ast.get_docstring(node) or "")[0]
    for names, text in re.findall(r"^ {4,8}(\w+(?:, \w+)*): (.+(?:\n {5,}(?!\w+: ).+)*)", said, re.MULTILINE):
        sentence = " ".join(text.split()).partition(". ")[0].removesuffix(".")
        if not sentence.startswith("see `"):
            found |= dict.fromkeys(names.split(", "), sentence)
    return found


@cache
def ranges(target: str) -> dict[str, Setting]:
    """What a class declares of the values that its constructor takes, by key; nothing where that is not read."""
    module, _, name = target.rpartition(".")
    try:
        found = _settings(module, name)
    except Unreadable:
        return {}
    return {
        one.alias or attribute: one
        for attribute, one in found.items()
        if one.init and not (_opaque(one.among) or any(map(_opaque, members(one.annotation))))
    }


def _class(module: str, name: str) -> tuple[str, ast.ClassDef]:
    """The module that defines what is called `name` in another, and its definition."""
    body = _bodies(module).get(name)
    if isinstance(body, ast.ImportFrom):
        return _class(*_origin(body, name))
    if not isinstance(body, ast.ClassDef):
        raise Unreadable(f"{module}.{name}")
    return module, body


def _settings(module: str, name: str) -> dict[str, Setting]:
    """The settings that a class declares and inherits, if it is a component."""
    home, node = _class(module, name)
    inherited: dict[str, Setting] = {}
    for base in reversed(node.bases):
        if isinstance(base, ast.Name):
            with suppress(Unreadable):  # a class of a library
                inherited |= _settings(home, base.id)
    names = inherited.keys() | {one.alias for one in inherited.values()}
    body: dict[str, Any] = {}
    hints: dict[str, ast.expr] = {}
    for one in node.body:
        if not isinstance(one, ast.Assign | ast.AnnAssign) or one.value is None:
            continue
        target = one.target if isinstance(one, ast.AnnAssign) else one.targets[0]
        is_setting = isinstance(one.value, ast.Call) and ast.unparse(one.value.func) == "setting"
        if isinstance(target, ast.Name) and (is_setting or target.id in names):
            value = body[target.id] = _value(home, one.value)
            if _opaque(value.default if isinstance(value, Setting) else value):
                raise Unreadable(f"{home}: the default of {target.id}")
            if isinstance(one, ast.AnnAssign):
                hints[target.id] = one.annotation
    takes = next((_value(home, one.value) for one in node.keywords if one.arg == "takes"), None)
    return declared(inherited, body, lambda name: _value(home, hints[name]) if name in hints else Any, takes)


def _parameters(module: str, given: ast.arguments) -> list[inspect.Parameter]:
    """The parameters of a method without `self`: those of a function that takes the same and does nothing."""
    hints = {one.arg: one.annotation for one in ast.walk(given) if isinstance(one, ast.arg)}
    found = list(inspect.signature(_value(module, ast.Lambda(given, ast.Constant(None)))).parameters.values())[1:]
    for one in found:
        if _opaque(one.default):
            raise Unreadable(f"{module}: the default of {one.name}")
    return [one.replace(annotation=Any if (hint := hints[one.name]) is None else _value(module, hint)) for one in found]


class _Opaque(type):
    """A name that is not followed. It has any attribute, and takes part in `X | None` as the class does that it stands
    for."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __getitem__(cls, _: Any) -> type:
        return cls


class Elsewhere(metaclass=_Opaque):
    """Stands for every class and value that is not read."""


def _opaque(value: Any) -> bool:
    return value is Elsewhere or (isinstance(value, tuple | list) and any(map(_opaque, value)))


class _Names(dict[str, Any]):
    """The names of a module, each found out when it is asked for."""

    def __init__(self, module: str):
        super().__init__()
        self.module = module

    def __missing__(self, name: str) -> Any:
        body = _bodies(self.module).get(name)
        if body is None and hasattr(builtins, name):
            return getattr(builtins, name)
        if isinstance(body, ast.Assign | ast.AnnAssign) and body.value is not None:
            return _value(self.module, body.value)
        if isinstance(body, ast.ImportFrom):
            home, original = _origin(body, name)
            if home in PLAIN_MODULES:
                return getattr(PLAIN_MODULES[home], original)
            if home.partition(".")[0] == self.module.partition(".")[0]:
                return _Names(home)[original]
        return Elsewhere


def _value(module: str, expression: ast.expr) -> Any:
    """An annotation or a default."""
    if isinstance(expression, ast.Constant):  # without a compiler: most of them
        return expression.value
    code = compile(ast.fix_missing_locations(ast.Expression(expression)), module, "eval")
    try:
        return eval(code, {"__builtins__": {}}, _Names(module))
    except Unreadable:
        raise
    except Exception as error:  # whatever an expression raises when a class stands for all others
        raise Unreadable(f"{module}: {ast.unparse(expression)}") from error


def _origin(node: ast.ImportFrom, name: str) -> tuple[str, str]:
    """The module from which `name` is imported, and what it is called there."""
    if node.level or node.module is None:
        raise Unreadable(f"a relative import of {name}")
    return node.module, next(alias.name for alias in node.names if (alias.asname or alias.name) == name)


@cache
def _tree(module: str) -> ast.Module:
    try:
        return ast.parse(find_source(module).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        raise Unreadable(module) from error


def find_source(module: str) -> Path:
    """The file of a module, found without importing the packages that it is in.

    Raises:
        Unreadable: there is none.
    """
    top, *inner = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec and spec.origin and not inner:
        return Path(spec.origin)
    for root in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(root, *inner)
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                return file
    raise Unreadable(module)


@cache
def _bodies(module: str) -> dict[str, ast.stmt]:
    """What defines each name at the top level of a module, `if TYPE_CHECKING:` included."""
    found: dict[str, ast.stmt] = {}
    nodes = list(_tree(module).body)
    for node in nodes:
        if isinstance(node, ast.If):
            nodes += node.body
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.partition(".")[0]: node for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: node for target in targets if isinstance(target, ast.Name)}
    return found
