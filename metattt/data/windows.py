"""Windows of consecutive tokens: their order, the share of each process in a step, and the loaders that make
batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from metattt.data.base import MOST_ROWS, MOST_SEED, MOST_WORKERS, Data, Trainer
from metattt.errors import MetaTTTError, check_flag, check_integer

Split = Literal["train", "validation", "test", "all"]
SHOWN: tuple[tuple[Split, int], ...] = (("train", 1), ("validation", 2))  # sizes, with their digits
NO_TOKEN = -1  # in a window that only fills up a batch; no loss is taken there


def no_test_text(source: str) -> MetaTTTError:
    """What a user reads who asks for the split `test` of a kind of text that has none."""
    return MetaTTTError(f"{source} has no test text: only data=text keeps some, with data.test_fraction=0.1")


class Tokenizer(Protocol):
    """What a data module asks of a tokenizer."""

    vocab_size: int
    separator: int  #: the token before every document
    end: int | None  #: the token after every document, if there is one

    @property
    def token_bytes(self) -> Tensor:
        """`[V]` bytes of text that each token stands for."""

    def encode(self, text: str | bytes) -> np.ndarray:
        """Token ids of a text, without a separator."""

    def decode(self, ids: Sequence[int]) -> bytes:
        """The text of the tokens as UTF-8; separators stand for none."""


class WindowArray(Protocol):
    """`[N, T + 1]` tokens: an array, or something that reads rows like one."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: list[int]) -> np.ndarray: ...

    @property
    def size(self) -> int:
        """Number of tokens."""


class Windows(Dataset[Tensor]):
    """Windows indexed by a batch of positions at once: `[B, T + 1]` int64; position −1 is a window without tokens."""

    def __init__(self, windows: WindowArray):
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: list[int]) -> Tensor:
        batch = torch.from_numpy(self.windows[[max(0, i) for i in index]].astype(np.int64))
        batch[torch.tensor(index) < 0] = NO_TOKEN
        return batch


class ShuffledBatches(Sampler[list[int]]):
    """Batches of positions, a new permutation for every pass over the data.

    The batch at a step depends on `seed` and the step alone, so a resumed run sees the batches that it would have seen.
    With several processes, batch `i` of all of them together is batch `i` of one process with batches as large as
    theirs together.

    Args:
        num_windows: windows in the data; at least one.
        batch_size: windows per batch. A batch may reach into the next pass: no window is dropped.
        seed: of the permutations.
        num_batches: length of the run (batches).
        start: batches that the run has seen already.
        rank: this process.
        world_size: number of processes.
    """

    def __init__(
        self,
        num_windows: int,
        batch_size: int,
        seed: int,
        num_batches: int,
        start: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ):
        self.num_windows, self.batch_size, self.seed = num_windows, batch_size, seed
        self.num_batches, self.start = num_batches, start
        self.rank, self.world_size = rank, world_size

    def __len__(self) -> int:
        return self.num_batches  # of the whole run: Lightning counts the batches before `start` too

    def __iter__(self) -> Iterator[list[int]]:
        order, order_pass = np.empty(0, np.int64), -1
        for batch in range(self.start, self.num_batches):
            first = (batch * self.world_size + self.rank) * self.batch_size
            index = []
            for position in range(first, first + self.batch_size):
                if position // self.num_windows != order_pass:
                    order_pass = position // self.num_windows
                    order = np.random.default_rng((self.seed, order_pass)).permutation(self.num_windows)
                index.append(int(order[position % self.num_windows]))
            yield index


