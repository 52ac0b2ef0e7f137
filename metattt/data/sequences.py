"""Synthetic sequences that come with their labels: made when they are read, from a split, a seed and a number."""

from __future__ import annotations

import zlib
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from metattt.data.base import Data
from metattt.data.windows import Batches
from metattt.errors import MetaTTTError
from metattt.setting import setting

Part = Literal["train", "validation", "test"]
PARTS: tuple[Part, ...] = ("train", "validation", "test")
SHARES = 8  # the validation and the test split have one of so many parts of all sequences, training has the others
MOST_TRIES = 1000  # draws until one lies in a split
MOST_KEPT = 2**28  # bytes of held-out sequences in memory
NO_LABEL = -1  # of a token that nothing is asked at; of numbers it is NaN
Batch = tuple[Tensor, Tensor]
OF_SEQUENCES = ("batch_size", "validation_size", "seed", "num_workers")
"""Settings of every kind of sequence, in the order of its constructor."""


def home_of(content: bytes) -> Part:
    """The split that a sequence belongs to, by its content alone: no sequence is in two of them."""
    return {0: "validation", 1: "test"}.get(zlib.crc32(content) % SHARES, "train")  # type: ignore[return-value]


class SequenceData(Data, takes=OF_SEQUENCES):
    """Sequences with labels; a kind of sequence says how one is drawn.

    Sequence `i` of a split is a function of the split, the seed and `i`: it is the same in every process, whatever was
    read before. Training reads new ones at every step. Those of validation and test do not depend on the seed, and the
    splits are disjoint by content, whatever the seeds of the runs.

    Args:
        batch_size: sequences per batch, over all processes; in a run, each process takes its share.
        validation_size: sequences to validate on, and as many to test on.
        seed: of the training sequences.
        num_workers: see `Data`.

    Attributes:
        length: T, tokens of a sequence.
        inputs: features of a token that is a vector; None: tokens are ids.
        vocab_size: number of different ids; None: tokens are vectors.
    """

    scored_by = "metattt.evaluation.sequences"
    trained_by = "metattt.training.sequence_module:SequenceJob"
    length: int = setting(init=False)
    inputs: int | None = None
    vocab_size: int | None = None

    validation_size: int = setting(default=512, most=2**24)

    def draw(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """One sequence: ids `[T]` or vectors `[T, F]`, and labels `[T]`: ids with `NO_LABEL`, or numbers with NaN."""
        raise NotImplementedError

    def sequence(self, part: Part, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Sequence `index` of a split.

        Raises:
            MetaTTTError: so few different sequences that none is found for this split.
        """
        random = np.random.default_rng((PARTS.index(part), self.seed if part == "train" else 0, index))
        for _ in range(MOST_TRIES):
            inputs, labels = self.draw(random)
            if home_of(inputs.tobytes()) == part:
                return inputs, labels
        raise MetaTTTError(
            f"{self.describe()}: {MOST_TRIES} of these are none for the split {part}: there are too few different ones"
        )

    def train_dataloader(self) -> DataLoader[Batch]:
        """New sequences for every step of the run, from those at `place.done` on; one batch outside of a run."""
        total = self.place.total or self.place.done + 1
        return self._loader("train", Batches(self.batch_size, self.place._replace(total=total)))

    def val_dataloader(self) -> DataLoader[Batch]:
        """The validation sequences, a part of them in each process."""
        return self.loader("validation")

    def loader(self, part: Part) -> DataLoader[Batch]:
        """The validation or test sequences in order, once: as many batches in every process, which wait for each other.
        """
        number, (rank, processes, *_) = self.validation_size, self.place
        if number < processes:
            raise MetaTTTError(
                f"data.validation_size={number} leaves some of {processes} processes without a sequence: set "
                f"data.validation_size={processes} or more, or fewer trainer.devices"
            )
        count = -(-number // (max(self.batch_size, 256) * processes))
        return self._loader(part, [own.tolist() for own in np.array_split(range(rank, number, processes), count)])

    def _loader(self, part: Part, batches: Sampler[list[int]] | list[list[int]]) -> DataLoader[Batch]:
        return DataLoader(
            _Drawn(self, part), None, sampler=batches, num_workers=self.num_workers, generator=torch.Generator()
        )


class _Drawn(Dataset[Batch]):
    """Sequences of a split, indexed by a batch of numbers at once. Held-out ones come again with every validation, and
    most of what is drawn for them lies in another split: they are kept, as far as they are small."""

    def __init__(self, data: SequenceData, part: Part):
        self.data, self.part = data, part
        self.kept: dict[tuple[int, ...], Batch] = {}
        self.room = 0 if part == "train" else MOST_KEPT

    def __getitem__(self, index: list[int]) -> Batch:
        batch = self.kept.get(tuple(index))
        if batch is None:
            inputs, labels = zip(*(self.data.sequence(self.part, i) for i in index), strict=True)
            batch = _tensor(inputs, self.data.vocab_size is None), _tensor(labels)
            if (size := sum(part.nbytes for part in batch)) <= self.room:
                self.kept[tuple(index)] = batch
                self.room -= size
        return batch[0].clone(), batch[1].clone()  # whatever becomes of it


def _tensor(rows: tuple[np.ndarray, ...], vectors: bool = False) -> Tensor:
    """What models read, whatever was drawn: numbers as float32, ids as int64. The numbers of vectors may be whole."""
    made = torch.from_numpy(np.stack(rows))
    return made.float() if vectors or made.is_floating_point() else made.long()
