"""Text as windows of bytes for a language model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from metattt.data.base import MOST_SEED
from metattt.data.documents import Document, read_documents
from metattt.data.tokenizers import ByteTokenizer, Tokenizer, document_tokens
from metattt.data.windows import Split, WindowData, dtype_of
from metattt.errors import MetaTTTError, check_integer, check_number
from metattt.registry import register


@register(group="data", name="text")
class TextData(WindowData):
    """Files of text, split into training, validation and test by document, cut into windows of bytes.

    Args:
        path: a file, a folder (searched recursively) or a list of these: txt, md, py, jsonl, parquet. None: the sources
            of Python's standard library, without its tests.
        validation_path: files to validate on, and not to train on, as `path`. None: a share of `path`.
        context_length: T, tokens that the model reads (a window has one more: the last label).
        batch_size: windows per batch.
        validation_fraction: share of the documents held out, chosen by a hash of their names. If there is only one
            document, its end is held out. With `validation_path` none are.
        validation_max_bytes: validate (and test) on at most this much text, evenly spread over the held-out documents.
            None: on all.
        max_bytes: use at most this much training text, a random choice of documents. None: all.
        text_key: key (jsonl) or column (parquet) that holds the text.
        seed: of the split and of the order of the windows.
        num_workers: processes that make batches; 0 makes them in the training process.
        document_reset: the inner loop starts again where a document starts, so that documents do not see each other.
        test_fraction: share of the documents of `path` kept for the split `test`, which neither training nor
            validation reads: settings are chosen on the validation text and reported on this one. The validation text
            is the same without it. Of one document, it is the part before the validation text. Documents whose text
            occurs twice count once, so that the splits share none. 0: no such split.
        split_seed: of the split alone, so that runs with different seeds read the same text. None: `seed`.

    Raises:
        MetaTTTError: a size that is not allowed; from `setup`: what `read_documents` refuses, and text that is too
            short.
    """

    def __init__(
        self,
        path: str | list[str] | None = None,
        context_length: int = 256,
        batch_size: int = 16,
        validation_fraction: float = 0.1,
        validation_max_bytes: int | None = None,
        max_bytes: int | None = None,
        text_key: str = "text",
        seed: int = 0,
        num_workers: int = 0,
        document_reset: bool = False,
        validation_path: str | list[str] | None = None,
        test_fraction: float = 0.0,
        split_seed: int | None = None,
    ):
        super().__init__(context_length, batch_size, seed, num_workers, document_reset)
        check_number("data.validation_fraction", validation_fraction, above=0, below=1)
        beside = f", so that text to train on is left beside data.validation_fraction={validation_fraction}"
        check_number("data.test_fraction", test_fraction, least=0, below=1 - validation_fraction, advice=beside)
        for name, value in (("max_bytes", max_bytes), ("validation_max_bytes", validation_max_bytes)):
            if value is not None:
                check_integer(f"data.{name}", value)
        self.path, self.validation_path = path, validation_path
        self.validation_fraction, self.validation_max_bytes = validation_fraction, validation_max_bytes
        if split_seed is not None:
            check_integer("data.split_seed", split_seed, 0, MOST_SEED)
        self.test_fraction, self.split_seed = test_fraction, seed if split_seed is None else split_seed
        self.max_bytes, self.text_key = max_bytes, text_key
        self.tokenizer: Tokenizer = ByteTokenizer()  # another one may take its place before the windows are read
        self._documents: list[Document] | None = None
        self._held_out: list[Document] = []  # of `validation_path`
        self._windows: dict[Split, np.ndarray] = {}

    unit, baselines = "MB", True

    def setup(self, stage: str | None = None) -> None:
        """Reads the documents, once."""
        self.documents  # noqa: B018 (a property that reads the files)

    @property
    def source(self) -> str:
        return "the Python standard library" if self.path is None else str(self.path)

    def read_as(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def sample_document(self) -> bytes:
        return self.split("validation")[0]

    @property
    def documents(self) -> list[Document]:
        """All documents, in a random order that depends on their names alone."""
        if self._documents is None:
            if self.validation_path is not None:
                self._held_out = self._read(self.validation_path, "data.validation_path")
            self._documents = self._read(self.path, "data.path")
        return self._documents

    def _read(self, path: str | Sequence[str] | None, key: str) -> list[Document]:
        given = list(path) if isinstance(path, Sequence) and not isinstance(path, str) else path
        documents = read_documents(given, self.text_key, key)
        documents.sort(key=lambda document: (document.share(self.split_seed), document.key))
        if self.test_fraction:
            seen = {document.text for document in self._held_out}
            first: dict[bytes, Document] = {}
            for one in documents:
                first.setdefault(one.text, one)
            documents = [one for text, one in first.items() if text not in seen]
        return documents

    def split(self, name: Split) -> list[bytes]:
        """The texts of one split: `train`, `validation`, `test` or `all`.

        Raises:
            MetaTTTError: `test` without a `test_fraction`, or too few documents for all three.
        """
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
        below = [sum(one.share(self.split_seed) < edge for one in documents) for edge in (shares[0], sum(shares))]
        validation = min(max(below[0], 1), count - splits + 1) if shares[0] else 0
        test = min(max(below[1] - below[0], 1), count - validation - 1) if shares[1] else 0
        chosen = {
            "validation": documents[:validation],
            "test": documents[validation : validation + test],
            "train": documents[validation + test :],
        }[name]
        return [document.text for document in chosen]

    def windows(self, name: Split) -> np.ndarray:
        """The windows of one split, `[N, T + 1]`, one after the other and without overlap.

        Raises:
            MetaTTTError: if the split is shorter than one window.
        """
        if name not in self._windows:
            stream = self._stream(name)
            width = self.context_length + 1
            count = len(stream) // width
            if not count:
                raise MetaTTTError(
                    f"the {name} text of data.path={self.path} has {len(stream)} tokens, fewer than the {width} of "
                    f"one window: give more text, or set data.context_length={max(1, len(stream) - 1)} or less"
                )
            windows = stream[: count * width].reshape(count, width)
            if name != "train" and self.validation_max_bytes is not None:
                keep = min(count, max(1, self.validation_max_bytes // width))
                windows = windows[np.arange(keep) * count // keep]
            self._windows[name] = windows
        return self._windows[name]

    def _stream(self, name: Split) -> np.ndarray:
        """All tokens of a split, a separator before every document, and the token of end after it if there is one."""
        dtype = dtype_of(self.tokenizer.vocab_size)
        pieces, left = [], self.max_bytes if name == "train" and self.max_bytes is not None else 2**63
        for text in self.split(name):
            if left > 0:
                pieces.append(document_tokens(self.tokenizer, text[:left]).astype(dtype))
                left -= len(text)
        return np.concatenate(pieces)
