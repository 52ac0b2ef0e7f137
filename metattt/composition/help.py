"""What `metattt <command> --help` prints: the groups with their choices, and the keys of what is chosen.

Hydra composes the configuration; what is said of a key is a comment of the files that it is made of.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources.abc import Traversable

from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from metattt.composition.aliases import NOT_SET_THERE
from metattt.composition.application import application
from metattt.composition.choices import choices, file_of, groups
from metattt.composition.compose import compose
from metattt.composition.keys import leaves
from metattt.composition.overrides import prepare, searched
from metattt.errors import shown
from metattt.registry import PARAMETERS

WIDTH = 36


def help_of(job: str, summary: str, overrides: Sequence[str]) -> str:
    """The text.

    Raises:
        MetaTTTError: an override that is wrong.
    """
    cfg, prepared = compose(*overrides, job=job), prepare(overrides, job)
    folders = searched(prepared)
    with application(job) as app:
        read = app.config_loader.compute_defaults_list(job, prepared, RunMode.RUN)
    said: dict[str, str] = {}
    for one in read.defaults:
        said |= _comments(str(one.config_path), (one.package or "").replace("_global_", ""), folders)
    file = file_of(job)
    assert file is not None
    text = file.read_text(encoding="utf-8").splitlines()
    lines = [f"usage: metattt {job} [<key>=<value> ...]", "", summary]
    lines += [line[2:] for line in text[:1] if line[:1] == "#"]
    known = {group: names for group in groups(job) if (names := choices(group, folders))}
    lines += ["", "What can be chosen, <group>=<name>:"] if known else []
    for group, names in known.items():
        lines += _table(group, sorted(names.items()), max(map(len, names)))
    keys = {group: rows for group in known if (rows := list(_rows(cfg, group, said)))}
    others = f"(of another choice: metattt {job} <group>=<name> --help)"
    lines += ["", f"Keys of what is chosen, with their values {others}:"] if keys else []
    for group, rows in keys.items():
        lines += _table(f"{group}={read.overrides.known_choices.get(group)}", rows, WIDTH)
    lines += ["", f"Keys and defaults (configs/{job}.yaml):", "", *(f"  {line}".rstrip() for line in text)]
    return "\n".join(lines)


def _table(title: str, rows: Iterable[tuple[str, str]], width: int) -> list[str]:
    return ["", f"  {title}", *(f"    {name:<{width}}  {said}".rstrip() for name, said in rows)]


def _rows(cfg: DictConfig, group: str, said: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Key and value, and what it is, of the keys of a group: a comment, or the values of its `Literal`."""
    node = OmegaConf.select(cfg, group.replace("/", "."))
    for key, value in leaves(OmegaConf.to_container(node), group).items() if isinstance(node, DictConfig) else ():
        owner, _, name = key.rpartition(".")
        composed = key.startswith("model.blocks.")  # of a pattern
        if not owner or composed or key in NOT_SET_THERE or (name.startswith("_") and value != "???"):
            continue
        allowed = PARAMETERS.get(str(OmegaConf.select(cfg, f"{owner}._target_", default=None)), {}).get(name, ())
        yield f"{key}={shown(value)}", said.get(key, "") or ", ".join(map(shown, allowed))


def _comments(path: str, package: str, folders: Sequence[Traversable]) -> dict[str, str]:
    """What a file says of keys: behind them, or in lines `# key, key  text` of their own."""
    file = file_of(path, folders)
    above: list[tuple[int, str]] = []
    told: list[str] = []
    said: dict[str, str] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file else ():
        if match := re.match(r"( *)(\w+):(?:.*?\s# +(.*))?", line):
            above = [*(one for one in above if one[0] < len(match[1])), (len(match[1]), match[2])]
            key = ".".join([*filter(None, [package]), *(name for _, name in above)])
            if match[3]:
                said[key] = match[3]
        elif match := re.match(r"\s*# ([a-z]\w*(?:, \w+)*)  +(\S.*)", line):
            told = [f"{package or path.rpartition('/')[0]}.{key}" for key in match[1].split(", ")]
            said |= dict.fromkeys(told, match[2])
        elif match := re.match(r"\s*#\s{8,}(\S.*)", line):
            said |= {key: f"{said[key]} {match[1]}" for key in told}
        elif match := re.search(r"explained in (?:\w+\.yaml and )?(\w+)\.yaml", line):
            said = _comments(f"{path.rpartition('/')[0]}/{match[1]}", package, folders) | said
    return said
