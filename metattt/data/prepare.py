"""`metattt prepare`: text to memory-mapped shards of tokens, in parallel, going on where a killed run stopped.

The documents are cut, in their order, into units of `shard_bytes` of text. A unit becomes one shard per split, whoever
tokenises it and whenever, so that the files do not depend on the number of workers or on interruptions. What is known
of a unit is written before its shards get their names: a shard without a record is not ours.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from rich.text import Text

from metattt.composition.settings import settings
from metattt.data.progress import BytesProgress
from metattt.data.sources import Divided, Source, is_local, open_source
from metattt.data.target import begin, check_free, finish
from metattt.data.tokenizers import load_tokenizer
from metattt.data.units import Work, cut, digest, finished_units, is_held_out, size, start_worker, write_unit
from metattt.errors import MetaTTTError, check_integer
from metattt.io import path_of
from metattt.locking import FolderLock

LIMITS = {"shard_bytes": 2**40, "workers": 1024}


@dataclass
class PrepareSettings:
    """The keys of `configs/prepare.yaml`."""

    target: str
    source: Any = None
    text_key: str = "text"
    dataset_config: str | None = None
    dataset_split: str = "train"
    dataset_files: Any = None
    tokenizer: str = "bytes"
    validation_source: Any = None
    validation_fraction: float = 0.01
    seed: int = 0
    shard_bytes: int = 2**26
    workers: int | None = None


def prepare(cfg: DictConfig) -> int:
    """Writes the shards and the manifest, or what is missing of them.

    Args:
        cfg: the configuration of the job `prepare`.

    Returns:
        The exit code: 0, or 130 after Ctrl-C, 143 after SIGTERM: then the same command goes on.

    Raises:
        MetaTTTError: a setting, a source or a tokenizer that cannot be used, a folder that holds other things or that
            another process writes to, a full disk.
    """
    chosen = _settings(cfg)
    console = Console(highlight=False, soft_wrap=True)
    folder = path_of(chosen.target, "target")
    try:
        with _stopped_by(signal.SIGTERM):
            return _prepare(chosen, folder, console)
    except KeyboardInterrupt as error:
        console.print(f"stopped. To go on: the same command again, target={_shown(folder)}", markup=False)
        return 128 + (error.args[0] if error.args else signal.SIGINT)
    except OSError as error:
        advice = ": free some, or choose a folder on another disk" if error.errno == errno.ENOSPC else ""
        raise MetaTTTError(f"{error.filename or folder}: {error.strerror or error}{advice}") from error
    except BrokenProcessPool as error:
        raise MetaTTTError(
            "a process that tokenises was ended: too little memory? Set workers= or shard_bytes= to less; the same command goes on"
        ) from error


def _prepare(chosen: PrepareSettings, folder: Path, console: Console) -> int:
    tokenizer = load_tokenizer(chosen.tokenizer)
    if isinstance(chosen.source, str) and chosen.dataset_files is None and not is_local(chosen.source):
        console.print(f"there is no {chosen.source} here: asking the Hugging Face Hub for a dataset of that name")
    source = open_source(
        chosen.source, chosen.text_key, chosen.dataset_config, chosen.dataset_split, chosen.dataset_files
    )
    if chosen.validation_source is not None:
        held_out = open_source(
            chosen.validation_source, chosen.text_key, chosen.dataset_config, chosen.dataset_split, key="validation_source"
        )
        source = Divided(source, held_out)
    check_free(folder)
    _check_splits(source, chosen)
    folder.mkdir(parents=True, exist_ok=True)
    with FolderLock(folder, "metattt prepare"):
        same = {key: getattr(chosen, key) for key in ("text_key", "validation_fraction", "seed", "shard_bytes")}
        manifest = begin(folder, {"source": source.name, **same}, tokenizer)
        if manifest["complete"]:
            console.print(f"{_shown(folder)} is complete already", markup=False)
        else:
            work = Work(folder, manifest["settings"]["tokenizer"], chosen.validation_fraction, chosen.seed)
            manifest = finish(folder, manifest, _write_units(work, chosen, source))
    console.print(_table(_shown(folder), manifest))
    return 0


def _check_splits(source: Source, chosen: PrepareSettings) -> None:
    """Reads documents until each split has one, before any is tokenised.

    Raises:
        MetaTTTError: a split without documents.
    """
    wanted = {True, False} if chosen.validation_fraction > 0 else {False}
    for document in source.documents():
        wanted.discard(is_held_out(document, chosen.validation_fraction, chosen.seed))
        if not wanted:
            return
    raise MetaTTTError(
        f"no document is in the {'train' if False in wanted else 'validation'} split: set validation_fraction "
        f"(now {chosen.validation_fraction}) or seed, or give files of their own to validate on: validation_source=<files>"
    )


def _table(title: str, manifest: dict[str, Any]) -> Table:
    """What is in the shards."""
    columns = (f"{column:>10}" for column in ("documents", "MB of text", "M tokens", "shards"))
    table = Table("split", *columns, title=Text(title))
    for split, counts in manifest["splits"].items():
        number = sum(shard["split"] == split for shard in manifest["shards"])
        table.add_row(
            split,
            f"{counts['documents']:>10,}",
            f"{counts['bytes'] / 1e6:>10,.1f}",
            f"{counts['tokens'] / 1e6:>10,.2f}",
            f"{number:>10}",
        )
    return table


def _shown(path: Path) -> str:
    """A path as text that can be printed: its name need not be UTF-8."""
    return os.fsencode(path).decode(errors="backslashreplace")


@contextmanager
def _stopped_by(one: signal.Signals) -> Iterator[None]:
    """A signal counts as Ctrl-C meanwhile. In the main thread only: no other may say what a signal does."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(one, stop)
    try:
        yield
    finally:
        signal.signal(one, before)


