"""Which classes can be composed: those registered in our packages, and in the installed packages of others.

What a schema needs of ours stands in `signatures.json`, so that a mistake in an override, or `--help`, does not wait for
torch. `python -m metattt.composition.components` writes it anew; of a module that has changed since it was written, the
import tells.
"""

import ast
import importlib
import importlib.util
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

from metattt.composition.announced import announced
from metattt.errors import MetaTTTError
from metattt.registry import PARAMETERS, REGISTERED, Field, fields_of, register, store

COMPONENTS = ("metattt.learners", "metattt.tasks", "metattt.optimizers", "metattt.mixers")
"""Packages of ours with classes that register themselves."""

TRAINER = "lightning.Trainer"

JOB_COMPONENTS = {
    "train": ("metattt.models", "metattt.data", "metattt.training"),
    "language_model": ("metattt.models",),
    "bench": ("metattt.bench",),
    "reproduce": ("metattt.reproduce",),
}
"""The same for one job only."""

UNDECORATED = {
    "metattt.layer": ("layer", "ttt_layer", "TTTLayer"),
    "metattt.combined": ("layer", "combined", "Combined"),
}
"""The composer, which names nothing of configurations: module -> group, name and class."""

SIGNATURES = Path(__file__).with_name("signatures.json")


def load_components(packages: Iterable[str] = COMPONENTS) -> None:
    """Make the schema of every component known. Those of others are imported.

    Raises:
        MetaTTTError: if a package that announces components cannot be imported.
    """
    for module in UNDECORATED:
        _load(module)
    _read_trainer()
    for package in packages:
        for module in registering(package):
            _load(module)
    for entry in announced("metattt.components"):
        try:
            importlib.import_module(entry.value)
        except Exception as error:  # whatever a module of others raises when imported
            owner = entry.dist.name if entry.dist else entry.name
            raise MetaTTTError(
                f"{entry.value}, which the installed package {owner} announces, cannot be imported: {error}\n"
                f"Repair the package, or remove it: pip uninstall {owner}"
            ) from error


@cache
def registering(package: str) -> tuple[str, ...]:
    """The modules of a package of ours that register classes."""
    folder = find_source(package).parent
    files = [file for file in sorted(folder.rglob("*.py")) if b"@register(" in file.read_bytes()]
    inside = (".".join(file.relative_to(folder).with_suffix("").parts) for file in files)
    return tuple(f"{package}.{name}".removesuffix(".__init__") for name in inside)


@cache
def recorded() -> dict[str, dict[tuple[str, str, str], list[Field]]]:
    """Module -> (group, name, target) -> the constructor's parameters, of the modules that are as they were recorded."""
    found = {}
    for module, one in (json.loads(SIGNATURES.read_text(encoding="utf-8")) if SIGNATURES.is_file() else {}).items():
        if all(_checksum(source) == known for source, known in one["sources"].items()):
            found[module] = {tuple(key.split()): _fields(rows) for key, rows in one["classes"].items()}
    return found  # type: ignore[return-value]


@cache
def _load(module: str) -> None:
    """Stores the schemas of a module of ours."""
    if module in recorded():
        for key, fields in recorded()[module].items():
            store(*key, fields)
        return
    imported = importlib.import_module(module)
    if module in UNDECORATED:
        group, name, cls = UNDECORATED[module]
        register(group, name)(getattr(imported, cls))


@cache
def _read_trainer() -> None:
    """The arguments of Lightning's Trainer, from its source; where it is not installed a new one needs Hydra's `+`."""
    try:
        tree = ast.parse(find_source("lightning.pytorch.trainer.trainer").read_text(encoding="utf-8"))
    except OSError:
        return
    trainer = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Trainer")
    init = next(node for node in trainer.body if isinstance(node, ast.FunctionDef) and node.name == "__init__").args
    PARAMETERS[TRAINER] = {one.arg: () for one in [*init.args, *init.kwonlyargs][1:]}


def find_source(module: str) -> Path:
    """The file of a module, found without importing the packages that it is in.

    Raises:
        FileNotFoundError: there is none.
    """
    top, *inner = module.split(".")
    spec = importlib.util.find_spec(top)
    for root in (spec.submodule_search_locations or [str(Path(spec.origin or "").with_suffix(""))]) if spec else ():
        path = Path(root, *inner)
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                return file
    raise FileNotFoundError(module)


@cache
def _checksum(module: str) -> int:
    try:
        return crc32(find_source(module).read_bytes())
    except FileNotFoundError:
        return 0


def _fields(rows: list[list[Any]]) -> list[Field]:
    return [Field(name, tuple(kinds), default, tuple(allowed)) for name, kinds, default, allowed in rows]


def _record() -> None:
    """Writes what an import of all our modules registers; a class with a default that is no plain value is left out."""
    packages = dict.fromkeys((*COMPONENTS, *(name for names in JOB_COMPONENTS.values() for name in names)))
    for module in (*UNDECORATED, *(one for package in packages for one in registering(package))):
        importlib.import_module(module)
    for module, (group, name, cls) in UNDECORATED.items():
        register(group, name)(getattr(importlib.import_module(module), cls))
    found: dict[str, dict[str, Any]] = {}
    for (group, name), target in sorted(REGISTERED.items()):
        module, _, qualified = target.rpartition(".")
        cls = getattr(importlib.import_module(module), qualified)
        sources = {one.__module__ for one in cls.__mro__ if one.__module__.startswith("metattt.")}
        entry = found.setdefault(module, {"sources": {}, "classes": {}})
        entry["sources"] |= {one: _checksum(one) for one in sorted(sources | {"metattt.registry", "metattt.setting"})}
        entry["classes"][f"{group} {name} {target}"] = [list(field) for field in fields_of(cls)]
    lines = [f"{json.dumps(module)}: {json.dumps(entry)}" for module, entry in sorted(found.items())]
    SIGNATURES.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    _record()
