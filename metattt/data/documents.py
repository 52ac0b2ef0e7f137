"""Documents from files: text as it is, one document per line of a jsonl file or per row of a parquet file."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from metattt.composition.messages import first_line
from metattt.data.manifest import MANIFEST
from metattt.errors import MetaTTTError
from metattt.io import path_of
from metattt.optional import need

warn_once = cache(logging.getLogger(__name__).warning)

TEXT_SUFFIXES = (".txt", ".md", ".py")
SUFFIXES = (*TEXT_SUFFIXES, ".jsonl", ".parquet")
PACKED = re.compile(r"\.(txt|md|py|jsonl?|parquet|csv|tsv)\.(gz|zst|bz2|xz|zip)$", re.I)
OTHERS = (
    "Compressed files and other formats: metattt prepare source=<json, text, csv, ...> dataset_files=<files> "
    "target=<new folder>; of a dataset saved on disk: source=arrow dataset_files=<folder>/*.arrow"
)
SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages"}
STANDARD_LIBRARY_SKIPS = SKIPPED_FOLDERS | {"test", "tests"}  # not installed on every machine


class Document(NamedTuple):
    """One document.

    Attributes:
        key: its path relative to the folder, and its row in a file of many: a name that does not depend on the machine.
        text: UTF-8 bytes.
    """

    key: str
    text: bytes

    @property
    def name(self) -> bytes:
        """The key as bytes: names of files need not be UTF-8."""
        return self.key.encode(errors="surrogateescape")


def share(name: bytes, seed: int) -> float:
    """A number in [0, 1) that depends on the name of a document and the seed alone: it orders and splits documents."""
    return int.from_bytes(hashlib.sha256(f"{seed}:".encode() + name).digest()[:8], "big") / 2**64


def read_documents(
    path: str | Sequence[str] | None, text_key: str, key: str = "data.path", most: int | None = None
) -> list[Document]:
    """The documents that are not empty, under a path.

    Args:
        path: a file, a folder (searched recursively), or a list of these. None: the sources of Python's standard
            library.
        text_key: the key (jsonl) or column (parquet) that holds the text.
        key: of the setting, for messages.
        most: at most so many, the first; None: all.

    Raises:
        MetaTTTError: a path that does not exist or holds no text, or a file that cannot be read.
    """
    documents = list(islice(iterate_documents(find_files(path, key), text_key), most))
    if not documents:
        raise MetaTTTError(f"{key}={path} holds no text: its files ({', '.join(SUFFIXES)}) are missing or empty")
    return documents


def iterate_documents(
    files: Sequence[tuple[Path, Path]], text_key: str, setting: str = "data.text_key"
) -> Iterator[Document]:
    """The documents of files that are not empty, one after the other: `files` are those of `find_files`, and `setting`
    is what chooses `text_key`, for messages.

    Raises:
        MetaTTTError: a file that cannot be read.
    """
    return (document for file, base in files for document in _read(file, base, text_key, setting) if document.text)


def find_files(path: str | Sequence[str] | None, key: str = "data.path") -> list[tuple[Path, Path]]:
    """Every file with text under a path, in order, with the folder that its name is relative to; arguments as of
    `read_documents`.

    Raises:
        MetaTTTError: a path that does not exist, or holds no such files.
    """
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        files = [file for file in root.rglob("*.py") if not STANDARD_LIBRARY_SKIPS & set(file.relative_to(root).parts)]
        return [(file, root) for file in sorted(files)]
    given = [path] if isinstance(path, str) else path
    if not isinstance(given, Sequence) or not given:
        raise MetaTTTError(f"{key}={path} is not a path: give a file, a folder or a list of these")
    try:
        found = [found for one in given for found in _find(path_of(one, key), key)]
    except OSError as error:  # a name that is too long, a folder without rights
        raise MetaTTTError(f"{key}={error.filename} cannot be read: {error.strerror or error}") from error
    if len(given) == 1:
        return found
    once: dict[Path, tuple[Path, Path]] = {}  # paths may lie in each other
    for file, base in found:
        once.setdefault(file.resolve(), (file, base))
    return list(once.values())


def _find(root: Path, key: str) -> list[tuple[Path, Path]]:
    suffixes = ", ".join(SUFFIXES)
    if root.is_file():
        if root.suffix.lower() not in SUFFIXES:
            raise MetaTTTError(
                f"{key}={root}: {root.suffix or 'no suffix'} is not supported; use {suffixes}\n{OTHERS}"
            )
        return [(root, root.parent)]
    if not root.is_dir():
        raise MetaTTTError(f"{key}={root} does not exist: give a file or a folder of {suffixes}")
    if (root / MANIFEST).is_file():
        way = "add data=shards" if key == "data.path" else f"metattt train data=shards data.path={root} reads them"
        raise MetaTTTError(f"{key}={root} holds shards of metattt prepare, not text: {way}")
    there = list(walk(root))
    text = [file for file in there if file.suffix.lower() in SUFFIXES]
    hidden = {file for file in text if "/." in f"/{file.relative_to(root).as_posix()}"}
    files = sorted(file for file in text if file.is_file() and file not in hidden)
    packed, lost = [file for file in there if PACKED.search(file.name)], [file for file in text if not file.exists()]
    for what, left in (("compressed files", packed), ("links that lead nowhere", lost), ("hidden files", hidden)):
        if left:
            warn_once("%s=%s: %s are left out (%d, as %s)", key, root, what, len(left), min(left).name)
    if not files:
        raise MetaTTTError(f"{key}={root} holds no files that can be read: use {suffixes}\n{OTHERS}")
    return [(file, root) for file in files]


def walk(root: Path) -> Iterator[Path]:
    """Every file in a folder and those in it; a folder that cannot be read is an error, not an empty one. Links to
    folders are followed, to each folder once, but not to those in `root` or around it."""
    seen = {home := root.resolve()}

    def new(folder: Path) -> bool:
        real = folder.resolve()
        if real in seen or (folder.is_symlink() and (home.is_relative_to(real) or real.is_relative_to(home))):
            return False
        seen.add(real)
        return True

    for folder, inner, names in os.walk(root, onerror=_raise, followlinks=True):
        inner[:] = [name for name in sorted(inner) if name not in SKIPPED_FOLDERS and new(Path(folder, name))]
        yield from (Path(folder, name) for name in names if name not in SKIPPED_FOLDERS)


def _raise(error: OSError) -> None:
    raise error


def _read(file: Path, root: Path, text_key: str, setting: str) -> Iterator[Document]:
    """The documents of one file."""
    name, suffix, place = file.relative_to(root).as_posix(), file.suffix.lower(), 1
    try:
        if suffix in TEXT_SUFFIXES:
            yield Document(name, file.read_bytes())
            return
        rows = _lines(file) if suffix == ".jsonl" else enumerate(_rows(file, text_key, setting), 1)
        for number, (place, given) in enumerate(rows, 1):
            row = json.loads(given) if isinstance(given, str) else given
            text = row.get(text_key, 0) if isinstance(row, dict) else 0
            if not isinstance(text, str | None):
                raise MetaTTTError(f"{file}:{place} has no text in {text_key!r}: set {setting}=...")
            yield Document(f"{name}:{number}", re.sub("[\ud800-\udfff]", "\ufffd", text or "").encode())
    except MetaTTTError:
        raise
    except Exception as error:  # of JSON, of the many layers of a parquet file, of the disk
        reason = getattr(error, "strerror", None) or first_line(error)
        raise MetaTTTError(f"{file}:{place} cannot be read: {reason:.200}") from error


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not empty, with their numbers."""
    with file.open(encoding="utf-8-sig", errors="replace") as lines:  # some editors begin a file with a mark of UTF-8
        yield from ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def _rows(file: Path, text_key: str, setting: str) -> Iterator[dict[str, Any]]:
    parquet = need("pyarrow.parquet", extra="text", what=f"reading {file}")
    table = parquet.ParquetFile(file)
    if text_key not in table.schema_arrow.names:
        names = ", ".join(table.schema_arrow.names)
        raise MetaTTTError(f"{file} has no column {text_key!r}, only {names}: name it with {setting}=...")
    for batch in table.iter_batches(columns=[text_key]):
        yield from batch.to_pylist()