def _settings(cfg: DictConfig) -> PrepareSettings:
    chosen = settings(PrepareSettings, cfg, target="no folder for the shards is given: add target=<a new folder>")
    if not 0 <= chosen.validation_fraction < 1:
        raise MetaTTTError(
            f"validation_fraction={chosen.validation_fraction} is not allowed: it must be at least 0 and less than 1"
        )
    for key, most in LIMITS.items():
        if getattr(chosen, key) is not None:
            check_integer(key, getattr(chosen, key), most=most)
    if not -(2**63) <= chosen.seed < 2**63:
        raise MetaTTTError("seed is not allowed: it must have 64 bits at most")
    return chosen


def _write_units(work: Work, chosen: PrepareSettings, source: Source) -> list[dict[str, Any]]:
    """Tokenises all units that are not there yet; the records of all."""
    records = finished_units(work)
    leading = next(index for index in range(len(records) + 1) if index not in records)
    skipped = leading if source.can_skip else 0
    documents = source.documents(sum(records[index]["documents"] for index in range(skipped)))
    workers = chosen.workers or os.cpu_count() or 1
    pending: deque[tuple[int, Future[dict[str, Any]]]] = deque()
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=start_worker, initargs=(work,))
    try:
        with BytesProgress(source.num_bytes, sum(map(size, records.values()))) as progress:
            changed = f"source={source.name} has changed since {work.folder} was begun: choose a new folder"
            index = skipped - 1
            for index, unit in enumerate(cut(documents, chosen.shard_bytes), start=skipped):
                if index in records:
                    if records[index]["input"] != digest(unit):
                        raise MetaTTTError(changed)
                    continue
                pending.append((index, pool.submit(write_unit, index, unit)))
                while len(pending) > workers:  # one unit waits for every worker
                    _collect(pending, records, progress)
            if max(records, default=-1) > index:  # there were more documents
                raise MetaTTTError(changed)
            while pending:
                _collect(pending, records, progress)
    except BaseException:  # nobody waits for units that are being written: they are there as a whole or not at all
        for process in list((pool._processes or {}).values()):
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    return [records[index] for index in sorted(records)]


def _collect(
    pending: deque[tuple[int, Future[dict[str, Any]]]], records: dict[int, dict[str, Any]], progress: BytesProgress
) -> None:
    index, future = pending.popleft()
    records[index] = future.result()
    progress.advance(size(records[index]))
