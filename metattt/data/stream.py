"""Text straight from a dataset of the Hugging Face Hub, or from compressed and remote files, without preparing it.

The stream is cut into windows, and so many windows make a block, whose order is drawn anew. Which window is where
depends on the settings alone: a run that goes on sees the windows that it would have seen, in any number of processes.
A checkpoint keeps a bookmark, so that it need not read the stream from its beginning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from metattt.data.base import Trainer
from metattt.data.documents import FOREIGN
from metattt.data.sources import Stream, is_local
from metattt.data.tokenizers import load_tokenizer
from metattt.data.windows import Split, WindowArray, WindowData, Windows, no_test_text, process
from metattt.errors import MetaTTTError, check_integer
from metattt.io import path_of
from metattt.registry import register

LONGEST_BLOCK = 2**20  # windows
BOOKMARKS = 2  # of the blocks read last: a batch may be made before it is asked for
SAMPLE_DOCUMENT = 2**16  # tokens of a held-out document, at most


class Reader:
    """The tokens of a stream, in order; at its end it begins again.

    Args:
        source: the documents.
        tokenizer: its separator goes before every document.
        skip: documents at the beginning of the stream that are left out.
    """

    def __init__(self, source: Stream, tokenizer: Any, skip: int):
        self.source, self.tokenizer, self.skip = source, tokenizer, skip
        self.row = 0  # of the document that is read next
        self.begun = False  # a document was read since the stream began
        self._rest = np.empty(0, np.int64)  # tokens of the document before it
        self._last: tuple[int, Any, int] = (0, None, 0)  # that document: its row, the place before it, its tokens
        self._rows: Iterator[tuple[Any, bytes]] | None = None

    def read(self, count: int) -> np.ndarray:
        """The next `count` tokens, int64.

        Raises:
            MetaTTTError: a stream that cannot be read, or that holds no text.
        """
        found = [self._rest[:count]]
        left = count - len(found[0])
        self._rest = self._rest[count:]
        while left > 0:
            self._rest = self._document()
            found.append(self._rest[:left])
            self._rest = self._rest[left:]
            left -= len(found[-1])
        return np.concatenate(found)

    def bookmark(self) -> dict[str, Any]:
        """Where reading has come to, as plain data."""
        row, place, length = self._last
        return {"row": row, "place": place, "used": length - len(self._rest)}

    def go_to(self, bookmark: Mapping[str, Any]) -> None:
        """Goes on from a bookmark of the same stream.

        Raises:
            MetaTTTError: the stream has no such place.
        """
        self.row, self._rows = bookmark["row"], self.source.texts(bookmark["row"], bookmark["place"])
        if bookmark["used"]:
            tokens = self._document()
            if len(tokens) < bookmark["used"]:
                raise MetaTTTError(f"{self.source.key}={self.source.name} has changed since the checkpoint was written")
            self._rest = tokens[bookmark["used"] :]

    def _document(self) -> np.ndarray:
        """The tokens of the next document that is not empty."""
        while True:
            if self._rows is None:
                self.row, self.begun, self._rows = 0, False, self.source.texts()
            found = next(self._rows, None)
            if found is None:
                if not self.begun:
                    raise MetaTTTError(f"{self.source.key}={self.source.name} holds no text to train on")
                self._rows = None
                continue
            row, (place, text) = self.row, found
            self.row += 1
            if row < self.skip or not text:
                continue
            self.begun = True
            tokens = encoded(self.tokenizer, text)
            self._last = row, place, len(tokens)
            return tokens


def encoded(tokenizer: Any, text: bytes) -> np.ndarray:
    """A document as tokens, int64: the separator, the text, and the token of end if there is one."""
    end = [] if tokenizer.end is None else [tokenizer.end]
    return np.concatenate([[tokenizer.separator], tokenizer.encode(text), end]).astype(np.int64)


class StreamWindows:
    """Windows of an endless stream by their numbers, which may only rise from call to call (within a block, any order).

    Args:
        reader: of the tokens.
        width: tokens of a window.
        block: windows that are shuffled together.
        seed: of their order.
    """

    def __init__(self, reader: Reader, width: int, block: int, seed: int):
        self.reader, self.width, self.block, self.seed = reader, width, block, seed
        self.bookmarks: dict[int, dict[str, Any]] = {}
        self._number, self._block = -1, np.empty((0, width), np.int64)

    def __len__(self) -> int:
        raise MetaTTTError("a stream has no end: its training text cannot be counted or read as a whole")

    def __getitem__(self, index: Sequence[int]) -> np.ndarray:
        return np.stack([self._window(number) for number in index])

    @property
    def size(self) -> int:
        return len(self)

    def start_at(self, number: int) -> None:
        """Goes to the last bookmark before a window; from there the stream is read without making windows of it."""
        known = [block for block in self.bookmarks if block <= number // self.block]
        if known and max(known) > self._number + 1:
            self._number = max(known) - 1
            self.reader.go_to(self.bookmarks[max(known)])

    def _window(self, number: int) -> np.ndarray:
        block, place = divmod(number, self.block)
        if block < self._number:
            raise ValueError(f"window {number} of a stream has passed")
        while self._number < block:
            self._number += 1
            self.bookmarks[self._number] = self.reader.bookmark()
            for old in sorted(self.bookmarks)[:-BOOKMARKS]:
                del self.bookmarks[old]
            tokens = self.reader.read(self.block * self.width)
            order = np.random.default_rng((self.seed, self._number)).permutation(self.block)
            self._block = tokens.reshape(self.block, self.width)[order]
        return self._block[place]


class Consecutive(Sampler[list[int]]):
    """The numbers of a process's windows in every batch of a run: batch `i` of all processes together is batch `i` of
    one process with batches as large as theirs together.

    Args:
        batch_size: windows per batch in each process.
        num_batches: of the whole run.
        start: batches that the run has seen already.
        rank: this process.
        world_size: number of processes.
    """

    def __init__(self, batch_size: int, num_batches: int, start: int = 0, rank: int = 0, world_size: int = 1):
        self.batch_size, self.num_batches, self.start = batch_size, num_batches, start
        self.rank, self.world_size = rank, world_size

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        for batch in range(self.start, self.num_batches):
            first = (batch * self.world_size + self.rank) * self.batch_size
            yield list(range(first, first + self.batch_size))


@register(group="data", name="stream")
class StreamData(WindowData):
    """Windows of a stream that is read while training goes on, in the training process. `data=shards` reads faster, and
    shuffles all of the text.

    Every process reads the whole stream and takes its share of the windows.

    Args:
        path: name of a dataset on the Hugging Face Hub; or a file or pattern, local or an address, compressed or not
            (json, jsonl, csv, txt, parquet, arrow; gz, zst, bz2, xz, zip).
        files: paths, patterns or addresses of the files to read, if `path` is a format (json, text, …) or a dataset.
        config: name of the dataset's configuration; None for the only one.
        split: name of the split to train on.
        validation_split: name of the split to validate on. None: the first `validation_documents` of `split`, which are
            left out of training.
        validation_documents: number of documents.
        validation_max_tokens: validate on at most this many tokens, the first.
        text_key: column that holds the text.
        tokenizer: bytes, a tokenizer.json, or a name on the Hugging Face Hub.
        context_length: T, tokens that the model reads (a window has one more: the last label).
        batch_size: windows per batch in each process, at most.
        shuffle: windows that are shuffled together, and kept in memory; 1 keeps the order of the stream.
        seed: of their order.
        document_reset: the inner loop starts again where a document starts, so that documents do not see each other.

    Raises:
        MetaTTTError: a size that is not allowed; from `setup`: a stream that cannot be opened, or too little text to
            validate on.
    """

    def __init__(
        self,
        path: str,
        files: str | list[str] | None = None,
        config: str | None = None,
        split: str = "train",
        validation_split: str | None = None,
        validation_documents: int = 100,
        validation_max_tokens: int = 2**20,
        text_key: str = "text",
        tokenizer: str = "bytes",
        context_length: int = 2048,
        batch_size: int = 8,
        shuffle: int = 1024,
        seed: int = 0,
        document_reset: bool = False,
    ):
        super().__init__(context_length, batch_size, seed, 0, document_reset)
        check_integer("data.validation_documents", validation_documents)
        check_integer("data.validation_max_tokens", validation_max_tokens)
        check_integer("data.shuffle", shuffle, most=LONGEST_BLOCK, advice=" (1: in the order of the stream)")
        path_of(path, "data.path")
        self.path, self.files, self.config, self.split = path, files, config, split
        self.validation_split, self.validation_documents = validation_split, validation_documents
        self.validation_max_tokens, self.text_key = validation_max_tokens, text_key
        self.tokenizer_name, self.shuffle = tokenizer, shuffle
        self._train: StreamWindows | None = None
        self._bookmarks: dict[int, dict[str, Any]] = {}

    def setup(self, stage: str | None = None) -> None:
        """Opens the stream and reads what is held out, once."""
        if self._train is not None:
            return
        if "tokenizer" not in self.__dict__:
            self.tokenizer = load_tokenizer(self.tokenizer_name)
        self._train_source = self._open(self.split)
        self._validation = self._held_out()
        skip = self.validation_documents if self.validation_split is None else 0
        reader = Reader(self._train_source, self.tokenizer, skip)
        self._train = StreamWindows(reader, self.context_length + 1, self.shuffle, self.seed)
        self._train.bookmarks = self._bookmarks

    def _open(self, split: str) -> Stream:
        name, files = self.path, self.files
        options: dict[str, Any] = {}
        if files is None and ("://" in name or is_local(name)):
            kinds = [FOREIGN[suffix] for suffix in Path(name).suffixes if suffix in FOREIGN]
            kind = next(filter(None, kinds), None)
            if kind is None:
                raise MetaTTTError(
                    f"data.path={name} has no format that is known: give one of {', '.join(FOREIGN)}, "
                    "or the format and the files: data.path=json data.files=<pattern>"
                )
            name, files = kind, name if "://" in name else str(path_of(name, "data.path"))
        if name == "text":
            options["sample_by"] = "document"  # and not a line
        if files is not None and not isinstance(files, str):
            files = [str(file) for file in files]
        return Stream(name, self.config, split, self.text_key, files, "data.path", **options)

    def _held_out(self) -> np.ndarray:
        """The validation windows `[N, T + 1]`."""
        width = self.context_length + 1
        most = max(1, self.validation_max_tokens // width) * width
        source = self._train_source if self.validation_split is None else self._open(self.validation_split)
        pieces: list[np.ndarray] = []
        count = 0
        self._sample = b""
        for number, (_, text) in enumerate(source.texts()):
            if count >= most or (self.validation_split is None and number >= self.validation_documents):
                break
            if text:
                self._sample = self._sample or text
                pieces.append(encoded(self.tokenizer, text))
                count += len(pieces[-1])
        if count < width:
            raise MetaTTTError(
                f"the text to validate on has {count} tokens, fewer than the {width} of one window: set data.context_length="
                f"{max(1, count - 1)} or less, or data.validation_documents={2 * self.validation_documents} or more"
            )
        tokens = np.concatenate(pieces)[: min(count, most) // width * width]
        return tokens.reshape(-1, width)

    @property
    def source(self) -> str:
        return f"{self.path}, streamed"

    def windows(self, name: Split) -> WindowArray:
        """The windows of one split. Those of `train` have no end.

        Raises:
            MetaTTTError: for `all` and `test`.
        """
        if name == "test":
            raise no_test_text(self.source)
        self.setup()
        if name == "all":
            raise MetaTTTError("split=all: a stream has no end; split=validation reads what is held out")
        assert self._train is not None
        return self._train if name == "train" else self._validation

    def describe(self) -> str:
        return f"{self.source}; {self._validation.size / 1e6:.2f} M tokens to validate"

    def sample_document(self) -> bytes:
        self.setup()
        return self._sample

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Windows for the whole run, from the step that the trainer has reached.

        Raises:
            MetaTTTError: a run without a number of steps.
        """
        self.setup()
        assert self._train is not None
        batches = batches_of_stream(self.batch_size, self.trainer)
        self._train.start_at(batches.start * self.batch_size * batches.world_size)
        return DataLoader(Windows(self._train), batch_size=None, sampler=batches)

    def state_dict(self) -> dict[str, Any]:
        """Bookmarks of the stream, for a checkpoint: plain data."""
        if self._train is None:
            return {}
        return {"of": self._settings(), "bookmarks": {str(key): one for key, one in self._train.bookmarks.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the bookmarks of a checkpoint, if they are of this stream and these windows; without them, it is read
        from its beginning.

        Raises:
            MetaTTTError: bookmarks that are damaged.
        """
        if state.get("of") != self._settings():
            return
        found: Any = state.get("bookmarks")
        if not isinstance(found, dict) or not all(key.isdecimal() and _is_bookmark(one) for key, one in found.items()):
            raise MetaTTTError("the bookmarks of the stream in the checkpoint are damaged")
        self._bookmarks.update((int(key), dict(one)) for key, one in found.items())

    def _settings(self) -> list[Any]:
        """What a bookmark is of."""
        named = (self.path, self.files, self.config, self.split, self.text_key, self.tokenizer_name)
        skip = self.validation_documents if self.validation_split is None else 0
        files = list(self.files) if self.files is not None and not isinstance(self.files, str) else self.files
        return [named[0], files, *named[2:], skip, self.context_length, self.shuffle]


def _is_bookmark(one: Any) -> bool:
    if not isinstance(one, Mapping) or "place" not in one:
        return False
    return all(type(count) is int and count >= 0 for count in (one.get("row"), one.get("used")))


def batches_of_stream(batch_size: int, trainer: Trainer | None) -> Consecutive:
    """This process's batches of a whole run, from the step that the trainer has reached.

    Raises:
        MetaTTTError: there is no number of steps.
    """
    if trainer is None or trainer.max_steps <= 0:
        raise MetaTTTError("a stream has no end: give the number of steps, trainer.max_steps=<steps>")
    per_step = trainer.accumulate_grad_batches
    done, total = trainer.global_step * per_step, trainer.max_steps * per_step
    return Consecutive(batch_size, total, done, *process(trainer))
