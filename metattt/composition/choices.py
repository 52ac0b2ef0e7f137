"""What can be chosen by name: the YAML files of a configuration group, ours and those of other packages."""

from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

from metattt.composition.announced import announced


def choices(group: str, folders: Sequence[Traversable] = ()) -> dict[str, str]:
    """Name -> one-line description (the first comment of its file), of the files of `files_of`."""
    return {name: _description(file) for name, file in files_of(group, folders).items()}


@cache
def groups(job: str | None = None) -> dict[str, frozenset[str]]:
    """The groups that a job chooses from, with their choices; without a job, those of all jobs."""
    if job is None:
        jobs = [file.name for file in files("metattt.configs").iterdir() if file.name.endswith(".yaml")]
        return {group: names for name in jobs for group, names in groups(name.removesuffix(".yaml")).items()}
    return {group: frozenset(files_of(group)) for group in defaults(job)}


@cache
def defaults(job: str) -> dict[str, str]:
    """Group -> choice, of each entry in the defaults list of a job, through the configs that it includes."""
    found: dict[str, str] = {}
    for entry in parse_yaml(_text(job)).get("defaults", []):
        if isinstance(entry, dict):
            found |= {str(key).split()[-1].partition("@")[0].strip("/"): str(value) for key, value in entry.items()}
        elif entry != "_self_":
            found |= defaults(entry)
    return found


@cache
def keys_of(job: str) -> set[str]:
    """The keys of a job's file and of those that it includes: their own, also inside of one, and a part for every
    group."""
    content = parse_yaml(_text(job))
    included = [entry for entry in content.pop("defaults", []) if isinstance(entry, str) and entry != "_self_"]
    inside = (f"{key}.{name}" for key, value in content.items() if isinstance(value, dict) for name in value)
    return {*content, *inside, *(group.partition("/")[0] for group in defaults(job))}.union(*map(keys_of, included))


def _text(job: str) -> str:
    return (files("metattt.configs") / f"{job}.yaml").read_text(encoding="utf-8")


def parse_yaml(text: str) -> dict[str, Any]:
    """The content of a file of configurations."""
    import yaml  # not before: the list of commands needs none

    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)) or {}


def leaves(node: Any, prefix: str = "") -> dict[str, Any]:
    """Every value of a nested configuration, by dotted key behind a prefix."""
    if not isinstance(node, dict) or not node:
        return {prefix: node}
    items = ((f"{prefix}.{key}" if prefix else str(key), value) for key, value in node.items())
    return {leaf: value for key, child in items for leaf, value in leaves(child, key).items()}


def choice_of_schema(group: str, schema: str) -> str | None:
    """The choice of a group whose keys are those of a registered class: of its name, or else a job's default, or
    any."""
    mark = f"/schema/{group}/{schema}@"
    using = [name for name, file in files_of(group).items() if mark in file.read_text(encoding="utf-8")]
    return next((name for name in (schema, defaults("build").get(group), *sorted(using)) if name in using), None)


def files_of(group: str, folders: Sequence[Traversable] = ()) -> dict[str, Traversable]:
    """Name -> file of the choices of a group: ours, those of other packages, and those in `folders`."""
    found: dict[str, Traversable] = {}
    for folder in (place / group for place in _places(folders)):
        for file in folder.iterdir() if folder.is_dir() else ():
            if file.name.endswith(".yaml"):
                found.setdefault(file.name.removesuffix(".yaml"), file)
    return found


def file_of(path: str, folders: Sequence[Traversable] = ()) -> Traversable | None:
    """The file `<path>.yaml`, of ours or else of others; None: there is none."""
    candidates = (folder.joinpath(*f"{path}.yaml".split("/")) for folder in _places(folders))
    return next((file for file in candidates if file.is_file()), None)


def _places(folders: Sequence[Traversable]) -> Iterator[Traversable]:
    """Where configurations are: first ours, then those of installed packages, which are not imported for it."""
    yield files("metattt.configs")
    for entry in announced("metattt.configs"):
        top, *inner = entry.value.split(".")
        spec = find_spec(top)  # None: a package that is gone is reported when something is run
        yield from (Path(place, *inner) for place in ((spec and spec.submodule_search_locations) or ()))
    yield from folders


def comments(file: Traversable) -> list[str]:
    """The lines that a file begins with, as long as they are comments."""
    return list(takewhile(lambda line: line.startswith("#"), file.read_text(encoding="utf-8").splitlines()))


def _description(file: Traversable) -> str:
    said = (line.lstrip("# ") for line in comments(file) if not line.startswith(("# @package", "# family:")))
    return next(said, "")
