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
from metattt.data.windows import Split, WindowData, digest_of, dtype_of
from metattt.errors import MetaTTTError
from metattt.io import check_own, checksum, path_of
from metattt.registry import register
from metattt.setting import REQUIRED, setting

DOCUMENT_TOKENS = 1024  # of a held-out document, for a sample


class DamagedTokens(ReadError):
    """A file that is not as its manifest says."""


class Numbers:
    """A file of numbers, mapped into memory when the first are read; a data worker maps it itself."""

    def __init__(self, path: Path, dtype: np.dtype):
        self.path, self.dtype = path, dtype

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "dtype": self.dtype}

    @cached_property
    def all(self) -> np.ndarray:
        return np.memmap(self.path, self.dtype, "r") if self.path.stat().st_size else np.empty(0, self.dtype)


class TokenWindows:
    """Windows `[N, width]` of a part of a file of tokens, read as they are needed.

    Args:
        tokens: the file.
        start, stop: the part.
        width: tokens per window.
        most: at most so many windows, evenly spread; None: all.
    """

    def __init__(self, tokens: Numbers, start: int, stop: int, width: int, most: int | None = None):
        self.tokens, self.start, self.width = tokens, start, width
        self.count = (stop - start) // width
        self.rows = None if most is None else np.arange(min(self.count, most)) * self.count // min(self.count, most)

    def __len__(self) -> int:
        return self.count if self.rows is None else len(self.rows)

    def __getitem__(self, index: Sequence[int]) -> np.ndarray:
        rows = index if self.rows is None else self.rows[index]
        starts = [self.start + int(row) * self.width for row in rows]
        return np.stack([self.tokens.all[start : start + self.width] for start in starts])

    @property
    def size(self) -> int:
        return len(self) * self.width


@register(group="data", name="shards")
class ShardData(WindowData):
    """Prepared tokens, cut into windows without overlap.

    Args:
        path: a folder that `metattt prepare` has written.
        validation_max_tokens: validate on at most this many tokens, evenly spread; the split `all` too.
            None: on all.
        context_length, batch_size, seed, num_workers, document_reset: see `WindowData`.
        verify: compare the files with their checksums when a run begins, which takes as long as reading them. False:
            their sizes alone.

    Raises:
        MetaTTTError: a size that is not allowed; from `setup`: a folder of other things, or files that are not as they
            were written.
    """

    path: str = setting(default=REQUIRED)
    validation_max_tokens: int | None = setting(default=None)
    verify: bool = setting(default=True)

    def check_settings(self) -> None:
        super().check_settings()
        self.folder = path_of(self.path, "data.path")

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
        self.length = sum(split["tokens"] for split in manifest["splits"].values())
        count = sum(split["documents"] for split in manifest["splits"].values())
        self.tokens = Numbers(self.folder / TOKENS, dtype_of(self.tokenizer.vocab_size))
        self.documents = Numbers(self.folder / DOCUMENTS, np.dtype(np.int64))
        for numbers, length in ((self.tokens, self.length), (self.documents, count)):
            check_own(numbers.path)
            found, expected = numbers.path.stat().st_size, length * numbers.dtype.itemsize
            fault = f"has {found} bytes and not {expected}" if found != expected else ""
            if not fault and self.verify and checksum(numbers.path) != manifest["checksums"][numbers.path.name]:
                fault = "is not as metattt prepare wrote it (checksum)"
            if fault:
                raise DamagedTokens(f"{numbers.path} {fault}: remove {self.folder} and run metattt prepare again")
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
        self.check_no_test(name)
        self.setup()
        border, width, end = self.manifest["splits"]["train"]["tokens"], self.context_length + 1, self.length
        start, stop = {"train": (0, border), "validation": (border, end), "all": (0, end)}[name]
        self.check_length(name, stop - start, "prepare more text")
        limit = None if name == "train" else self.validation_max_tokens
        most = None if limit is None else max(1, limit // width)
        return TokenWindows(self.tokens, start, stop, width, most)

    def sample_document(self) -> bytes:
        self.setup()
        first = self.manifest["splits"]["train"]["documents"]
        start, end = [*self.documents.all[first : first + 2].tolist(), self.length][:2]
        return self.tokenizer.decode(self.tokens.all[start : min(end, start + DOCUMENT_TOKENS)].tolist())
