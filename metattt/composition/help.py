"""What `metattt <command> --help` prints: the groups with their choices, and the keys of what is chosen.

Neither torch nor Hydra is imported for it, nor a package of others: YAML is merged as their defaults lists say,
constructors are read from their source. `--cfg` shows what Hydra itself makes of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources.abc import Traversable
from inspect import Parameter
from pathlib import Path
from typing import Any

from metattt.composition.aliases import NOT_SET_THERE
from metattt.composition.announced import announced
from metattt.composition.choices import choices, defaults, file_of, groups
from metattt.composition.components import COMPONENTS, JOB_COMPONENTS
from metattt.composition.signatures import Unreadable, constructor, find_source, registered
from metattt.errors import MetaTTTError
from metattt.registry import literals

CHOOSING = ("experiment", "model", "layer")
"""Groups whose files choose in other groups; the first one that does so counts."""

OF_LIBRARIES = {"ttt_layer": ("metattt.layer", "TTTLayer"), "combined": ("metattt.combined", "Combined")}
"""Schemas of layers that no decorator registers."""

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
    lines = [
        f"usage: metattt {job} [<key>=<value> ...]",
        "",
        summary,
        *(line[2:] for line in text[:1] if line[:1] == "#"),
    ]
    known = {group: choices(group, folders) for group in groups(job)}
    shown = {group: names for group, names in known.items() if names}  # some are there for files of the user's own
    if shown:
        lines += ["", "What can be chosen, <group>=<name>:"]
    for group, names in shown.items():
        width = max(map(len, names))
        lines += ["", f"  {group}"]
        lines += [f"    {name:<{width}}  {said}".rstrip() for name, said in sorted(names.items())]
    found = _Composed(job, folders, _chosen(overrides, known))
    keys = {group: rows for group in shown if (rows := list(found.rows(group)))}
    if keys:
        lines += [
            "",
            f"Keys of what is chosen, with their values (of another choice: metattt {job} <group>=<name> --help):",
        ]
    for group, rows in keys.items():
        lines += ["", f"  {group}={found.chosen.get(group)}"]
        lines += [f"    {f'{key}={value}':<{WIDTH}}  {said}".rstrip() for key, value, said in rows]
    lines += ["", f"Keys and defaults (configs/{job}.yaml):", "", *(f"  {line}".rstrip() for line in text)]
    return "\n".join(lines)


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


def _chosen(overrides: Sequence[str], known: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """What overrides choose, a single name each."""
    found: dict[str, str] = {}
    for one in overrides:
        group, _, name = one.lstrip("+").partition("=")
        if group not in known or not re.fullmatch(r"[\w/]+", name):
            continue
        if name != "null" and "/" not in name and known[group] and name not in known[group]:
            from metattt.composition.messages import refused_value

            raise MetaTTTError(refused_value(group, name, sorted(known[group])))
        found[group] = name
    return found


class _Composed:
    """What a job's file and the files that it chooses say, merged in the order of their defaults lists.

    Attributes:
        chosen: the name for each group.
        values: the keys, nested.
        allowed: dotted key -> the values of its `Literal`.
        said: dotted key -> what a comment says of it.
    """

    def __init__(self, job: str, folders: Sequence[Traversable], given: Mapping[str, str]):
        self.job, self.folders = job, folders
        self.values: dict[str, Any] = {}
        self.allowed: dict[str, tuple[Any, ...]] = {}
        self.said: dict[str, str] = {}
        self.chosen = {**dict(defaults(job)), **given}
        settled = set(given)
        for group in CHOOSING:
            found = dict(self._overrides(f"{group}/{self.chosen.get(group)}"))
            self.chosen |= {name: value for name, value in found.items() if name not in settled}
            settled |= set(found)
        self._read(job, "")

    def _overrides(self, path: str) -> Iterator[tuple[str, str]]:
        """What a file, and what it includes, chooses in other groups."""
        for words, where, _, name in self._entries(path):
            if "override" in words:
                yield where.lstrip("/"), str(name)
            elif name is None and where != "_self_" and not where.startswith("/schema/"):
                yield from self._overrides(_absolute(where, path))

    def _entries(self, path: str) -> Iterator[tuple[list[str], str, str, Any]]:
        """The defaults list of a file: words before the place, the place, the package, and the name of a choice."""
        entries = self._load(path)[1].get("defaults", [])
        for entry in entries if "_self_" in entries else [*entries, "_self_"]:
            text, name = next(iter(entry.items())) if isinstance(entry, dict) else (entry, None)
            *words, where = text.split()
            where, _, package = where.partition("@")
            yield words, where, package, "null" if name is None and isinstance(entry, dict) else name

    def _load(self, path: str) -> tuple[str, dict[str, Any]]:
        """Text and content of a file; nothing where there is none."""
        import yaml

        file = file_of(path, self.folders)
        text = file.read_text(encoding="utf-8") if file else ""
        return text, yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)) or {}

    def rows(self, group: str) -> Iterator[tuple[str, str, str]]:
        """Dotted key, value, and what it is, of the keys of a group."""
        style = self.values.get("block_style", {}).get(group, {})
        for key, value in _flat(self.values.get(group), group):
            if key in NOT_SET_THERE or (key.rpartition(".")[2].startswith("_") and value != "???"):
                continue
            value = style.get(key.removeprefix(f"{group}."), value)
            yield key, _yaml(value), self.said.get(key, "") or ", ".join(map(_yaml, self.allowed.get(key, ())))

    def _read(self, path: str, package: str) -> None:
        """Merges a file and what it includes."""
        text, content = self._load(path)
        group = path.rpartition("/")[0]
        if text.startswith("# @package _global_") and package == group:
            package = ""
        for words, where, at, name in self._entries(path):
            if where == "_self_":
                _merge(self._node(package), {key: value for key, value in content.items() if key != "defaults"})
                self._comments(text, package, group)
            if where == "_self_" or "override" in words:
                continue
            if name and not group:  # the file of a job: what is chosen
                name = self.chosen.get(where.lstrip("/"), name)
                if variable := re.fullmatch(r"\$\{(\w+)\}", name):
                    name = self.chosen.get(variable[1], "null")
            target = _absolute(where, path)
            inside = target if name else target.rpartition("/")[0]
            if at:
                inside = package if at == "_here_" else "" if at == "_global_" else f"{package}.{at}".lstrip(".")
            if target.startswith("schema/"):
                _, kind, schema = target.split("/")
                self._schema(kind, schema, inside)
            elif name not in ("null", "???"):
                self._read(f"{target}/{name}" if name else target, inside)

    def _node(self, package: str) -> dict[str, Any]:
        node = self.values
        for key in filter(None, package.split(".")):
            if not isinstance(node.get(key), dict):
                node[key] = {}
            node = node[key]
        return node

    def _schema(self, group: str, name: str, package: str) -> None:
        """The parameters of a constructor, those without a default as `???`."""
        try:
            parameters = _parameters(self.job, group, name)
        except Unreadable:  # only an import could tell
            return
        for one in parameters:
            self._node(package)[one.name] = "???" if one.default is Parameter.empty else one.default
            self.allowed[f"{package}.{one.name}"] = literals(one.annotation)

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


def _absolute(where: str, path: str) -> str:
    """A place in a defaults list, which may be relative to the group of its file."""
    group = path.rpartition("/")[0]
    return where.lstrip("/") if where.startswith("/") or not group else f"{group}/{where}"


def _parameters(job: str, group: str, name: str) -> list[Parameter]:
    """Of the constructor that is registered under a name, in our packages or an installed one.

    Raises:
        Unreadable: it is not found in a source.
    """
    if group == "layer" and name in OF_LIBRARIES:
        return constructor(*OF_LIBRARIES[name])
    packages = [*COMPONENTS, *JOB_COMPONENTS.get(job, ()), *(one.value for one in announced("metattt.components"))]
    for package in sorted(packages, key=lambda one: one != f"metattt.{group}s"):  # where it most likely is
        try:
            source = find_source(package)
        except Unreadable:
            continue
        whole = source.name == "__init__.py"
        for file in sorted(source.parent.rglob("*.py")) if whole else [source]:
            text = file.read_text(encoding="utf-8")
            if "@register(" not in text or not any(f"{quote}{name}{quote}" in text for quote in "'\""):
                continue
            inside = file.relative_to(source.parent).with_suffix("").parts if whole else ()
            module = ".".join((package, *inside)).removesuffix(".__init__")
            found = next((one for one in registered(module) if (one.group, one.name) == (group, name)), None)
            if found:
                return found.parameters
    raise Unreadable(f"{group}={name}")


def _merge(into: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _flat(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in node.items() if isinstance(node, dict) else ():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}.{key}")
        else:
            yield f"{prefix}.{key}", value


def _yaml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_yaml, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
