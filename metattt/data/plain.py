"""Plain data from files that anybody may have written: bounded before it is parsed, and never from outside its folder."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from metattt.errors import MetaTTTError

DEPTH = 20  # of nested lists and objects in a record of ours; real ones have three


def path_of(given: Any, key: str) -> Path:
    """The path that a user gives for a key, `~` written out.

    Raises:
        MetaTTTError: it is no path: empty, as from a shell variable without a value, or `~` of nobody.
    """
    if not isinstance(given, str) or not given.strip() or "\0" in given:
        raise MetaTTTError(
            f"{key}={'' if given is None else given!s:.80} is no path: give the name of a file or folder"
        )
    try:
        return Path(given).expanduser()
    except RuntimeError as error:
        raise MetaTTTError(f"{key}={given} is no path: {error}") from error


def inside(folder: Path, name: str) -> Path:
    """The file of that name in a folder, which need not exist.

    Raises:
        MetaTTTError: the name leads to another folder, or is a link that does.
    """
    if Path(name).name != name or name in ("", "..") or "\\" in name or "\0" in name:
        raise MetaTTTError(f"{folder} names {name[:80]!r}, which is not the name of a file in it")
    file = folder / name
    if file.is_symlink() and file.resolve().parent != folder.resolve():
        raise MetaTTTError(f"{file} is a link that leads out of its folder: put the file itself there")
    return file


def read_text(file: Path, limit: int) -> str:
    """The text of a file that is not too large.

    Args:
        file: a file; what it is called is not checked here.
        limit: bytes.

    Raises:
        MetaTTTError: it is too large, no UTF-8, or cannot be read.
    """
    try:
        if not file.is_file():  # a pipe would never end
            raise MetaTTTError(f"{file} is missing, or not a file")
        with file.open("rb") as stream:
            content = stream.read(limit + 1)
        if len(content) > limit:
            raise MetaTTTError(f"{file} has more than {limit:,} bytes: it is damaged, or not what its name says")
        return content.decode()
    except UnicodeDecodeError as error:
        raise MetaTTTError(f"{file} is damaged: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise MetaTTTError(f"{file} cannot be read: {error.strerror or error}") from error


def parse(text: str, name: str) -> Any:
    """What a JSON text says. NaN, keys that occur twice and deep nesting are refused.

    Args:
        text: the text.
        name: where it is from, for messages.

    Raises:
        MetaTTTError: it is not such a text.
    """
    if _depth(text) > DEPTH:
        raise MetaTTTError(f"{name} is damaged: it is nested more than {DEPTH} deep")
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_number)
    except ValueError as error:
        raise MetaTTTError(f"{name} is damaged: {error}") from error


def _depth(text: str) -> int:
    """How deep lists and objects are nested. Iterative: a parser runs out of stack where there is too much."""
    deepest = depth = 0
    for found in re.finditer(r'"(?:[^"\\]|\\.)*+"|[\[{]|[\]}]', text, flags=re.DOTALL):
        first = found[0][0]
        depth += (first in "[{") - (first in "]}")
        deepest = max(deepest, depth)
    return deepest


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"{key[:80]!r} occurs twice")
        content[key] = value
    return content


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")
