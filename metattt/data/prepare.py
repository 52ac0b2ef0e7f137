"""`metattt prepare`: text to one memory-mapped file of tokens, tokenised in parallel by the library `datasets`.

All is written into `<target>.part` and gets its name at the end. A command that was stopped leaves that folder alone,
with the documents and tokens that `datasets` keeps in it: the same command takes them up.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from metattt.composition.messages import first_line
from metattt.composition.settings import settings
from metattt.data.documents import find_files, iterate_documents, share
from metattt.data.manifest import DOCUMENTS, FORMAT, MANIFEST, TOKENIZER, TOKENS, VERSION, read_manifest, write_signed
from metattt.data.shards import ShardData
from metattt.data.sources import is_local, load
from metattt.data.tokenizers import ByteTokenizer, FileTokenizer, Tokenizer, document_tokens, load_tokenizer
from metattt.data.windows import dtype_of
from metattt.errors import MetaTTTError
from metattt.io import path_of, sync, write_whole
from metattt.locking import locked
from metattt.optional import need

SAME = ("text_key", "validation_fraction", "seed")  # settings that decide what is written, beside source and tokenizer
BATCH = 64  # documents that are tokenised at a time


@dataclass
class Rows:
    """Documents in the order of their source: a `datasets.Dataset` with a column of texts, and of local files one with
    their `key`. `held_out`: they are to validate on; False: to train on; None: as the hash of their names says."""

    table: Any
    name: str
    text_key: str
    held_out: bool | None


def prepare(cfg: DictConfig) -> int:
    """Writes the tokens, their index and the manifest.

    Returns:
        The exit code: 0, or 130 after Ctrl-C, 143 after SIGTERM: then the same command continues it.

    Raises:
        MetaTTTError: a setting, a source or a tokenizer that cannot be used, a folder that holds other things or that
            another process writes to, a full disk.
    """
    chosen = settings(cfg, target="no folder for the tokens is given: add target=<a new folder>")
    console = Console(highlight=False, markup=False, soft_wrap=True)
    folder = path_of(chosen.target, "target")
    library = need("datasets", extra="text", what="metattt prepare")
    if not sys.stderr.isatty():
        library.disable_progress_bars()
    try:
        with _stopped_by_signals():
            manifest = _prepare(chosen, folder, console, library)
    except KeyboardInterrupt as stop:
        console.print(f"stopped. To resume, run the same command again: target={_shown(folder)}")
        return 128 + (stop.args[0] if stop.args else signal.SIGINT)
    except Exception as error:
        raise _in_one_line(error, folder) from error
    table = Table("split", *(f"{column:>16}" for column in ("documents", "bytes of text", "tokens")))
    table.title = _shown(folder)
    for split, counts in manifest["splits"].items():
        table.add_row(split, *(f"{counts[key]:>16,}" for key in ("documents", "bytes", "tokens")))
    console.print(table)
    return 0


def _prepare(chosen: Any, folder: Path, console: Console, library: Any) -> dict[str, Any]:
    tokenizer = load_tokenizer(chosen.tokenizer)
    divided = chosen.validation_source is not None
    given = [("source", chosen.source, chosen.dataset_files, False if divided else None)]
    if divided:
        given.append(("validation_source", chosen.validation_source, None, True))
    names = [_name(chosen, *one[:3]) for one in given]
    said = {"source": "; to validate: ".join(names), **{key: getattr(chosen, key) for key in SAME}}
    stamp = _stamp(given)
    if (known := _written(folder, said, tokenizer.identity, stamp)) is not None:
        console.print(f"{_shown(folder)} is complete already")
        return known
    folder = folder.resolve()  # of a link, the empty folder that it leads to
    part = folder.with_name(f"{folder.name}.part")
    part.mkdir(parents=True, exist_ok=True)
    new, cache = part / "new", part / "cache"
    try:
        with locked(part, "metattt prepare"):
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir()
            rows = [_rows(library, chosen, *one, name, cache, console) for one, name in zip(given, names, strict=True)]
            for one in rows:
                one.table = _tokenised(library, one, chosen, tokenizer.content)
            written = _write(new, rows, chosen, tokenizer)
            if tokenizer.content is not None:
                write_whole(new / TOKENIZER, tokenizer.content.encode())
            manifest = {
                "format": FORMAT, "version": VERSION, "dtype": dtype_of(tokenizer.vocab_size).name, "settings": said,
                "tokenizer": tokenizer.identity, "files": stamp, **written,
            }  # fmt: skip
            write_signed(new / MANIFEST, manifest)
            new.replace(folder)
            sync(folder.parent)
            shutil.rmtree(cache, ignore_errors=True)
    finally:
        with suppress(OSError):
            part.rmdir()  # unless something is in it
    return manifest


def _stamp(given: Sequence[tuple[str, Any, Any, Any]]) -> str | None:
    """What tells the local files of the sources from others of these names, or from what they were before; None if they
    cannot be read."""
    try:
        found = [find_files(source, key) for key, source, files, _ in given if _is_here(source, files)]
        local = [file for one in found for file, _ in one]
        named = [[files] if isinstance(files, str) else files or () for _, _, files, _ in given]
        local += [Path(file) for one in named for each in one for file in sorted(glob(str(each), recursive=True))]
        stamps = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in local]
    except (MetaTTTError, OSError):
        return None
    return xxhash.xxh3_128_hexdigest(repr(stamps).encode())


def _written(
    folder: Path, said: Mapping[str, Any], tokenizer: dict[str, Any], stamp: str | None
) -> dict[str, Any] | None:
    """The manifest of a target that was written before by the same command; None if nothing is there yet.

    Raises:
        MetaTTTError: other things, tokens of other settings or of files that have changed, or damaged ones.
    """
    if not os.path.lexists(folder):
        return None
    if not folder.is_dir():
        raise MetaTTTError(f"target={folder} exists and is not a folder: choose a new one")
    manifest = read_manifest(folder)
    if manifest is None:
        if any(folder.iterdir()):
            raise MetaTTTError(f"target={folder} exists and holds other files: choose a new folder")
        return None
    before = {**manifest["settings"], "tokenizer": manifest["tokenizer"]}
    for key, value in {**said, "tokenizer": tokenizer}.items():
        if before[key] != value:
            raise MetaTTTError(
                f"target={folder} was prepared with {key}={before[key]}, not {value}: choose a new folder"
            )
    if stamp is not None and manifest.get("files", stamp) != stamp:
        raise MetaTTTError(f"the files of source have changed since target={folder} was prepared: choose a new folder")
    ShardData(path=str(folder)).setup()
    return manifest


# -- documents ---------------------------------------------------------------------------------------------------------


def _is_here(source: Any, files: Any) -> bool:
    return files is None and (not isinstance(source, str) or is_local(source))


def _name(chosen: Any, key: str, source: Any, files: Any) -> str:
    """The name of a source: the same text has the same name."""
    if _is_here(source, files):
        paths = [source] if isinstance(source, str) else source or []
        return ", ".join(str(path_of(one, key).absolute()) for one in paths) or "the Python standard library"
    if not isinstance(source, str):
        raise MetaTTTError(f"dataset_files={files} needs their format or a dataset: add source=json, text, csv, ...")
    given = [] if files is None else [files] if isinstance(files, str) else map(str, files)
    return "/".join(filter(None, (source, chosen.dataset_config, chosen.dataset_split, *given)))


def _rows(
    library: Any, chosen: Any, key: str, source: Any, files: Any, held_out: bool | None, name: str,
    cache: Path, console: Console,
) -> Rows:  # fmt: skip
    """The documents of a source: of local files, which may be any bytes, by our readers, of others by `datasets`."""
    if _is_here(source, files):
        found = find_files(source, key)
        if next(iterate_documents(found, chosen.text_key, "text_key"), None) is None:
            raise MetaTTTError(f"{key}={source} holds no text")
        stamps = [(str(file), str(base), file.stat().st_size, file.stat().st_mtime_ns) for file, base in found]
        features = library.Features({"key": library.Value("binary"), "text": library.Value("large_binary")})
        table = library.Dataset.from_generator(
            _documents, features, str(cache), gen_kwargs={"files": stamps, "text_key": chosen.text_key}
        )
        return Rows(table, name, "text", held_out)
    if files is None:
        console.print(f"there is no {source} here: asking the Hugging Face Hub for a dataset of that name")
    options = {} if files is None else {"cache_dir": str(cache)}
    table = load(source, chosen.dataset_config, chosen.dataset_split, chosen.text_key, files, key, **options)
    kind = table.features[chosen.text_key]
    if kind not in (library.Value("string"), library.Value("large_string")):
        raise MetaTTTError(f"{key}={source} has no text in {chosen.text_key!r}, only {kind}: set text_key=")
    return Rows(table.select_columns([chosen.text_key]), name, chosen.text_key, held_out)


def _documents(files: list[tuple[str, str, int, int]], text_key: str) -> Iterator[dict[str, bytes]]:
    """Local documents. `datasets` names its cache after the arguments: a file that has changed has another time."""
    paths = [(Path(file), Path(base)) for file, base, _, _ in files]
    for document in iterate_documents(paths, text_key, "text_key"):
        yield {"key": document.name, "text": document.text}


# -- tokens ------------------------------------------------------------------------------------------------------------


def _tokenised(library: Any, rows: Rows, chosen: Any, tokenizer: str | None) -> Any:
    """In place of its text, the tokens of every document and the bytes of its text. What decides about the splits is
    not known here: `datasets` need not tokenise again for another one."""
    kinds = {name: rows.table.features[name] for name in rows.table.column_names if name != rows.text_key}
    kinds |= {"tokens": library.Value("large_binary"), "bytes": library.Value("int64")}
    count = min(chosen.workers or os.cpu_count() or 1, len(rows.table))
    return rows.table.map(
        _tokens, batched=True, batch_size=BATCH, num_proc=count if count > 1 else None, remove_columns=[rows.text_key],
        features=library.Features(kinds), fn_kwargs={"tokenizer": tokenizer, "text_key": rows.text_key},
        desc="tokenising",
    )  # fmt: skip


def _tokens(batch: Mapping[str, list[Any]], tokenizer: str | None, text_key: str) -> dict[str, list[Any]]:
    encoder = _tokenizer(tokenizer)
    dtype = dtype_of(encoder.vocab_size)
    texts = [text.encode() if isinstance(text, str) else text or b"" for text in batch[text_key]]
    tokens = [document_tokens(encoder, text, dtype).tobytes() for text in texts]
    return {"tokens": tokens, "bytes": list(map(len, texts))}


@lru_cache(1)
def _tokenizer(content: str | None) -> Tokenizer:
    return ByteTokenizer() if content is None else FileTokenizer(content, "the text of tokenizer=")


def _split(rows: Rows, chosen: Any) -> Iterator[tuple[bool, bytes, int]]:
    """Of every document that is not empty: whether it is to validate on, its tokens, and the bytes of its text."""
    number = 0
    for batch in rows.table.iter(BATCH):
        for place, (tokens, length) in enumerate(zip(batch["tokens"], batch["bytes"], strict=True)):
            name = batch["key"][place] if "key" in batch else f"{rows.name}:{number}".encode()
            by_name = share(name, chosen.seed) < chosen.validation_fraction
            if length:
                yield by_name if rows.held_out is None else rows.held_out, tokens, length
            number += 1


def _write(folder: Path, sources: Sequence[Rows], chosen: Any, tokenizer: Tokenizer) -> dict[str, Any]:
    """The tokens of all documents, those to train on first; their counts, and the checksums of the files. What is in
    `validation_source` is left out of the training text.
    """
    splits, hasher, starts = {}, xxhash.xxh3_128(), array("q")
    size, place = dtype_of(tokenizer.vocab_size).itemsize, 0
    apart = (one for rows in sources if rows.held_out for one in _split(rows, chosen))
    known = {xxhash.xxh3_128_digest(tokens) for _, tokens, _ in apart}
    with (folder / TOKENS).open("wb") as file:
        for split in ("train", "validation"):
            counts = dict.fromkeys(("documents", "bytes", "tokens"), 0)
            for held_out, tokens, length in (one for rows in sources for one in _split(rows, chosen)):
                if held_out != (split == "validation"):
                    continue
                if known and not held_out and xxhash.xxh3_128_digest(tokens) in known:
                    continue
                starts.append(place)
                file.write(tokens)
                hasher.update(tokens)
                place += len(tokens) // size
                for key, count in (("documents", 1), ("bytes", length), ("tokens", len(tokens) // size)):
                    counts[key] += count
            splits[split] = counts
            if not counts["documents"] and (split == "train" or chosen.validation_fraction > 0):
                raise MetaTTTError(
                    f"no document is in the {split} split: set validation_fraction (now {chosen.validation_fraction}) "
                    "or seed, or give files of their own to validate on: validation_source=<files>"
                )
    sync(folder / TOKENS)
    index = np.frombuffer(starts, np.int64).tobytes()
    write_whole(folder / DOCUMENTS, index)
    checksums = {TOKENS: hasher.hexdigest(), DOCUMENTS: xxhash.xxh3_128_hexdigest(index)}
    return {"splits": splits, "checksums": checksums}


# -- stops and errors --------------------------------------------------------------------------------------------------


def _in_one_line(error: BaseException, folder: Path) -> MetaTTTError:
    """The error of ours, or of the disk, that the library has wrapped; else what the library says."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    for one in causes:
        if isinstance(one, MetaTTTError):
            return one
        if isinstance(one, OSError) and one.errno is not None:
            advice = ": free some, or choose a folder on another disk" if one.errno == errno.ENOSPC else ""
            return MetaTTTError(f"{one.filename or folder}: {one.strerror or one}{advice}")
    return MetaTTTError(f"the text cannot be prepared: {first_line(error)}")


def _shown(path: Path) -> str:
    """A path as text that can be printed: its name need not be UTF-8."""
    return os.fsencode(path).decode(errors="backslashreplace")


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """SIGTERM counts as Ctrl-C meanwhile, and processes that tokenise end without a word."""
    main = os.getpid()

    def stop(number: int, frame: object) -> None:
        if os.getpid() != main:
            os._exit(1)
        raise KeyboardInterrupt(number)

    before = {one: signal.signal(one, stop) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
