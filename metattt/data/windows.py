"""Windows of consecutive tokens: their order, the share of each process in a step, and the loaders that make
batches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from metattt.data.base import ALONE, Data, Place
from metattt.data.tokenizers import Tokenizer
from metattt.errors import MetaTTTError
from metattt.setting import setting

Split = Literal["train", "validation", "test", "all"]
NO_TOKEN = -1  # in a window that only fills up a batch; no loss is taken there


def dtype_of(vocab_size: int) -> np.dtype:
    """The type of number that tokens are kept in: unsigned, of two bytes where they suffice."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def digest_of(*pieces: Any) -> str:
    """A short text that tells data from other data."""
    digest = hashlib.blake2b(digest_size=16)
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


class Windows(Dataset[Tensor]):
    """Windows indexed by a batch of positions at once: `[B, T + 1]` int64; position −1 is a window without tokens.

    Args:
        windows: `[N, T + 1]` tokens: an array, or something that has its length, its `size` (tokens), and reads rows.
    """

    def __init__(self, windows: Any):
        self.windows = windows

    def __getitem__(self, index: list[int]) -> Tensor:
        batch = torch.from_numpy(self.windows[[max(0, i) for i in index]].astype(np.int64))
        batch[torch.tensor(index) < 0] = NO_TOKEN
        return batch


class Batches(Sampler[list[int]]):
    """Consecutive numbers in batches: batch `i` of all processes together is batch `i` of one process with batches as
    large as theirs together. The batch at a step depends on the step alone, so a resumed run sees the batches that it
    would have seen.

    Args:
        batch_size: numbers per batch in each process.
        place: the batches that this process reads; `total` is given.
    """

    def __init__(self, batch_size: int, place: Place):
        self.batch_size, self.place = batch_size, place

    def __len__(self) -> int:
        return self.place.total or 0  # of the whole run: Lightning counts the batches that it has read too

    def __iter__(self) -> Iterator[list[int]]:
        rank, world_size, done, _ = self.place
        for batch in range(done, len(self)):
            first = (batch * world_size + rank) * self.batch_size
            yield list(range(first, first + self.batch_size))


