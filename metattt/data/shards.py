"""Windows of the tokens that `metattt prepare` has written, mapped into memory."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
import xxhash

from metattt.data.base import ReadError
from metattt.data.manifest import DOCUMENTS, TOKENS, read_manifest
from metattt.data.tokenizers import read_tokenizer
from metattt.data.windows import Split, WindowData, digest_of, dtype_of, no_test_text
from metattt.errors import MetaTTTError, check_integer
from metattt.io import inside, path_of
from metattt.registry import register

DOCUMENT_TOKENS = 1024  # of a held-out document, for a sample
CHUNK = 2**24  # bytes that are read and checked at a time


class DamagedTokens(ReadError):
    """A file that is not as its manifest says."""


class NumbersFile:
    """A file of numbers, mapped into memory, that is compared with what is known of it before the first are read.

    The file is looked at again (its size and time) with every read, and checked again if it has changed.

    Args:
        path: the file.
        dtype: of its numbers.
        length: their number.
        checksum: of the file (XXH3, 128 bits); None: it is not compared, its size alone.
        below: every number that is read is below this one; None: any is allowed.
    """

    def __init__(self, path: Path, dtype: np.dtype, length: int, checksum: str | None, below: int | None = None):
        self.path, self.dtype, self.length, self.checksum, self.below = path, dtype, length, checksum, below
        self.checked: tuple[int, ...] | None = None  # the file as it was when it was checked
        self._numbers: np.ndarray | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_numbers": None}  # for a process that makes batches: it maps the file itself

    def check(self) -> None:
        """Compares the file with what is known of it, unless this was done since it was written. Its checksum takes as
        long as reading it from the disk.

        Raises:
            DamagedTokens: it is missing, damaged or another file.
        """
        try:
            now = self._look()
            if now == self.checked:
                return
            if self.checksum is not None:
                hasher = xxhash.xxh3_128()
                with self.path.open("rb") as file:
                    while piece := file.read(CHUNK):
                        hasher.update(piece)
                if hasher.hexdigest() != self.checksum or self._look() != now:
                    raise DamagedTokens(
                        f"{self.path} is not as metattt prepare wrote it (checksum): prepare the text again"
                    )
        except OSError as error:
            raise DamagedTokens(f"{self.path} cannot be read: {error.strerror}") from error
        self.checked, self._numbers = now, None

    def _look(self) -> tuple[int, ...]:
        found, expected = self.path.stat(), self.length * self.dtype.itemsize
        if not self.path.is_file() or found.st_size != expected:
            raise DamagedTokens(
                f"{self.path} has {found.st_size} bytes and not {expected}: it is half-written, or another file"
            )
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

    def read(self, start: int, stop: int) -> np.ndarray:
        """The numbers from `start` to before `stop`.

        Raises:
            DamagedTokens: as `check`; numbers that cannot be.
        """
        self.check()
        if self._numbers is None:
            self._numbers = np.memmap(self.path, self.dtype, "r") if self.length else np.empty(0, self.dtype)
        found = self._numbers[start:stop]
        if self.below is not None and len(found) and (largest := found.max()) >= self.below:
            said = f"{self.path} holds the token {largest}, and its tokenizer has {self.below}"
            raise DamagedTokens(f"{said}: prepare the text again")
        return found


def check_together(file: NumbersFile) -> None:
    """Checks a file; in a run of several processes, one of each machine does, and all learn what came out.

    Raises:
        DamagedTokens: in all processes.
    """
    if not (dist.is_available() and dist.is_initialized()):
        file.check()
        return
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    first = hosts.index(hosts[dist.get_rank()])
    failure: str | None = None
    if first == dist.get_rank():
        try:
            file.check()
        except Exception as error:  # whatever it is: the others wait for what this process has to say
            failure = str(error) or type(error).__name__
    reports: list[Any] = [None] * len(hosts)
    dist.all_gather_object(reports, (failure, file.checked))
    for said, _ in reports:
        if said is not None:
            raise DamagedTokens(said)
    file.checked = reports[first][1]


class TokenWindows:
    """Windows `[N, width]` of a part of a file of tokens, read as they are needed.

    Args:
        file: the tokens.
        start, stop: the part.
        width: tokens per window.
        most: at most so many windows, evenly spread; None: all.
    """

    def __init__(self, file: NumbersFile, start: int, stop: int, width: int, most: int | None = None):
        self.file, self.start, self.width = file, start, width
        self.count = (stop - start) // width
        self.rows = None if most is None else np.arange(min(self.count, most)) * self.count // min(self.count, most)

    def __len__(self) -> int:
        return self.count if self.rows is None else len(self.rows)

    def __getitem__(self, index: Sequence[int]) -> np.ndarray:
        rows = index if self.rows is None else self.rows[index]
        starts = [self.start + int(row) * self.width for row in rows]
        return np.stack([self.file.read(start, start + self.width) for start in starts])

    @property
    def size(self) -> int:
        return len(self) * self.width


@register(group="data", name="shards")
class ShardData(WindowData):
    """Prepared tokens, cut into windows without overlap.

    Args:
        path: a folder that `metattt prepare` has written.
        context_length: T, tokens that the model reads (a window has one more: the last label).
        batch_size: windows per batch in each process, at most.
        validation_max_tokens: validate on at most this many tokens, evenly spread. None: on all.
        seed: of the order of the windows.
        num_workers: processes that make batches; 0 makes them in the training process.
        document_reset: the inner loop starts again where a document starts, so that documents do not see each other.
        verify: check the file of tokens against its checksum when a run begins, which takes as long as reading it.
            False: its size alone, and that the tokenizer has the tokens that are read.

    Raises:
        MetaTTTError: a size that is not allowed; from `setup`: a folder of other things, or files that are not as they
            were written.
    """

    def __init__(
        self,
        path: str,
        context_length: int = 2048,
        batch_size: int = 8,
        validation_max_tokens: int | None = None,
        seed: int = 0,
        num_workers: int = 0,
        document_reset: bool = False,
        verify: bool = True,
    ):
        super().__init__(context_length, batch_size, seed, num_workers, document_reset)
        if validation_max_tokens is not None:
            check_integer("data.validation_max_tokens", validation_max_tokens)
        self.path, self.validation_max_tokens, self.verify = path, validation_max_tokens, verify
        self.folder = path_of(path, "data.path")

    def setup(self, stage: str | None = None) -> None:
        """Reads the manifest, once; for a run, checks the tokens, together with its other processes."""
        if not hasattr(self, "manifest"):
            self._read()
        if self.trainer is not None:
            check_together(self.tokens)

    def _read(self) -> None:
        manifest = read_manifest(self.folder)
        if manifest is None:
            raise MetaTTTError(
                f"data.path={self.path} holds no shards: write them with "
                f"metattt prepare source=<text> target={self.path}"
            )
        self.tokenizer = read_tokenizer(self.folder, manifest["tokenizer"])
        size, splits, sums = self.tokenizer.vocab_size, manifest["splits"].values(), manifest["checksums"]
        if manifest["dtype"] != dtype_of(size).name:
            raise MetaTTTError(f"{self.folder} has tokens of another tokenizer than it says: prepare the text again")

        def numbers(name: str, dtype: Any, count: str, below: int) -> NumbersFile:
            length, checksum = sum(split[count] for split in splits), sums[name] if self.verify else None
            file = NumbersFile(inside(self.folder, name), np.dtype(dtype), length, checksum, below)
            try:
                file._look()
            except OSError as error:
                raise DamagedTokens(f"{file.path} cannot be read: {error.strerror}") from error
            return file

        self.tokens = numbers(TOKENS, manifest["dtype"], "tokens", size)
        self.documents = numbers(DOCUMENTS, np.int64, "documents", self.tokens.length)
        self.manifest = manifest

    @property
    def source(self) -> str:
        return self.path

    def fingerprint(self) -> str:
        return digest_of(*(str(self.manifest[key]).encode() for key in ("splits", "checksums")))

    def windows(self, name: Split) -> TokenWindows:
        """The windows of one split; `all` is the training windows and then those of validation.

        Raises:
            MetaTTTError: if the split is shorter than one window; `test`.
        """
        if name == "test":
            raise no_test_text(self.path)
        self.setup()
        border, width, end = self.manifest["splits"]["train"]["tokens"], self.context_length + 1, self.tokens.length
        start, stop = {"train": (0, border), "validation": (border, end), "all": (0, end)}[name]
        if stop - start < width:
            raise MetaTTTError(
                f"the {name} text of data.path={self.path} has {stop - start} tokens, fewer than the {width} of one "
                f"window: set data.context_length={max(1, stop - start - 1)} or less, or prepare more text"
            )
        limited = name != "train" and self.validation_max_tokens is not None
        most = max(1, (self.validation_max_tokens or 0) // width) if limited else None
        self.tokens.check()  # in this process, and not in each of those that make batches
        return TokenWindows(self.tokens, start, stop, width, most)

    def sample_document(self) -> bytes:
        self.setup()
        first = self.manifest["splits"]["train"]["documents"]
        start, end = [*self.documents.read(first, first + 2).tolist(), self.tokens.length][:2]
        return self.tokenizer.decode(self.tokens.read(start, min(end, start + DOCUMENT_TOKENS)).tolist())
