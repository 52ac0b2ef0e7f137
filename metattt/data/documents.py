"""Documents from files: text as it is, one document per line of a jsonl file or per row of a parquet file."""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from metattt.data.manifest import MANIFEST
from metattt.errors import MetaTTTError
from metattt.io import path_of
from metattt.optional import need

TEXT_SUFFIXES = (".txt", ".md", ".py")
SUFFIXES = (*TEXT_SUFFIXES, ".jsonl", ".parquet")
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

    def share(self, seed: int) -> float:
        """A number in [0, 1) that depends on the key and the seed alone: it orders and splits documents."""
        return share(self.name, seed)


def share(name: bytes, seed: int) -> float:
    """The share of the document of that name."""
    return int.from_bytes(hashlib.sha256(f"{seed}:".encode() + name).digest()[:8], "big") / 2**64


def read_documents(path: str | Sequence[str] | None, text_key: str, key: str = "data.path") -> list[Document]:
    """All documents that are not empty, under a path.

    Args:
        path: a file, a folder (searched recursively), or a list of these. None: the sources of Python's standard
            library.
        text_key: the key (jsonl) or column (parquet) that holds the text.
        key: of the setting, for messages.

    Raises:
        MetaTTTError: a path that does not exist or holds no text, or a file that cannot be read.
    """
    documents = list(iterate_documents(find_files(path, key), text_key))
    if not documents:
        raise MetaTTTError(f"{key}={path} holds no text: its files ({', '.join(SUFFIXES)}) are missing or empty")
    return documents


def iterate_documents(files: Sequence[tuple[Path, Path]], text_key: str) -> Iterator[Document]:
    """The documents of files that are not empty, one after the other: `files` are those of `find_files`.

    Raises:
        MetaTTTError: a file that cannot be read.
    """
    return (document for file, base in files for document in _read(file, base, text_key) if document.text)


def find_files(path: str | Sequence[str] | None, key: str = "data.path") -> list[tuple[Path, Path]]:
    """Every file with text under a path, in order, with the folder that its name is relative to.

    Args:
        path: as for `read_documents`.
        key: of the setting, for messages.

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
        return [found for one in given for found in _find(path_of(one, key), key)]
    except OSError as error:  # a name that is too long, a folder without rights
        raise MetaTTTError(f"{key}={error.filename} cannot be read: {error.strerror or error}") from error


def _find(root: Path, key: str) -> list[tuple[Path, Path]]:
    suffixes = ", ".join(SUFFIXES)
    if root.is_file():
        if root.suffix not in SUFFIXES:
            raise MetaTTTError(
                f"{key}={root}: {root.suffix or 'no suffix'} is not supported; use {suffixes}\nCompressed files and "
                "other formats: metattt prepare source=<json, text, csv, ...> dataset_files=<file> target=<new folder>"
            )
        return [(root, root.parent)]
    if not root.is_dir():
        raise MetaTTTError(f"{key}={root} does not exist: give a file or a folder of {suffixes}")
    if (root / MANIFEST).is_file():
        way = "add data=shards" if key == "data.path" else f"metattt train data=shards data.path={root} reads them"
        raise MetaTTTError(f"{key}={root} holds shards of metattt prepare, not text: {way}")
    files = sorted(file for file in _walk(root) if file.suffix in SUFFIXES and file.is_file())
    if not files:
        raise MetaTTTError(f"{key}={root} holds no files that can be read: use {suffixes}")
    return [(file, root) for file in files]


def _walk(root: Path) -> Iterator[Path]:
    """Every file in a folder and those in it; a folder that cannot be read is an error, not an empty one."""
    for folder, inner, names in os.walk(root, onerror=_raise):
        inner[:] = [name for name in inner if name not in SKIPPED_FOLDERS]
        yield from (Path(folder, name) for name in names if name not in SKIPPED_FOLDERS)


def _raise(error: OSError) -> None:
    raise error


def _read(file: Path, root: Path, text_key: str) -> Iterator[Document]:
    """The documents of one file."""
    name = file.relative_to(root).as_posix()
    try:
        if file.suffix in TEXT_SUFFIXES:
            yield Document(name, file.read_bytes())
        else:
            texts = _jsonl(file, text_key) if file.suffix == ".jsonl" else _parquet(file, text_key)
            for row, text in enumerate(texts, start=1):
                yield Document(f"{name}:{row}", text)
    except OSError as error:
        raise MetaTTTError(f"{file} cannot be read: {error.strerror or error}") from error
    except MemoryError as error:
        raise MetaTTTError(f"{file} does not fit into memory: cut it into several files") from error


def _jsonl(file: Path, text_key: str) -> Iterator[bytes]:
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield _encoded(json.loads(line)[text_key], text_key)
            except (KeyError, TypeError) as error:
                raise MetaTTTError(f"{file}:{number} has no text in {text_key!r}: set data.text_key=...") from error
            except (ValueError, RecursionError) as error:  # no JSON, half a pair of surrogates, lists in lists in lists
                raise MetaTTTError(f"{file}:{number} cannot be read: {str(error).splitlines()[0]:.200}") from error


def _parquet(file: Path, text_key: str) -> Iterator[bytes]:
    pyarrow = need("pyarrow", extra="text", what=f"reading {file}")
    parquet = need("pyarrow.parquet", extra="text", what=f"reading {file}")
    try:
        table = parquet.ParquetFile(file)
        if text_key not in table.schema_arrow.names:
            names = ", ".join(table.schema_arrow.names)
            raise MetaTTTError(f"{file} has no column {text_key!r}, only {names}: name it with data.text_key=...")
        for batch in table.iter_batches(columns=[text_key]):
            for text in batch.column(0).to_pylist():
                yield _encoded(text or "", text_key)
    except (pyarrow.ArrowException, TypeError, ValueError, OverflowError) as error:  # pages that are damaged among them
        if isinstance(error, MetaTTTError):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise MetaTTTError(f"{file} is not a parquet file that can be read: {reason}") from error


def _encoded(text: object, text_key: str) -> bytes:
    if not isinstance(text, str):
        raise TypeError(f"{text_key!r} holds {type(text).__name__}, not text")
    return text.encode()
