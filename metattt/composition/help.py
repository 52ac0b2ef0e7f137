"""What `metattt <command> --help` prints: the groups with their choices, and the keys of what is chosen.

Neither torch nor Hydra is imported for it, nor a package of others: YAML is merged as their defaults lists say,
constructors are read from their source. `--cfg` shows what Hydra itself makes of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.resources.abc import Traversable
from inspect import Parameter
from pathlib import Path
from typing import Any

from metattt.composition.aliases import NOT_SET_THERE
from metattt.composition.announced import announced
from metattt.composition.choices import choices, defaults, file_of, groups, leaves, parse_yaml
from metattt.composition.components import COMPONENTS, JOB_COMPONENTS, LAYERS
from metattt.composition.signatures import Unreadable, constructor, explained, registered, registering
from metattt.errors import MetaTTTError, shown
from metattt.registry import literals

CHOOSING = ("experiment", "model", "layer")
"""Groups whose files choose in other groups; the first one that does so counts."""

WIDTH = 36


def help_of(job: str, summary: str, overrides: Sequence[str]) -> str:
    """The text.

    Raises:
        MetaTTTError: an override that chooses what there is not.
    """
    folders = _folders(overrides)
    file = file_of(job)
    assert file is not None
    text = file.read_text(encoding="utf-8").splitlines()
    lines = [f"usage: metattt {job} [<key>=<value> ...]", "", summary]
    lines += [line[2:] for line in text[:1] if line[:1] == "#"]
    known = {group: names for group in groups(job) if (names := choices(group, folders))}
    lines += ["", "What can be chosen, <group>=<name>:"] if known else []
    for group, names in known.items():
        lines += _table(group, sorted(names.items()), max(map(len, names)))
    found = _Composed(job, folders, _chosen(overrides, known, job))
    keys = {group: rows for group in known if (rows := list(found.rows(group)))}
    others = f"(of another choice: metattt {job} <group>=<name> --help)"
    lines += ["", f"Keys of what is chosen, with their values {others}:"] if keys else []
    for group, rows in keys.items():
        lines += _table(f"{group}={found.chosen.get(group)}", rows, WIDTH)
    lines += ["", f"Keys and defaults (configs/{job}.yaml):", "", *(f"  {line}".rstrip() for line in text)]
    return "\n".join(lines)


def _table(title: str, rows: Iterable[tuple[str, str]], width: int) -> list[str]:
    return ["", f"  {title}", *(f"    {name:<{width}}  {said}".rstrip() for name, said in rows)]


def _folders(words: Sequence[str]) -> list[Traversable]:
    """The folders of `--config-dir` and `hydra.searchpath`."""
    found: list[Traversable] = []
    for one, after in zip(words, [*words[1:], ""], strict=False):
        option, _, value = one.partition("=")
        if option in ("--config-dir", "-cd"):
            found.append(Path(value or after).expanduser())
    if any("hydra.searchpath=" in one for one in words):
        from metattt.composition.overrides import searched

        found += searched(words)
    return found


def _chosen(overrides: Sequence[str], known: Mapping[str, Mapping[str, str]], job: str) -> dict[str, str]:
    """What overrides choose, a single name each."""
    found: dict[str, str] = {}
    for one in overrides:
        group, _, name = one.lstrip("+").partition("=")
        if group not in known or not re.fullmatch(r"[\w/]+", name):
            continue
        if name != "null" and "/" not in name and name not in known[group]:
            from metattt.composition.messages import unknown_choice

            raise MetaTTTError(unknown_choice(group, name, sorted(known[group]), job))
        found[group] = name
    return found


class _Composed:
    """What a job's file and the files that it chooses say, merged in the order of their defaults lists.

    Attributes:
        chosen: the name for each group.
        values: the keys, nested.
        allowed: dotted key -> the values of its `Literal`.
        said: dotted key -> what a comment says of it, or where none does, the docstring of the class.
    """

    def __init__(self, job: str, folders: Sequence[Traversable], given: Mapping[str, str]):
        self.job, self.folders = job, folders
        self.values: dict[str, Any] = {}
        self.allowed: dict[str, tuple[Any, ...]] = {}
        self.said: dict[str, str] = {}
        self.chosen = {**defaults(job), **given}
        settled = set(given)
        for group in CHOOSING:
            found = dict(self._overrides(f"{group}/{self.chosen.get(group)}"))
            self.chosen |= {name: value for name, value in found.items() if name not in settled}
            settled |= set(found)
        self._read(job)

    def rows(self, group: str) -> Iterator[tuple[str, str]]:
        """Key and value, and what it is, of the keys of a group."""
        style = self.values.get("block_style", {}).get(group, {})
        for key, value in leaves(self.values.get(group), group).items():
            if key == group or key in NOT_SET_THERE or (key.rpartition(".")[2].startswith("_") and value != "???"):
                continue
            value = style.get(key.removeprefix(f"{group}."), value)
            yield f"{key}={shown(value)}", self.said.get(key, "") or ", ".join(map(shown, self.allowed.get(key, ())))

    def _load(self, path: str) -> tuple[str, dict[str, Any]]:
        """Text and content of a file; nothing where there is none."""
        file = file_of(path, self.folders)
        text = file.read_text(encoding="utf-8") if file else ""
        return text, parse_yaml(text)

    def _entries(self, path: str) -> Iterator[tuple[bool, str, str, str | None]]:
        """The defaults list of a file: whether an entry changes a choice, its place, package, and name of a choice."""
        group, entries = path.rpartition("/")[0], self._load(path)[1].get("defaults", [])
        for entry in entries if "_self_" in entries else [*entries, "_self_"]:
            text, name = next(iter(entry.items())) if isinstance(entry, dict) else (entry, None)
            *words, where = text.split()
            place, _, package = where.partition("@")
            if group and not place.startswith("/") and place != "_self_":
                place = f"{group}/{place}"
            yield "override" in words, place.lstrip("/"), package, shown(name) if isinstance(entry, dict) else None

    def _overrides(self, path: str) -> Iterator[tuple[str, str]]:
        """What a file, and what it includes, chooses in other groups."""
        for override, place, _, name in self._entries(path):
            if override:
                yield place, str(name)
            elif name is None and place != "_self_" and not place.startswith("schema/"):
                yield from self._overrides(place)

    def _read(self, path: str, package: str | None = None) -> None:
        """Merges a file and what it includes; where no package is given, its first line or its group is that."""
        text, content = self._load(path)
        group = path.rpartition("/")[0]
        if package is None:
            package = "" if text.startswith("# @package _global_") else group.replace("/", ".")
        for override, place, at, name in self._entries(path):
            if place == "_self_":
                _merge(self._node(package), {key: value for key, value in content.items() if key != "defaults"})
                self._comments(text, package, group)
            if place == "_self_" or override:
                continue
            if name and not group:  # the file of a job: what is chosen
                name = self.chosen.get(place, name)
                if variable := re.fullmatch(r"\$\{(\w+)\}", name):
                    name = self.chosen.get(variable[1], "null")
            inside = None
            if at:
                inside = package if at == "_here_" else "" if at == "_global_" else f"{package}.{at}".lstrip(".")
            if place.startswith("schema/"):
                _, kind, schema = place.split("/")
                self._schema(kind, schema, inside or "")
            elif name not in ("null", "None", "???"):
                self._read(f"{place}/{name}" if name else place, inside)

    def _node(self, package: str) -> dict[str, Any]:
        node = self.values
        for key in filter(None, package.split(".")):
            if not isinstance(node.get(key), dict):
                node[key] = {}
            node = node[key]
        return node

    def _schema(self, group: str, name: str, package: str) -> None:
        """The parameters of a constructor, those without a default as `???`."""
        with suppress(Unreadable):  # only an import could tell
            target = _class_of(self.job, group, name)
            told = explained(*target)
            for one in constructor(*target):
                key = f"{package}.{one.name}"
                self._node(package)[one.name] = "???" if one.default is Parameter.empty else one.default
                self.allowed[key] = literals(one.annotation)
                self.said.setdefault(key, told.get(one.name, ""))

    def _comments(self, text: str, package: str, group: str) -> None:
        """What a file says of keys: behind them, or in lines `# key, key  text` of their own."""
        above: list[tuple[int, str]] = []
        told: list[str] = []
        for line in text.splitlines():
            if match := re.match(r"( *)(\w+):(?:.*?\s# +(.*))?", line):
                above = [*(one for one in above if one[0] < len(match[1])), (len(match[1]), match[2])]
                key = ".".join([*filter(None, [package]), *(name for _, name in above)])
                if match[3]:
                    self.said[key] = match[3]
            elif match := re.match(r"\s*# ([a-z]\w*(?:, \w+)*)  +(\S.*)", line):
                told = [f"{package or group}.{key}" for key in match[1].split(", ")]
                self.said |= dict.fromkeys(told, match[2])
            elif match := re.match(r"\s*#\s{8,}(\S.*)", line):
                self.said |= {key: f"{self.said[key]} {match[1]}" for key in told}
            elif match := re.search(r"explained in (?:\w+\.yaml and )?(\w+)\.yaml", line):
                here = dict(self.said)
                self._comments(self._load(f"{group}/{match[1]}")[0], package, group)
                self.said |= here


def _class_of(job: str, group: str, name: str) -> tuple[str, str]:
    """Module and name of the class that is registered under a name, in our packages or an installed one.

    Raises:
        Unreadable: it is not found in a source.
    """
    if group == "layer" and name in LAYERS:
        return LAYERS[name]
    packages = [*COMPONENTS, *JOB_COMPONENTS.get(job, ()), *(one.value for one in announced("metattt.components"))]
    for package in sorted(packages, key=lambda one: one != f"metattt.{group}s"):  # where it most likely is
        with suppress(Unreadable):
            for module, text in registering(package):
                for one in registered(module) if re.search(rf"""["']{name}["']""", text) else ():
                    if (one.group, one.name) == (group, name):
                        return module, one.target.rpartition(".")[2]
    raise Unreadable(f"{group}={name}")


def _merge(into: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value
