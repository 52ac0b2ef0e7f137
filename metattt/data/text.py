"""Text as windows of bytes for a language model."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from metattt.data.base import MOST_SEED
from metattt.data.documents import Document, read_documents, share
from metattt.data.tokenizers import ByteTokenizer, Tokenizer, document_tokens
from metattt.data.windows import Split, WindowData, dtype_of
from metattt.errors import MetaTTTError, check_number
from metattt.registry import register
from metattt.setting import setting


@register(group="data", name="text")
class TextData(WindowData, takes=("path", "context_length", "batch_size", "seed", "num_workers", "document_reset")):
    """Files of text, split into training, validation and test by document, cut into windows of bytes.

    Args:
        path: a file, a folder (searched recursively) or a list of these: txt, md, py, jsonl, parquet. None: the sources
            of Python's standard library, without its tests.
        validation_path: files to validate on, and not to train on, as `path`. None: a share of `path`.
        validation_fraction: share of the documents held out, chosen by a hash of their names. If there is only one
            document, its end is held out. With `validation_path` none are.
        validation_max_bytes: validate (and test) on at most this much text, evenly spread over the held-out documents;
            the split `all` is limited as well. None: on all.
        max_bytes: use at most this much training text, a random choice of documents. None: all.
        text_key: key (jsonl) or column (parquet) that holds the text.
        seed: of the split and of the order of the windows.
        context_length, batch_size, num_workers, document_reset: see `WindowData`.
        test_fraction: share of the documents of `path` kept for the split `test`, which neither training nor
            validation reads: settings are chosen on the validation text and reported on this one. The validation text
            is the same without it, but for documents whose text occurs twice: they count once, so that the splits share
            none (without a test split, a text may be in both). Of one document, it is the part before the validation
            text. 0: no such split.
        split_seed: of the split alone, so that runs with different seeds read the same text. None: `seed`.

    Raises:
        MetaTTTError: a size that is not allowed; from `setup`: what `read_documents` refuses, and text that is too
            short.
    """

    unit, baselines = "MB", True

    path: str | list[str] | None = setting(default=None)
    context_length = 256
    batch_size = 16
    validation_fraction: float = setting(default=0.1, above=0, below=1)
    validation_max_bytes: int | None = setting(default=None)
    max_bytes: int | None = setting(default=None)
    text_key: str = setting(default="text")
    validation_path: str | list[str] | None = setting(default=None)
    test_fraction: float = setting(default=0.0)
    split_seed: int | None = setting(default=None, least=0, most=MOST_SEED)

    def configure(self) -> None:
        self._split_seed = self.seed if self.split_seed is None else self.split_seed
        self.tokenizer = ByteTokenizer()  # another one may take its place: `read_as`
        self._held_out: list[Document] = []  # of `validation_path`
        self._windows: dict[Split, np.ndarray] = {}

    def check_settings(self) -> None:
        super().check_settings()
        beside = f", so that text to train on is left beside data.validation_fraction={self.validation_fraction}"
        below = 1 - self.validation_fraction
        check_number("data.test_fraction", self.test_fraction, least=0, below=below, advice=beside)

    def setup(self, stage: str | None = None) -> None:
        """Reads the documents, once."""
        self.documents  # noqa: B018 (a property that reads the files)

    @property
    def source(self) -> str:
        return "the Python standard library" if self.path is None else str(self.path)

    def read_as(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._windows.clear()  # they may be of another one

    def sample_document(self) -> bytes:
        return self.split("validation")[0]

    @cached_property
    def documents(self) -> list[Document]:
        """All documents, in a random order that depends on their names alone."""
        if self.validation_path is not None:
            self._held_out = self._read(self.validation_path, "data.validation_path")
        return self._read(self.path, "data.path")

    def _read(self, path: str | Sequence[str] | None, key: str) -> list[Document]:
        documents = read_documents(path, self.text_key, key)
        documents.sort(key=lambda document: (share(document.name, self._split_seed), document.key))
        seen = {document.text for document in self._held_out}
        if self.test_fraction:
            first: dict[bytes, Document] = {}
            for one in documents:
                first.setdefault(one.text, one)
            documents = list(first.values())
        documents = [one for one in documents if one.text not in seen]
        if not documents:
            raise MetaTTTError(f"{key}={path} holds nothing to train on that is not in data.validation_path: give more")
        return documents

    def split(self, name: Split) -> list[bytes]:
        """The texts of one split: `train`, `validation`, `test` or `all`."""
        documents = self.documents
        if name == "all":
            return [document.text for document in (*documents, *self._held_out)]
        if name == "test" and not self.test_fraction:
            raise MetaTTTError("there is no test text: set data.test_fraction=0.1, before training, to keep some")
        if self._held_out and name == "validation":
            return [document.text for document in self._held_out]
        shares = (0.0 if self._held_out else self.validation_fraction, self.test_fraction)
        if len(documents) == 1:
            text = documents[0].text
            end, start = (round(len(text) * (1 - share)) for share in (shares[0], sum(shares)))
            return [{"train": text[:start], "test": text[start:end], "validation": text[end:]}[name]]
        count, splits = len(documents), 1 + sum(share > 0 for share in shares)
        if count < splits:
            raise MetaTTTError(
                f"data.path={self.path} has {count} documents, too few for {splits} splits: give more, or set "
                "data.test_fraction=0"
            )
        # they are in the order of their shares, and every split has one at least
        seed = self._split_seed
        below = [bisect_left(documents, x, key=lambda one: share(one.name, seed)) for x in (shares[0], sum(shares))]
        validation = min(max(below[0], 1), count - splits + 1) if shares[0] else 0
        test = min(max(below[1] - below[0], 1), count - validation - 1) if shares[1] else 0
        chosen = {
            "validation": documents[:validation],
            "test": documents[validation : validation + test],
            "train": documents[validation + test :],
        }[name]
        return [document.text for document in chosen]

    def windows(self, name: Split) -> np.ndarray:
        """The windows of one split, `[N, T + 1]`, one after the other and without overlap."""
        if name not in self._windows:
            stream = self._stream(name)
            self.check_length(name, len(stream), "give more text")
            width = self.context_length + 1
            count = len(stream) // width
            windows = stream[: count * width].reshape(count, width)
            if name != "train" and self.validation_max_bytes is not None:
                size = width * max(1, sum(map(len, self.split(name))) / len(stream))  # bytes of a window
                keep = min(count, max(1, int(self.validation_max_bytes // size)))
                windows = windows[np.arange(keep) * count // keep]
            self._windows[name] = windows
        return self._windows[name]

    def _stream(self, name: Split) -> np.ndarray:
        """All tokens of a split, a separator before every document, and the token of end after it if there is one."""
        dtype = dtype_of(self.tokenizer.vocab_size)
        pieces, left = [], self.max_bytes if name == "train" and self.max_bytes is not None else 2**63
        for text in self.split(name):
            if left > 0:
                pieces.append(document_tokens(self.tokenizer, text[:left], dtype))
                left -= len(text)
        return np.concatenate(pieces)
