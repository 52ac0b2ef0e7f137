"""Text straight from a dataset of the Hugging Face Hub, or from compressed and remote files, without preparing it.

The stream is cut into windows, and so many windows make a block, whose order is drawn anew. Which window is where
depends on the settings alone: a resumed run sees the windows that it would have seen, in any number of processes.
A checkpoint keeps a bookmark, the state of the library's `IterableDataset`: the stream need not be read from its
beginning.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader

from metattt.composition.messages import first_line
from metattt.data.base import ReadError
from metattt.data.sources import FOREIGN, is_local, load
from metattt.data.tokenizers import Tokenizer, document_tokens, load_tokenizer
from metattt.data.windows import Batches, Split, WindowData, Windows, digest_of
from metattt.errors import MetaTTTError
from metattt.io import path_of
from metattt.optional import need
from metattt.registry import register
from metattt.setting import REQUIRED, setting

LONGEST_BLOCK = 2**20  # windows


class Reader:
    """The tokens of a streamed dataset, in order; at its end it begins again.

    Args:
        dataset: `datasets.IterableDataset`, whose state can be saved and set.
        text_key: its column with the text.
        tokenizer: its separator goes before every document.
        name: of the dataset, for messages.
    """

    def __init__(self, dataset: Any, text_key: str, tokenizer: Tokenizer, name: str = "the stream"):
        self.dataset, self.text_key, self.tokenizer, self.name = dataset, text_key, tokenizer, name
        self.begin = dataset.state_dict()
        self.place: Any = self.begin  # of the document that is read
        self.tokens, self.used = np.empty(0, np.int64), 0  # of it, and how many have been read
        self._documents = self._endless(self.begin)

    def read(self, count: int) -> np.ndarray:
        """The next `count` tokens, int64.

        Raises:
            MetaTTTError: a stream that cannot be read, or that holds no text.
        """
        found: list[np.ndarray] = []
        while count > 0:
            if self.used == len(self.tokens):
                self.place, self.tokens = next(self._documents)
                self.used = 0
            found.append(self.tokens[self.used : self.used + count])
            self.used, count = self.used + len(found[-1]), count - len(found[-1])
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def bookmark(self) -> dict[str, Any]:
        """How far it has read, as plain data."""
        return {"place": self.place, "used": self.used}

    def go_to(self, bookmark: Mapping[str, Any]) -> None:
        """Goes on from a bookmark of the same stream.

        Raises:
            MetaTTTError: the stream has no such place.
        """
        self.place, self.used, self.tokens = bookmark["place"], bookmark["used"], np.empty(0, np.int64)
        self._documents = self._endless(self.place)
        if self.used:
            self.place, self.tokens = next(self._documents)
        if len(self.tokens) < self.used:
            raise MetaTTTError(f"data.path={self.name} has changed since the checkpoint was written")

    def texts(self, place: Any) -> Iterator[tuple[Any, bytes]]:
        """All texts from a place on, empty ones too (null is one), each with its place: plain data that a later call
        can begin at."""
        try:
            self.dataset.load_state_dict(copy.deepcopy(place))
            for row in self.dataset:
                after = self.dataset.state_dict()
                text = row[self.text_key]
                yield place, b"" if text is None else text.encode()
                place = after
        except Exception as error:  # the library's own, and those of file formats and of the network
            raise ReadError(
                f"data.path={self.name} cannot be read as text in {self.text_key!r}: {first_line(error):.200}"
            ) from error

    def _endless(self, place: Any) -> Iterator[tuple[Any, np.ndarray]]:
        """Place and tokens of every document that is not empty, from a place on."""
        while True:
            found = place is not self.begin
            for here, text in self.texts(place):
                if text:
                    found = True
                    yield here, document_tokens(self.tokenizer, text)
            if not found:
                way = "give more documents, or set data.validation_documents lower"
                raise MetaTTTError(f"data.path={self.name} holds no text to train on: {way}")
            place = self.begin


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
        self._begun: list[int] = []  # blocks in which the last two batches began: a run resumes at one of these batches

    def __len__(self) -> int:
        raise MetaTTTError("split=train: a stream has no end; split=validation reads what is held out")

    def __getitem__(self, index: Sequence[int]) -> np.ndarray:
        self._begun = [*self._begun[-1:], index[0] // self.block]
        return np.stack([self._window(number) for number in index])

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
            for old in self.bookmarks.keys() - {*self._begun, self._number}:
                del self.bookmarks[old]
            tokens = self.reader.read(self.block * self.width)
            order = np.random.default_rng((self.seed, self._number)).permutation(self.block)
            self._block = tokens.reshape(self.block, self.width)[order]
        return self._block[place]


@register(group="data", name="stream")
class StreamData(WindowData, takes=("context_length", "batch_size", "seed", "document_reset")):
    """Windows of a stream that is read while training goes on, in the training process. `data=shards` reads faster, and
    shuffles all of the text.

    Every process reads the whole stream and takes its share of the windows.

    Args:
        path: name of a dataset on the Hugging Face Hub; or a file or pattern, local or an address, compressed or not
            (json, jsonl, csv, txt, parquet, arrow; gz, bz2, xz, zip, and zst with `pip install zstandard`).
        files: paths, patterns or addresses of the files to read, if `path` is a format (json, text, …) or a dataset.
        config: name of the dataset's configuration; None for the only one.
        split: name of the split to train on.
        validation_split: name of the split to validate on. None: the first `validation_documents` of `split`, which are
            left out of training.
        validation_documents: number of documents.
        validation_max_tokens: validate on at most this many tokens, the first.
        text_key: column that holds the text.
        tokenizer: bytes, a tokenizer.json, or a name on the Hugging Face Hub.
        shuffle: windows that are shuffled together, and kept in memory; 1 keeps the order of the stream.
        seed: of their order.
        context_length, batch_size, document_reset: see `WindowData`.

    Raises:
        MetaTTTError: a size that is not allowed; from `setup`: a stream that cannot be opened, or too little text to
            validate on.
    """

    path: str = setting(default=REQUIRED)
    files: str | list[str] | None = setting(default=None)
    config: str | None = setting(default=None)
    split: str = setting(default="train")
    validation_split: str | None = setting(default=None)
    validation_documents: int = setting(default=100)
    validation_max_tokens: int = setting(default=2**20)
    text_key: str = setting(default="text")
    tokenizer_name: str = setting(default="bytes", alias="tokenizer")
    shuffle: int = setting(default=1024, most=LONGEST_BLOCK, advice=" (1: in the order of the stream)")

    def check_settings(self) -> None:
        super().check_settings()
        path_of(self.path, "data.path")
        self._bookmarks: dict[int, dict[str, Any]] = {}

    def setup(self, stage: str | None = None) -> None:
        """Opens the stream and reads what is held out, once."""
        if hasattr(self, "_train"):
            return
        self.tokenizer = load_tokenizer(self.tokenizer_name)
        self._validation = self._held_out()
        dataset = self._open(self.split)
        if self.validation_split is None:
            dataset = dataset.skip(self.validation_documents)
        reader = Reader(dataset, self.text_key, self.tokenizer, self.path)
        self._train = StreamWindows(reader, self.context_length + 1, self.shuffle, self.seed)
        self._train.bookmarks = self._bookmarks

    def _open(self, split: str) -> Any:
        name, files = self.path, self._files
        tabs = {"sep": "\t"} if files is None and ".tsv" in Path(name).suffixes else {}
        if files is None and ("://" in name or is_local(name)):
            kinds = [FOREIGN[suffix] for suffix in Path(name).suffixes if suffix in FOREIGN]
            kind = next(filter(None, kinds), None)
            if kind is None:
                raise MetaTTTError(
                    f"data.path={name} has an unknown format: give one of {', '.join(FOREIGN)}, the files of a folder "
                    f"as {name.rstrip('/')}/*.jsonl, or the format and the files: data.path=json data.files=<pattern>"
                )
            name, files = kind, name if "://" in name else str(path_of(name, "data.path"))
        self._opened = name, files
        return load(name, self.config, split, self.text_key, files, "data.path", streaming=True, **tabs)

    def _held_out(self) -> np.ndarray:
        """The validation windows `[N, T + 1]`."""
        width = self.context_length + 1
        most = max(1, self.validation_max_tokens // width) * width
        reader = Reader(self._open(self.validation_split or self.split), self.text_key, self.tokenizer, self.path)
        pieces: list[np.ndarray] = []
        count = 0
        self._sample = b""
        for number, (_, text) in enumerate(reader.texts(reader.begin)):
            if count >= most or (self.validation_split is None and number >= self.validation_documents):
                break
            if text:
                self._sample = self._sample or text
                pieces.append(document_tokens(self.tokenizer, text))
                count += len(pieces[-1])
        self.check_length("validation", count, f"more data.validation_documents than {self.validation_documents}")
        tokens = np.concatenate(pieces)[: min(count, most) // width * width]
        return tokens.reshape(-1, width)

    @property
    def source(self) -> str:
        return f"{self.path}, streamed"

    def windows(self, name: Split) -> Any:
        """The windows of one split, `train` (which has no end) or `validation`; others raise an error."""
        self.check_no_test(name)
        if name == "all":
            raise MetaTTTError("split=all: a stream has no end; split=validation reads what is held out")
        self.setup()
        return self._train if name == "train" else self._validation

    def fingerprint(self) -> str:
        """Of the text held out, and of the names and sizes of the files where they are here."""
        (name, files), held_out = self._opened, digest_of(self._validation)
        builder = need("datasets", extra="text", what="data=stream").load_dataset_builder
        found = {} if files is None else builder(name, self.config, data_files=files).config.data_files
        local = [Path(one) for several in found.values() for one in several if Path(one).is_file()]
        sizes = "".join(f"{one.name} {one.stat().st_size}\n" for one in local)
        return f"{held_out} {digest_of(sizes.encode())}" if sizes else held_out

    def describe(self) -> str:
        return f"{self.source}; {self._validation.size / 1e6:.2f} M tokens to validate"

    def sample_document(self) -> bytes:
        self.setup()
        return self._sample

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Windows for the whole run, from those at `place.done` on."""
        self.setup()
        if self.place.total is None:
            raise MetaTTTError("a stream has no end: give the number of steps, trainer.max_steps=<steps>")
        batches = Batches(self.batch_size, self.place)
        self._train.start_at(self.place.done * self.batch_size * self.place.world_size)
        return DataLoader(Windows(self._train), batch_size=None, sampler=batches)

    def state_dict(self) -> dict[str, Any]:
        """Bookmarks of the stream, for a checkpoint: plain data."""
        if not hasattr(self, "_train"):
            return {}
        return {"of": self._bookmarked(), "bookmarks": {str(key): one for key, one in self._train.bookmarks.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the bookmarks of a checkpoint, if they are of this stream and these windows; without them, it is read
        from its beginning."""
        if state.get("of") != self._bookmarked():
            return
        self._bookmarks.update((int(key), dict(one)) for key, one in state["bookmarks"].items())

    @property
    def _files(self) -> str | list[str] | None:
        return self.files if isinstance(self.files, str | None) else [str(file) for file in self.files]

    def _bookmarked(self) -> list[Any]:
        """What a bookmark is of."""
        named = (self.path, self._files, self.config, self.split, self.text_key, self.tokenizer_name)
        skip = self.validation_documents if self.validation_split is None else 0
        return [*named, skip, self.context_length, self.shuffle]