class ShuffledBatches(Batches):
    """Batches of positions, a new permutation for every pass over the data; it depends on `seed` and the pass alone.

    Args:
        num_windows: windows (or images) in the data; at least one.
        batch_size: windows per batch in each process. A batch may reach into the next pass: no window is dropped.
        seed: of the permutations.
        place: the batches that this process reads; without a number of steps, those of one pass.
    """

    def __init__(self, num_windows: int, batch_size: int, seed: int, place: Place = ALONE):
        total = place.total
        if total is None:
            total = -(-num_windows // (batch_size * place.world_size))
        super().__init__(batch_size, place._replace(total=total))
        self.num_windows, self.seed = num_windows, seed

    def __iter__(self) -> Iterator[list[int]]:
        order, order_pass = np.empty(0, np.int64), -1
        for batch in super().__iter__():
            index = []
            for position in batch:
                if position // self.num_windows != order_pass:
                    order_pass = position // self.num_windows
                    order = np.random.default_rng((self.seed, order_pass)).permutation(self.num_windows)
                index.append(int(order[position % self.num_windows]))
            yield index


class PlacedBatches(ShuffledBatches):
    """Shuffled batches, every number with its place in the run."""

    def __iter__(self) -> Iterator[list[Any]]:
        for numbers, places in zip(super().__iter__(), Batches.__iter__(self), strict=True):
            yield list(zip(numbers, places, strict=True))


def batches_in_order(num_windows: int, batch_size: int, place: Place) -> list[list[int]]:
    """The batches of one process that reads all windows once, together with the others: as many batches in every
    process.

    A position −1 stands for a window without tokens, where the windows do not suffice for a batch in every process.
    """
    together = batch_size * place.world_size
    batches = []
    for start in range(place.rank * batch_size, -(-num_windows // together) * together, together):
        real = list(range(start, min(start + batch_size, num_windows)))
        filled = batch_size if place.world_size > 1 else len(real)
        batches.append(real + [-1] * (filled - len(real)))
    return batches


class WindowData(Data, takes=("context_length", "batch_size", "seed", "num_workers", "document_reset")):
    """Windows of text; subclasses say what the windows of a split are.

    Args:
        context_length: T, tokens that the model reads (a window has one more: the last label).
        batch_size: windows per batch in each process.
        seed, num_workers: see `Data`.
        document_reset: the inner loop starts again where a document starts, so that documents do not see each other.
    """

    trained_by = "metattt.training.text_module:TextJob"
    windows_of_text = True
    baselines = False  #: byte models are counted on it, for comparison: it is bytes, in memory
    tokenizer: Tokenizer = setting(init=False)
    unit = "M tokens"  #: of the sizes that people are shown

    context_length: int = setting(default=2048, most=2**40)
    batch_size = 8
    document_reset: bool = setting(default=False)

    def fingerprint(self) -> str | None:
        return digest_of(*(self.windows(name)[:] for name in ("train", "validation")))

    @property
    def source(self) -> str:
        """Where the text comes from, for people."""
        raise NotImplementedError

    def describe(self) -> str:
        """The text in a line: where it comes from, and how much there is."""
        train, validation = (self.windows(name).size / 1e6 for name in ("train", "validation"))
        return f"{self.source}: {train:.1f} {self.unit} to train, {validation:.2f} {self.unit} to validate"

    def windows(self, name: Split) -> Any:
        """The windows of one split, `[N, T + 1]`, one after the other and without overlap: see `Windows`."""
        raise NotImplementedError

    def check_length(self, name: str, count: int, way: str) -> None:
        """Raises an error for a split of `count` tokens that hold no window; `way` leads to more."""
        if count <= self.context_length:
            raise MetaTTTError(
                f"split {name} of {self.source} has {count} tokens, fewer than the {self.context_length + 1} of one "
                f"window: set data.context_length={max(1, count - 1)} or less, or {way}"
            )

    def check_no_test(self, name: Split) -> None:
        """Raises an error for the split `test`, which only `data=text` keeps."""
        if name == "test":
            raise MetaTTTError(
                f"{self.source} has no test text: only data=text keeps some, with data.test_fraction=0.1"
            )

    def read_as(self, tokenizer: Tokenizer) -> None:
        """Reads the text as the tokens of a model.

        Raises:
            MetaTTTError: it was cut into other tokens before.
        """
        self.setup()
        if not self.tokenizer.equals(tokenizer):
            raise MetaTTTError(f"{self.source} has other tokens than the model: prepare it with the model's tokenizer")

    def sample_document(self) -> bytes:
        """The beginning of a held-out document."""
        raise NotImplementedError

    @property
    def document_start(self) -> int | None:
        """The token at which the inner loop starts again; None if it never does."""
        return self.tokenizer.separator if self.document_reset else None

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Shuffled windows for the whole run, from those at `place.done` on."""
        windows = self.windows("train")
        return self._loader(windows, ShuffledBatches(len(windows), self.batch_size, self.seed, self.place))

    def val_dataloader(self) -> DataLoader[Tensor]:
        """The validation windows in order, a part of them in each process."""
        return self.loader("validation", self.place)

    def loader(self, name: Split, place: Place = ALONE) -> DataLoader[Tensor]:
        """The windows of a split, in order, once."""
        windows = self.windows(name)
        return self._loader(windows, batches_in_order(len(windows), self.batch_size, place))

    def _loader(self, windows: Any, batches: Sampler[list[int]] | list[list[int]]) -> DataLoader[Tensor]:
        # the sampler hands out whole batches, so that the data is indexed once per batch; automatic batching is off.
        # A generator of its own: a seed for workers is else one of the run's random numbers, drawn anew after resuming
        return DataLoader(
            Windows(windows), batch_size=None, sampler=batches, num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0, generator=torch.Generator(),
        )  # fmt: skip
