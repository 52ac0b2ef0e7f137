"""Reading and writing files safely: the size of a file is bounded before it is parsed, links may not leave the folder,
and what we write has a checksum and survives a loss of power."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash

from metattt.errors import MetaTTTError

LONGEST = 256 * 2**20  # the largest size of a text, bytes
DEPTH = 64  # of nested lists and objects in a JSON text


def path_of(given: Any, key: str) -> Path:
    """The path that a user gives for a key, `~` written out.

    Raises:
        MetaTTTError: not a path: empty (as from an unset shell variable), or `~` of an unknown user.
    """
    if not isinstance(given, str) or not given.strip() or "\0" in given:
        raise MetaTTTError(
            f"{key}={'' if given is None else given!s:.80} is not a path: give the name of a file or folder"
        )
    try:
        return Path(given).expanduser()
    except RuntimeError as error:
        raise MetaTTTError(f"{key}={given} is not a path: {error}") from error


def inside(folder: Path, name: str) -> Path:
    """The file of that name in a folder, which need not exist.

    A link may stay in the folder, or in the cache of the Hugging Face Hub: `snapshots/<revision>/<file>` to
    `blobs/<name>`.

    Raises:
        MetaTTTError: the name leads to another folder, or is a link that does.
    """
    if Path(name).name != name or name in ("", "..") or "\\" in name or "\0" in name:
        raise MetaTTTError(f"{folder} names {name[:80]!r}, which is not the name of a file in it")
    file = folder / name
    if file.is_symlink():
        home, leads = folder.resolve(), file.resolve().parent
        if leads != home and not (home.parent.name == "snapshots" and leads == home.parent.parent / "blobs"):
            raise MetaTTTError(f"{file} is a link to a file outside its folder: put the file itself there")
    return file


def check_own(file: Path) -> None:
    """Raises an error if this is not a file, or a link out of its folder.

    Raises:
        MetaTTTError: as `inside`; it is missing, or a folder or a pipe.
    """
    if not inside(file.parent, file.name).is_file():
        raise MetaTTTError(f"{file} is missing, or not a file")


def read_text(file: Path, limit: int = LONGEST) -> str:
    """Reads a text file that is not too large.

    Args:
        file: a file; what it is called is not checked here.
        limit: bytes.

    Raises:
        MetaTTTError: it is too large, not UTF-8, or cannot be read.
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
        raise MetaTTTError(f"{file} is damaged, or not UTF-8: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise MetaTTTError(f"{file} cannot be read: {error.strerror or error}") from error


def parse(text: str, name: str) -> Any:
    """Parses a JSON text, which may hold any numbers; `name` says where it is from, for messages.

    Raises:
        MetaTTTError: the text is not valid, a key occurs twice, or it is nested too deep.
    """
    if _depth(text) > DEPTH:
        raise MetaTTTError(f"{name} is damaged: it is nested more than {DEPTH} deep")
    try:
        return json.loads(text, object_pairs_hook=_unique)
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


def read_object(file: Path, limit: int = LONGEST) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        MetaTTTError: as `inside`, `read_text` and `parse`; it holds no object.
    """
    content = parse(read_text(inside(file.parent, file.name), limit), str(file))
    if not isinstance(content, dict):
        raise MetaTTTError(f"{file} does not hold a configuration but {type(content).__name__}")
    return content


def digest(content: bytes) -> str:
    """The checksum of some bytes (XXH3, 128 bits)."""
    return str(xxhash.xxh3_128_hexdigest(content))


def seal(content: Mapping[str, Any]) -> str:
    """The checksum of plain data, not of its text: white space and the order of keys do not count."""
    return digest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def checksum(file: Path) -> str:
    """That of a file, as `digest`; read piece by piece."""
    with file.open("rb", buffering=0) as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()


@contextmanager
def replaced(file: Path) -> Iterator[Path]:
    """A context that gives the path of a new file and moves it to `file` at the end: `file` is replaced completely or
    not at all, even after a crash or a loss of power.

    Raises:
        OSError: it cannot be written; the old file is unchanged.
    """
    part = file.with_name(f"{file.name}.{os.getpid()}.part")  # another name in every process
    try:
        yield part
        sync(part)
        part.replace(file)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
    sync(file.absolute().parent)


def write_whole(file: Path, content: bytes | memoryview) -> None:
    """Writes a file as `replaced` does."""
    with replaced(file) as part:
        part.write_bytes(content)


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
