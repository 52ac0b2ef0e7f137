"""Windows of the tokens that `metattt prepare` has written, mapped into memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from metattt.data.base import ReadError
from metattt.data.manifest import DOCUMENTS, TOKENS, read_manifest
from metattt.data.tokenizers import read_tokenizer
from metattt.data.windows import Split, WindowData, digest_of, dtype_of, no_test_text
from metattt.errors import MetaTTTError, check_integer
from metattt.io import checksum, inside, path_of
from metattt.registry import register

DOCUMENT_TOKENS = 1024  # of a held-out document, for a sample


class DamagedTokens(ReadError):
    """A file that is not as its manifest says."""


class TokenFile:
    """A file of numbers, mapped into memory when the first are read.

    Args:
        path: the file.
        dtype: of its numbers.
        length: their number.
        checksum: of the file (XXH3, 128 bits).

    Raises:
        DamagedTokens: it is missing, or of another length.
    """

    def __init__(self, path: Path, dtype: np.dtype, length: int, checksum: str):
        self.path, self.dtype, self.length, self.checksum = path, dtype, length, checksum
        try:
            found, expected = path.stat().st_size, length * dtype.itemsize
        except OSError as error:
            raise DamagedTokens(f"{path} cannot be read: {error.strerror}") from error
        if not path.is_file() or found != expected:
            raise DamagedTokens(f"{path} has {found} bytes and not {expected}: it is half-written, or another file")

    def __getstate__(self) -> dict[str, Any]:
        return {key: one for key, one in self.__dict__.items() if key != "numbers"}  # a data worker maps it itself

    def check(self) -> None:
        """Compares the file with its checksum; it takes as long as reading it from the disk.

        Raises:
            DamagedTokens: it is damaged or another file.
        """
        if checksum(self.path) != self.checksum:
            raise DamagedTokens(f"{self.path} is not as metattt prepare wrote it (checksum): prepare the text again")

    @cached_property
    def numbers(self) -> np.ndarray:
        return np.memmap(self.path, self.dtype, "r") if self.length else np.empty(0, self.dtype)

    def read(self, start: int, stop: int) -> np.ndarray:
        """The numbers from `start` to before `stop`."""
        return self.numbers[start:stop]


class TokenWindows:
    """Windows `[N, width]` of a part of a file of tokens, read as they are needed.

    Args:
        file: the tokens.
        start, stop: the part.
        width: tokens per window.
        most: at most so many windows, evenly spread; None: all.
    """

    def __init__(self, file: TokenFile, start: int, stop: int, width: int, most: int | None = None):
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
        verify: compare the files with their checksums when a run begins, which takes as long as reading them. False:
            their sizes alone.

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
        """Reads the manifest and checks the files, once."""
        if hasattr(self, "manifest"):
            return
        manifest = read_manifest(self.folder)
        if manifest is None:
            raise MetaTTTError(
                f"data.path={self.path} holds no shards: write them with "
                f"metattt prepare source=<text> target={self.path}"
            )
        self.tokenizer = read_tokenizer(self.folder, manifest["tokenizer"])
        if manifest["dtype"] != dtype_of(self.tokenizer.vocab_size).name:
            raise MetaTTTError(
                f"{self.folder} was prepared with another tokenizer than its manifest says: prepare the text again"
            )

        def opened(name: str, dtype: str, count: str) -> TokenFile:
            length = sum(split[count] for split in manifest["splits"].values())
            file = TokenFile(inside(self.folder, name), np.dtype(dtype), length, manifest["checksums"][name])
            if self.verify:
                file.check()
            return file

        self.tokens = opened(TOKENS, manifest["dtype"], "tokens")
        self.documents = opened(DOCUMENTS, "int64", "documents")
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
        return TokenWindows(self.tokens, start, stop, width, most)

    def sample_document(self) -> bytes:
        self.setup()
        first = self.manifest["splits"]["train"]["documents"]
        start, end = [*self.documents.read(first, first + 2).tolist(), self.tokens.length][:2]
        return self.tokenizer.decode(self.tokens.read(start, min(end, start + DOCUMENT_TOKENS)).tolist())
