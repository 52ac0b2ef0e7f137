"""What a user names as a source of data: files here, files in any format of the library `datasets`, or a dataset of the
Hugging Face Hub; the columns and classes of the last."""

from __future__ import annotations

from typing import Any

from metattt.composition.messages import first_line
from metattt.data.documents import SUFFIXES
from metattt.errors import MetaTTTError
from metattt.io import path_of
from metattt.optional import need

FOREIGN = {  # suffix: format in the library of Hugging Face; None for compression, whose format stands before it
    **dict.fromkeys((".gz", ".zst", ".bz2", ".xz", ".zip")),
    **{".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".txt": "text", ".parquet": "parquet",
       ".arrow": "arrow"},
}  # fmt: skip


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
        options: of the library. A file of `text` is one document, and not each of its lines.

    Raises:
        MetaTTTError: the library is not installed, or the dataset cannot be opened or has no such column.
    """
    what = f"{key}={name} is no local file or folder, and a dataset of the Hub" if files is None else f"reading {files}"
    datasets = need("datasets", extra="text", what=what)
    where = "" if files is None else f" in {files}"
    options |= {"sample_by": "document"} if name == "text" else {}
    try:
        found = datasets.load_dataset(name, config, data_files=files, split=split, **options)
    except Exception as error:  # no network, no such dataset, no such split: as many kinds of errors
        cause = error.__cause__ if type(error).__name__ == "DatasetGenerationError" else None  # it says only that
        reason = "no rows" if isinstance(error, StopIteration) else first_line(cause or error)
        raise MetaTTTError(f"{key}={name} cannot be opened as a dataset: {reason}{where}") from error
    if found.column_names is not None and text_key not in found.column_names:
        setting, names = "data.text_key" if key == "data.path" else "text_key", ", ".join(found.column_names)
        raise MetaTTTError(f"{key}={name} has no text in {text_key!r}{where}, only {names}: set {setting}=")
    return found


def check_pictures(name: str, reader: Any, image: str, label: str) -> None:
    """Raises an error if the columns of a dataset of the Hub are others: timm's reader would say so late, or never."""
    source: Any = getattr(reader, "builder", getattr(reader, "dataset", None))
    columns = dict(source.info.features or {})
    if image in columns and not hasattr(reader, "builder") and None in source[:1][image]:
        del columns[image]  # the reader has made it
    numbers = str(getattr(columns.get(label), "dtype", "")).startswith(("int", "uint", "bool"))
    if columns and (image not in columns or not numbers):
        raise MetaTTTError(
            f"data.dataset={name} has the columns {', '.join(columns)}, and needs pictures and numbers of classes, not "
            f"{image} and {label}: set data.image_key=<column> data.label_key=<column>"
        )


def names_of_classes(data: Any) -> list[str] | None:
    """The names that a data set of timm or torchvision, or its reader, gives to the labels 0, 1, ...; None: none."""
    for source in (data, getattr(data, "reader", None), getattr(data, "dataset", None)):
        # a folder's name, or a tar's
        classes = getattr(source, "class_to_idx", None) or getattr(source, "class_name_to_idx", None)
        if classes:
            return [str(name) for name in sorted(classes, key=classes.__getitem__)]
    return None


def in_order(names: list[str] | None) -> list[str] | None:
    """Names of classes that timm has sorted, the same in every process. Names that differ only in case or leading zeros
    are equal to timm, and their order depends on Python's hashes. Names in another order stay as they are."""
    key = need("timm.utils", extra="images", what="reading images").natural_key
    ordered = sorted(sorted(names or ()), key=key)
    return ordered if names and list(map(key, ordered)) == list(map(key, names)) else names
