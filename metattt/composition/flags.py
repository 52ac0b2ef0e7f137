"""The options of a command line that begin with dashes: Hydra's, told apart from the overrides."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from metattt.errors import MetaTTTError

SEARCH_PATH = "hydra.searchpath"
INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
SHOWN = ("job", "hydra", "all")
SHELLS = ("bash", "fish", "zsh")

LONG = {
    "-m": "--multirun", "-r": "--run", "-c": "--cfg", "-p": "--package", "-i": "--info", "-cd": "--config-dir", "-sc": "--shell-completion",
    "-cn": "--config-name", "-cp": "--config-path", "-h": "--help",
}  # fmt: skip
VALUES = {"--cfg": SHOWN, "--info": INFO}
"""Options whose value is one of these; without one it is the first."""

SWITCHES = ("--multirun", "--run", "--resolve", "--shell-completion", "--help")
WITH_VALUE = (*VALUES, "--package", "--config-dir")


class Flags(NamedTuple):
    """What the options say.

    Attributes:
        help: show what can be chosen.
        multirun: sweep over the values that overrides name.
        cfg: the configuration to show: `job`, `hydra` or `all`; None runs.
        resolve: show values in the place of `${...}`.
        package: the node to show; None is everything.
        info: what to show of how the configuration is put together; one of `INFO`, or None.
        completion: install, uninstall or query the completion of a shell.
    """

    help: bool = False
    multirun: bool = False
    cfg: str | None = None
    resolve: bool = False
    package: str | None = None
    info: str | None = None
    completion: bool = False


def take_flags(words: Sequence[str], command: str) -> tuple[Flags, list[str]]:
    """The options of a command, and its overrides; `--config-dir` becomes an override of Hydra's search path.

    Args:
        words: after the command.
        command: for messages.

    Raises:
        MetaTTTError: an option that there is not, without its value, or that does not go with another.
    """
    found: dict[str, str] = {}
    overrides: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not re.match("-{1,2}[a-zA-Z]", word):
            overrides.append(word)
            continue
        name, equals, value = word.partition("=")
        name = LONG.get(name, name.replace("_", "-"))
        if name not in SWITCHES and name not in WITH_VALUE:
            raise MetaTTTError(_not_an_option(word, command))
        if name in SWITCHES:
            if equals:
                raise MetaTTTError(f"`{word}`: {name} takes no value")
        elif not equals:
            value = rest.pop(0) if rest and (name not in VALUES or rest[0] in VALUES[name]) else ""
        if name in VALUES and value not in VALUES[name]:
            if value:
                raise MetaTTTError(f"`{word}` is not allowed: {name} is one of {', '.join(VALUES[name])}")
            value = VALUES[name][0]
        if name in WITH_VALUE and not value:
            raise MetaTTTError(f"`{name}` needs a value: {name} {'<folder>' if name == '--config-dir' else '<key>'}")
        if found.get(name, value) != value:
            raise MetaTTTError(f"{name} is given twice: {found[name]} and {value}")
        found[name] = value
    kinds = [name for name in ("--run", "--multirun", "--cfg", "--info", "--shell-completion") if name in found]
    if len(kinds) > 1:
        raise MetaTTTError(f"{' and '.join(kinds)} do not go together: give one of them")
    for name in ("--resolve", "--package"):
        if name in found and "--cfg" not in found:
            raise MetaTTTError(f"{name} is about what --cfg shows: add --cfg job")
    if "--config-dir" in found:
        overrides = _searched(found["--config-dir"], overrides)
    flags = Flags(
        help="--help" in found,
        multirun="--multirun" in found,
        cfg=found.get("--cfg"),
        resolve="--resolve" in found,
        package=found.get("--package"),
        info=found.get("--info"),
        completion="--shell-completion" in found,
    )
    return flags, overrides


def _searched(given: str, overrides: list[str]) -> list[str]:
    """The overrides with a folder of the user's on the search path, before those that an override names."""
    folder = Path(given).expanduser().absolute()
    if not folder.is_dir():
        raise MetaTTTError(f"--config-dir: there is no folder {given}; give one that holds e.g. experiment/mine.yaml")
    quoted = str(folder).replace("\\", "\\\\").replace("'", "\\'")
    paths, others = [f"'{quoted}'"], []
    for override in overrides:
        key, _, value = override.partition("=")
        if key.lstrip("+") != SEARCH_PATH:
            others.append(override)
        elif inside := value.strip().removeprefix("[").removesuffix("]").strip():
            paths.append(inside)
    return [f"{SEARCH_PATH}=[{','.join(paths)}]", *others]


def _not_an_option(flag: str, command: str) -> str:
    """For a word that begins with dashes."""
    name, _, value = flag.lstrip("-").partition("=")
    if name in ("config-path", "cp", "config-name", "cn"):
        return f"`{flag}` is not an option: `metattt {command}` has its configuration; --config-dir <folder> adds files of your own"
    if name in ("experimental-rerun", "hydra-help"):
        return f"`{flag}` is not an option here: `metattt {command} --help` shows what can be set, --cfg hydra Hydra's own settings"
    key = name.replace("-", "_")
    return f"`{flag}` is not an option: settings are given as {key}={value or '<value>'}, without dashes; --cfg shows them all"
