"""What a user names as a source of text: files here, files in any format of the library `datasets`, or a dataset of the
Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from metattt.data.documents import FOREIGN, SUFFIXES
from metattt.errors import MetaTTTError
from metattt.io import path_of
from metattt.optional import need


def check_source(source: Any, files: Any, key: str = "source") -> None:
    """Refuses what is no source.

    Raises:
        MetaTTTError: naming what is allowed.
    """
    if source is not None and not isinstance(source, Sequence):
        raise MetaTTTError(f"{key}={source} is not a path: give files or folders, or the name of a dataset")
    for one in [source] if isinstance(source, str) else source or []:
        path_of(one, key)
    if files is None:
        return
    listed = [files] if isinstance(files, str) else files
    if not isinstance(listed, Sequence) or not all(isinstance(file, str) and file.strip() for file in listed):
        raise MetaTTTError(f"dataset_files={files} is not a list of paths")
    if not isinstance(source, str):
        raise MetaTTTError(
            f"dataset_files={files} needs their format or a dataset: add source=json, text, parquet, csv, ..."
        )


def name_of(source: Any, config: str | None, split: str, files: Any) -> str:
    """The name of a source: the same text has the same name."""
    given = [] if files is None else [files] if isinstance(files, str) else files
    if files is None and (not isinstance(source, str) or is_local(source)):
        paths = [source] if isinstance(source, str) else source or []
        return ", ".join(str(path_of(one, "source").absolute()) for one in paths) or "the Python standard library"
    return "/".join(filter(None, (source, config, split))) + (f" of {', '.join(given)}" if given else "")


def is_local(source: str) -> bool:
    """Whether a source is a path, even if nothing is there, and not the name of a dataset on the Hub."""
    path = path_of(source, "source")
    named = path.is_absolute() or source.startswith((".", "~")) or source.count("/") > 1 or source.endswith("/")
    beside = "/" in source and path.parent.is_dir()  # data/typo, where there is a folder data
    return path.exists() or named or beside or path.suffix in (*SUFFIXES, *FOREIGN)


def load(name: str, config: str | None, split: str, text_key: str, files: Any, key: str, **options: Any) -> Any:
    """A dataset of the Hub or of files, by `datasets.load_dataset`.

    Args:
        name: of the dataset; `json`, `text`, `parquet`, `csv`, `arrow` or another format for files.
        config: name of its configuration; None for the only one.
        split: name of its split.
        text_key: column that holds the text.
        files: paths, patterns or addresses of the files to read, local or not; None: those of the dataset.
        key: of the setting that names it, for messages.
        options: of the library.

    Raises:
        MetaTTTError: the library is not installed, or the dataset cannot be opened or has no such column.
    """
    what = f"{key}={name} is no local file or folder, and a dataset of the Hugging Face Hub"
    datasets = need("datasets", extra="text", what=what)
    try:
        found = datasets.load_dataset(name, config, data_files=files, split=split, **options)
    except Exception as error:  # no network, no such dataset, no such split: as many kinds of errors
        raise MetaTTTError(f"{key}={name} cannot be opened as a dataset: {first_line(error)}") from error
    if found.column_names is not None and text_key not in found.column_names:
        setting, names = f"{key.removesuffix('source').removesuffix('path')}text_key", ", ".join(found.column_names)
        raise MetaTTTError(f"{key}={name} has no text in {text_key!r}, only {names}: set {setting}=")
    return found


def first_line(error: BaseException) -> str:
    """What an error of a library says first."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
