"""Where `metattt prepare` takes documents from: local files, or a streamed dataset of the Hugging Face Hub."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count, islice
from typing import Any

from metattt.data.documents import FOREIGN, SUFFIXES, Document, find_files, half_a_character, iterate_documents
from metattt.errors import MetaTTTError
from metattt.io import path_of
from metattt.optional import need


class Source(ABC):
    """Documents in an order that is always the same.

    Attributes:
        name: for the manifest: the same text has the same name.
        num_bytes: size of the text, roughly; None if it is not known.
        can_skip: the first documents can be left out without reading them.
    """

    name: str
    num_bytes: int | None
    can_skip: bool

    @abstractmethod
    def documents(self, skip: int = 0) -> Iterator[Document]:
        """All documents but the first `skip`."""


class Files(Source):
    """Local files: txt, md, py, jsonl, parquet.

    Args:
        path: a file, a folder or a list of these; None: the sources of Python's standard library.
        text_key: key (jsonl) or column (parquet) that holds the text.

    Raises:
        MetaTTTError: a path without such files.
    """

    can_skip = False

    def __init__(self, path: str | Sequence[str] | None, text_key: str, key: str = "source"):
        self.files, self.text_key = find_files(path, key), text_key
        given = [] if path is None else [path] if isinstance(path, str) else path
        self.name = ", ".join(str(path_of(one, key).absolute()) for one in given) or "the Python standard library"
        self.num_bytes = sum(file.stat().st_size for file, _ in self.files)

    def documents(self, skip: int = 0) -> Iterator[Document]:
        return islice(iterate_documents(self.files, self.text_key), skip, None)


class Stream(Source):
    """A dataset of the Hugging Face Hub, or files in any format that its library reads, streamed.

    Args:
        name: of the dataset; `json`, `text`, `parquet`, `csv`, `arrow` or another format for files.
        config: name of its configuration; None for the only one.
        split: name of its split.
        text_key: column that holds the text.
        files: paths, patterns or addresses of the files to read, local or not; None: those of the dataset.
        key: of the setting that names it, for messages.
        options: of the format.

    Raises:
        MetaTTTError: the library is not installed, or the dataset cannot be opened or has no such column.
    """

    num_bytes = None
    can_skip = True
    begin: Any  #: place of the first document, once it was asked for

    def __init__(
        self,
        name: str,
        config: str | None,
        split: str,
        text_key: str,
        files: str | list[str] | None = None,
        key: str = "source",
        **options: Any,
    ):
        what = f"{key}={name} is no local file or folder, and a dataset of the Hugging Face Hub"
        datasets = need("datasets", extra="text", what=what)
        try:
            self.dataset: Any = datasets.load_dataset(
                name, config, data_files=files, split=split, streaming=True, **options
            )
        except Exception as error:  # no network, no such dataset, no such split: as many kinds of errors
            raise MetaTTTError(f"{key}={name} cannot be opened as a dataset: {_first_line(error)}") from error
        self.key, self.begin = key, None
        given = [] if files is None else [files] if isinstance(files, str) else files
        self.name = "/".join(filter(None, (name, config, split))) + (f" of {', '.join(given)}" if given else "")
        self.text_key = text_key

    def documents(self, skip: int = 0) -> Iterator[Document]:
        rows = iter(self.dataset.skip(skip) if skip else self.dataset)
        for row in count(skip):
            if (text := self._next(rows, row)) is None:
                return
            yield Document(f"{self.name}:{row}", text)  # empty ones too: rows stay countable

    def texts(self, row: int = 0, place: Any = None) -> Iterator[tuple[Any, bytes]]:
        """All documents from a row on, empty ones too, each with its place: plain data that a later call can begin at.

        Args:
            row: of the first document.
            place: of the first document; None for the beginning of the stream.
        """
        try:
            if self.begin is None:
                self.begin = self.dataset.state_dict()
            place = self.begin if place is None else place
            self.dataset.load_state_dict(copy.deepcopy(place))
        except Exception as error:  # the library looks into it as deep as its formats are nested
            raise MetaTTTError(f"{self.key}={self.name} has no such place: {_first_line(error)}") from error
        rows = iter(self.dataset)
        for number in count(row):
            if (text := self._next(rows, number)) is None:
                return
            after = self.dataset.state_dict()
            yield place, text
            place = after

    def _next(self, rows: Iterator[Mapping[str, Any]], row: int) -> bytes | None:
        """The text of the next row; None at the end."""
        text_key = f"{self.key.removesuffix('source').removesuffix('path')}text_key"
        try:
            content = next(rows)
        except StopIteration:
            return None
        except Exception as error:  # the library's own, and those of file formats and of the network
            raise MetaTTTError(f"{self.key}={self.name}: row {row} cannot be read: {_first_line(error)}") from error
        if not isinstance(content.get(self.text_key), str):
            raise MetaTTTError(
                f"{self.key}={self.name}: row {row} has no text in {self.text_key!r}, only {', '.join(content)}: set {text_key}="
            )
        if half := half_a_character(content[self.text_key]):
            raise MetaTTTError(f"{self.key}={self.name}: row {row} holds half a pair of surrogates {half}")
        return bytes(content[self.text_key].encode())


class Divided(Source):
    """What is to be validated on, then what is to be trained on, each from a source of its own.

    Args:
        train, validation: the sources.
    """

    can_skip = False

    def __init__(self, train: Source, validation: Source):
        self.train, self.validation = train, validation
        self.name = f"{train.name}; to validate: {validation.name}"
        sizes = train.num_bytes, validation.num_bytes
        self.num_bytes = None if None in sizes else sum(size for size in sizes if size is not None)

    def documents(self, skip: int = 0) -> Iterator[Document]:
        held = (one._replace(key=f"validation/{one.key}", held_out=True) for one in self.validation.documents())
        return islice(chain(held, (one._replace(held_out=False) for one in self.train.documents())), skip, None)


def open_source(
    source: Any, text_key: str, config: str | None, split: str, files: str | list[str] | None = None, key: str = "source"
) -> Source:
    """Local files where there are any, else a dataset by its name.

    Raises:
        MetaTTTError: neither.
    """
    if source is not None and not isinstance(source, Sequence):
        raise MetaTTTError(f"{key}={source} is no path: give files or folders, or the name of a dataset")
    if files is not None:
        listed = [files] if isinstance(files, str) else files
        if not isinstance(listed, Sequence) or not all(isinstance(file, str) and file.strip() for file in listed):
            raise MetaTTTError(f"dataset_files={files} is no list of paths")
        if not isinstance(source, str):
            raise MetaTTTError(
                f"dataset_files={files} needs their format or a dataset: add source=json, text, parquet, csv, ..."
            )
        return Stream(source, config, split, text_key, files)
    if source is None or not isinstance(source, str):
        return Files(source, text_key, key)
    return Files(source, text_key, key) if is_local(source) else Stream(source, config, split, text_key, None, key)


def is_local(source: str) -> bool:
    """Whether a source is a path, even if nothing is there, and not the name of a dataset on the Hub."""
    path = path_of(source, "source")
    named = path.is_absolute() or source.startswith((".", "~")) or source.count("/") > 1 or source.endswith("/")
    beside = "/" in source and path.parent.is_dir()  # data/typo, where there is a folder data
    return path.exists() or named or beside or path.suffix in (*SUFFIXES, *FOREIGN)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
