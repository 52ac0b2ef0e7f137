"""Files of ours on the disk: texts with checksums, written for good; bounded and never through a link when read."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import xxhash

from metattt.errors import MetaTTTError

LONGEST_JSON = 256 * 2**20  # bytes


def digest(content: bytes) -> str:
    """The checksum of some bytes (XXH3, 128 bits)."""
    return str(xxhash.xxh3_128_hexdigest(content))


def write_text(file: Path, text: str) -> str:
    """Writes a new file, waits until it is on the disk, and returns its checksum."""
    content = text.encode()
    with file.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    return digest(content)


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def check_own(file: Path) -> None:
    """Refuses what is no plain file, and a link that leads out of its folder.

    Links of a cache of the Hugging Face Hub, `snapshots/<revision>/<file>` to `blobs/<name>`, stay in it and are taken.

    Raises:
        MetaTTTError: naming the file.
    """
    if file.is_symlink():
        home, leads = file.parent.resolve(), file.resolve()
        cached = home.parent.name == "snapshots" and leads.parent == home.parent.parent / "blobs"
        if not (cached or leads.is_relative_to(home)):
            raise MetaTTTError(f"{file} is a link out of its folder, and is not followed: copy the file there")
    if file.exists() and not stat.S_ISREG(file.stat().st_mode):
        raise MetaTTTError(f"{file} is not a file")


def read_text(file: Path, most: int = LONGEST_JSON) -> str:
    """The text of a file of at most so many bytes.

    Raises:
        MetaTTTError: it is not there, too long, a link out of its folder, or no text.
    """
    check_own(file)
    try:
        if file.stat().st_size > most:
            raise MetaTTTError(
                f"{file} has {file.stat().st_size:,} bytes, and {most:,} at most are read: it is damaged"
            )
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise MetaTTTError(f"{file} is damaged: it is no text ({error.reason})") from error
    except FileNotFoundError as error:
        raise MetaTTTError(f"{file} does not exist") from error
    except OSError as error:
        raise MetaTTTError(f"{file} cannot be read: {error.strerror}") from error


def read_json(file: Path, most: int = LONGEST_JSON) -> dict[str, Any]:
    """A JSON file with an object.

    Raises:
        MetaTTTError: as `read_text`, or it is not JSON.
    """
    try:
        content = json.loads(read_text(file, most))
    except RecursionError as error:
        raise MetaTTTError(f"{file} is damaged: it is nested too deeply") from error
    except MetaTTTError:
        raise
    except ValueError as error:
        raise MetaTTTError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise MetaTTTError(f"{file} holds no configuration, but {type(content).__name__}")
    return content
