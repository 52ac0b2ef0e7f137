"""Multi-query associative recall: a list of keys and values, then questions for the values."""

from __future__ import annotations

import numpy as np

from metattt.data.sequences import NO_LABEL, OF_SEQUENCES, SequenceData
from metattt.errors import MetaTTTError, shown
from metattt.registry import register
from metattt.setting import setting


@register(group="data", name="recall")
class RecallData(SequenceData, takes=("pairs", "length", "vocab_size", *OF_SEQUENCES)):
    """MQAR (Arora et al., arXiv 2312.04927, Sec. 3 and App.): `k1 v1 … kn vn`, then every key once more, at even places
    of the rest; the label there is its value. The gap i (in steps of two tokens) between the list and a question has a
    probability in proportion to `i^(a − 1)`. All other tokens of the rest are drawn from the whole vocabulary.

    Keys are from the lower half of the vocabulary (without 0), values from the upper.

    Args:
        pairs: n, keys in the list.
        length: T, tokens.
        vocab_size: number of different ids.
        overwrite: every key comes twice in the list, with another value, at random places; the second one counts. (A
            sum of all values of a key cannot tell which was last; a delta rule can.)
        gap_power: a.
        batch_size, validation_size, seed, num_workers: see `SequenceData`.
    """

    pairs: int = setting(default=8, most=2**20)
    length: int = setting(default=64, least=4, most=2**24)
    vocab_size: int = setting(default=256, least=4, most=2**24)
    overwrite: bool = setting(default=False)
    gap_power: float = setting(default=0.01, above=0)

    def check_settings(self) -> None:
        super().check_settings()
        self.list_length = 2 * self.pairs * (2 if self.overwrite else 1)
        keys, need = self.vocab_size // 2 - 1, self.list_length + 2 * self.pairs
        if self.pairs > keys:
            raise MetaTTTError(
                f"data.pairs={self.pairs} need as many keys, and half of the vocabulary has {keys} beside 0: set "
                f"data.vocab_size={2 * self.pairs + 2} or more"
            )
        if need > self.length:
            raise MetaTTTError(
                f"data.pairs={self.pairs} data.overwrite={shown(self.overwrite)} need {self.list_length} tokens for "
                f"the list and {2 * self.pairs} for the questions: set data.length={need} or more"
            )
        gaps = np.linspace(0, 1, (self.length - self.list_length) // 2 + 1)[1:] ** (self.gap_power - 1)
        gaps = np.maximum(gaps, np.finfo(gaps.dtype).tiny)  # of a large power, most would be 0
        self._gaps = gaps / gaps.sum()

    def describe(self) -> str:
        again = ", each written twice" if self.overwrite else ""
        return f"associative recall: {self.pairs} pairs{again} in {self.length} tokens of {self.vocab_size}"

    def draw(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        half = self.vocab_size // 2
        keys = random.choice(np.arange(1, half), self.pairs, replace=False)
        ids = random.integers(0, self.vocab_size, self.length, dtype=np.int64)
        labels = np.full(self.length, NO_LABEL, np.int64)
        writes = random.permutation(np.repeat(np.arange(self.pairs), 2 if self.overwrite else 1))
        values = random.integers(half, self.vocab_size, self.pairs)
        written = values[writes]
        if self.overwrite:  # the first value of a key is another one
            last = np.unique(writes[::-1], return_index=True)[1]
            early = np.setdiff1d(np.arange(len(writes)), len(writes) - 1 - last)
            shift = random.integers(1, self.vocab_size - half, len(early))
            written[early] = half + (written[early] - half + shift) % (self.vocab_size - half)
        ids[0 : self.list_length : 2], ids[1 : self.list_length : 2] = keys[writes], written
        places = self.list_length + 2 * random.choice(len(self._gaps), self.pairs, replace=False, p=self._gaps)
        ids[places], labels[places] = keys, values
        return ids, labels