def batches_in_order(num_windows: int, batch_size: int, rank: int = 0, world_size: int = 1) -> list[list[int]]:
    """The batches of one process that reads all windows once, together with the others: as many batches in every
    process.

    A position −1 stands for a window without tokens, where the windows do not suffice for a batch in every process.
    """
    together = batch_size * world_size
    batches = []
    for start in range(rank * batch_size, -(-num_windows // together) * together, together):
        real = list(range(start, min(start + batch_size, num_windows)))
        filled = batch_size if world_size > 1 else len(real)
        batches.append(real + [-1] * (filled - len(real)))
    return batches


def process(trainer: Trainer | None) -> tuple[int, int]:
    """This process among all, and their number."""
    return (trainer.global_rank, trainer.world_size) if trainer is not None else (0, 1)


def batches_of_run(count: int, batch_size: int, seed: int, trainer: Trainer | None) -> ShuffledBatches:
    """This process's batches of a whole run, from the step that the trainer has reached; without a trainer, of one
    pass.

    Args:
        count: windows (or images) in the data.
        batch_size: windows per batch in each process.
        seed: of the order.
        trainer: says how many steps and processes there are.
    """
    rank, world_size = process(trainer)
    batches, done = -(-count // (batch_size * world_size)), 0
    if trainer is not None:
        per_step = trainer.accumulate_grad_batches
        done = trainer.global_step * per_step
        if trainer.max_steps > 0:
            batches = trainer.max_steps * per_step
    return ShuffledBatches(count, batch_size, seed, batches, done, rank, world_size)


class WindowData(Data):
    """Windows of text; subclasses say what the windows of a split are.

    Args:
        context_length: T, tokens that the model reads (a window has one more: the last label).
        batch_size: windows per batch in each process.
        seed: of the order of the windows.
        num_workers: processes that make batches; 0 makes them in the training process.
        document_reset: the inner loop starts again where a document starts, so that documents do not see each other.

    Raises:
        MetaTTTError: a size that is not allowed.
    """

    tokenizer: Tokenizer
    unit = "M tokens"  #: of the sizes that people are shown

    def __init__(self, context_length: int, batch_size: int, seed: int, num_workers: int, document_reset: bool):
        check_integer("data.context_length", context_length, most=2**40)
        check_integer("data.batch_size", batch_size, most=MOST_ROWS)
        check_integer("data.num_workers", num_workers, 0, MOST_WORKERS)
        check_integer("data.seed", seed, 0, MOST_SEED)
        check_flag("data.document_reset", document_reset)
        self.context_length, self.batch_size = context_length, batch_size
        self.seed, self.num_workers, self.document_reset = seed, num_workers, document_reset

    @property
    def source(self) -> str:
        """Where the text comes from, for people."""
        raise NotImplementedError

    def describe(self) -> str:
        """The text in a line: where it comes from, and how much there is."""
        sizes = [f"{self.windows(name).size / 1e6:.{digits}f} {self.unit}" for name, digits in SHOWN]
        return f"{self.source}: {sizes[0]} to train, {sizes[1]} to validate"

    def windows(self, name: Split) -> WindowArray:
        """The windows of one split, `[N, T + 1]`, one after the other and without overlap."""
        raise NotImplementedError

    def before_reading(self, windows: WindowArray) -> None:
        """What has to be done before batches of the windows are made, in this process and not in those that make
        them."""

    def sample_document(self) -> bytes:
        """The beginning of a held-out document."""
        raise NotImplementedError

    @property
    def document_start(self) -> int | None:
        """The token at which the inner loop starts again; None if it never does."""
        return self.tokenizer.separator if self.document_reset else None

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Shuffled windows for the whole run, from the step that the trainer has reached."""
        windows = self.windows("train")
        return self._loader(windows, batches_of_run(len(windows), self.batch_size, self.seed, self.trainer))

    def val_dataloader(self) -> DataLoader[Tensor]:
        """The validation windows in order, a part of them in each process."""
        return self.loader("validation", *process(self.trainer))

    def loader(self, name: Split, rank: int = 0, world_size: int = 1) -> DataLoader[Tensor]:
        """The windows of a split, in order, once."""
        windows = self.windows(name)
        return self._loader(windows, batches_in_order(len(windows), self.batch_size, rank, world_size))

    def _loader(self, windows: WindowArray, batches: Sampler[list[int]] | list[list[int]]) -> DataLoader[Tensor]:
        self.before_reading(windows)
        # the sampler hands out whole batches, so that the data is indexed once per batch; automatic batching is off
        return DataLoader(
            Windows(windows), batch_size=None, sampler=batches, num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )  # fmt: skip
