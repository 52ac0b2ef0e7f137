"""The reference of the configuration, from the constructors and the YAML files: nothing in it is written by hand."""

from __future__ import annotations

import ast
import dataclasses
import logging
import re
from pathlib import Path
from typing import Any

import griffe

from metattt.cli import COMMANDS
from metattt.composition.choices import choices, groups
from metattt.composition.components import COMPONENTS, JOB_COMPONENTS, load_components
from metattt.composition.signatures import find_source
from metattt.registry import PARAMETERS, REGISTERED, SCHEMAS

CONFIGS = Path(__file__).resolve().parents[2] / "metattt" / "configs"

INTRO = """# Configuration

Made from the constructors and the files of `metattt/configs` when this site is built. A choice is a file; its first line of comment
stands beside it; the keys below it are those of the constructor that it fills. `metattt train --help` shows the same at the terminal, and
`metattt train <overrides> --cfg job` what came of them.
"""


def page() -> str:
    """The page in Markdown."""
    load_components((*COMPONENTS, *dict.fromkeys(name for names in JOB_COMPONENTS.values() for name in names)))
    parts = [INTRO, "## Commands", "", "| command | what it does | groups |", "|---|---|---|"]
    for name, what in COMMANDS.items():
        chosen = ", ".join(f"`{group}`" for group in sorted(groups(name)))
        parts.append(f"| `metattt {name}` | {cell(what)} | {chosen} |")
    parts += [
        "",
        "## A training run",
        "",
        "```yaml",
        (CONFIGS / "train.yaml").read_text(encoding="utf-8").strip(),
        "```",
    ]
    classes = {group: {} for group, _ in REGISTERED}
    for (group, name), target in sorted(REGISTERED.items()):
        classes[group][name] = target
    for group in dict.fromkeys((*sorted(groups()), *sorted(classes))):
        parts += ["", f"## `{group}`"]
        known = choices(group)
        if known:
            parts += ["", "| choice | what it is |", "|---|---|"]
            parts += [f"| `{group}={name}` | {cell(what)} |" for name, what in known.items()]
        for name, target in classes.get(group, {}).items():
            parts += ["", *keys(group, name, target)]
    return "\n".join(parts) + "\n"


def keys(group: str, name: str, target: str) -> list[str]:
    """The table of the keys of one registered class."""
    said, summary = described(target)
    rows = []
    for field in dataclasses.fields(SCHEMAS[target]):
        if field.name == "_target_":
            continue
        allowed = PARAMETERS[target].get(field.name) or ()
        kind = ", ".join(f"`{shown(value)}`" for value in allowed) or f"`{type_name(field.type)}`"
        rows.append(f"| `{field.name}` | {kind} | {default(field)} | {cell(said.get(field.name, ''))} |")
    title = [f"### `{group}/{name}`", "", f"`{target}`: {summary}"]
    return [*title, "", "| key | type or values | default | |", "|---|---|---|---|", *rows] if rows else title


def described(target: str) -> tuple[dict[str, str], str]:
    """What the docstrings of a class and its bases say of the constructor's arguments, and its first paragraph."""
    found: dict[str, str] = {}
    texts = docstrings(*target.rpartition(".")[::2])
    for text in reversed(texts):
        for section in griffe.Docstring(text, lineno=1).parse("google", warnings=False):
            if section.kind is griffe.DocstringSectionKind.parameters:
                for argument in section.value:
                    for key in (key.strip() for key in argument.name.split(",")):
                        if key not in found or not re.match(r"(see|as (of|for)) `", argument.description):
                            found[key] = argument.description
    return found, " ".join((texts[0] if texts else target).split("\n\n")[0].split())


def docstrings(module: str, name: str) -> list[str]:
    """Of a class, its constructor and the bases that are in our package, read from the source: nothing is imported."""
    for node in ast.parse(find_source(module).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            inits = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
            own = [text for one in (node, *inits) if (text := ast.get_docstring(one))]
            bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
            return own + [text for base in bases for text in docstrings(module, base)]
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("metattt"):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return docstrings(node.module, alias.name)
    return []


def default(field: dataclasses.Field[Any]) -> str:
    value = field.default_factory() if callable(field.default_factory) else field.default
    return "required" if value == "???" else f"`{shown(value)}`" if value != "" else "empty"


def shown(value: Any) -> str:
    """A value as YAML has it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def type_name(hint: Any) -> str:
    text = getattr(hint, "__name__", str(hint)) if isinstance(hint, type) else str(hint)
    text = re.sub(r"typing\.|builtins\.", "", text)
    return re.sub(
        r"Optional\[(.*)\]", r"\1 or null", re.sub(r"Union\[(.*)\]", lambda m: m[1].replace(", ", " or "), text)
    )


def cell(text: str) -> str:
    """A text for a cell of a table."""
    text = " ".join(text.split()).replace("|", "\\|")
    return "`".join(part if at % 2 else part.replace("<", "&lt;") for at, part in enumerate(text.split("`")))  # not in code


logging.getLogger("griffe").setLevel(logging.ERROR)  # of sections that it does not know, which are not asked for
