"""The n-gram baseline: byte counts with Witten-Bell smoothing. What a model must beat to have learned more than byte
pairs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

PIECE = 2**22  # tokens that are counted or predicted at a time: memory does not grow with the text
MOST = 2**26  # entries of a table; where it would have more, the text is sorted


class NGram:
    """`P(x_t | x_{t−n} … x_{t−1})` from counts, interpolated with the shorter contexts (Witten and Bell 1991, method
    C).

        P_k(x | h) = (c(h, x) + u(h) P_{k−1}(x | h')) / (c(h) + u(h))

    where `c` counts the training text, `u(h)` is the number of different tokens seen after the context `h`, and `h'` is
    `h` without its first token; `P_{−1}` is uniform. Nothing is tuned. A context never seen backs off to the shorter
    one.

    Args:
        vocab_size: V.
        order: n, tokens of context; V^(n + 1) is 2^63 at most.
    """

    def __init__(self, vocab_size: int, order: int):
        self.vocab_size, self.order = vocab_size, order
        self.counts: list[_Counts] = []  # by order k

    def fit(self, windows: np.ndarray) -> NGram:
        """Counts the training text: windows `[N, T + 1]` that follow one another, so that contexts reach across
        them."""
        self.counts = [_Counts.of(windows.reshape(-1), self.vocab_size, k) for k in range(self.order + 1)]
        return self

    def nats(self, windows: np.ndarray, order: int) -> np.ndarray:
        """`−ln P` of every token but the first of each window: `[N, T + 1]` to `[N, T]`.

        As for a model, the context of a token is what precedes it in its own window. `order`: what was counted or less.
        """
        ids = windows.astype(np.int64)
        probability = np.full(ids[:, 1:].shape, 1 / self.vocab_size)
        for k, counts in enumerate(self.counts[: order + 1]):
            first = max(k, 1)  # the first column with k tokens before it, of those that are predicted
            if first >= ids.shape[1]:
                break
            context = np.zeros_like(ids[:, first:])
            for j in range(k, 0, -1):
                context = context * self.vocab_size + ids[:, first - j : ids.shape[1] - j]
            count, total, seen = counts.look_up(context, ids[:, first:])
            shorter = probability[:, first - 1 :]
            weight = np.maximum(total + seen, 1)
            probability[:, first - 1 :] = np.where(seen > 0, (count + seen * shorter) / weight, shorter)
        return -np.log(probability)

    def bits_per_byte(self, windows: np.ndarray, token_bytes: np.ndarray, order: int) -> float:
        """Total `−log2 P` of the predicted tokens of the windows over the bytes `token_bytes[id]` that they stand for;
        `order` as in `nats`."""
        rows = max(1, PIECE // windows.shape[1])
        parts = [windows[start : start + rows] for start in range(0, len(windows), rows)]
        nats = sum(self.nats(one, order).sum() for one in parts)
        return float(nats / np.log(2) / sum(token_bytes[one[:, 1:]].sum() for one in parts))


class _Counts(NamedTuple):
    """Counts of the contexts of one length that occur, in order."""

    keys: np.ndarray  # [M] context and the token after it, as the digits of a number in base V
    counts: np.ndarray  # [M]
    contexts: np.ndarray  # [C]
    total: np.ndarray  # [C] tokens seen after a context
    distinct: np.ndarray  # [C] different ones
    vocab_size: int

    @classmethod
    def of(cls, stream: np.ndarray, vocab_size: int, k: int) -> _Counts:
        """Counts every token of the text `stream` `[N]`, with the k before it."""
        size = vocab_size ** (k + 1)
        if size <= MOST:  # counted, not sorted
            table = np.zeros(size, np.int64)
            for first in range(0, len(stream) - k, PIECE):
                table += np.bincount(_keys(stream[first : first + PIECE + k], vocab_size, k), minlength=size)
            keys = np.flatnonzero(table)
            counts = table[keys]
        else:
            keys, counts = np.unique(_keys(stream, vocab_size, k), return_counts=True)
        contexts, start = np.unique(keys // vocab_size, return_index=True)
        total = np.add.reduceat(counts, start) if len(start) else counts
        return cls(keys, counts, contexts, total, np.diff(start, append=len(keys)), vocab_size)

    def look_up(self, context: np.ndarray, token: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """How often a token came after a context, how many tokens did, and how many different ones."""
        return (
            _value(self.keys, self.counts, context * self.vocab_size + token),
            _value(self.contexts, self.total, context),
            _value(self.contexts, self.distinct, context),
        )


def _keys(tokens: np.ndarray, vocab_size: int, k: int) -> np.ndarray:
    """Every token after the first k with the k before it, as the digits of a number in base V: `[N − k]`."""
    tokens = tokens.astype(np.int64)
    key = np.zeros(max(0, len(tokens) - k), np.int64)
    for j in range(k + 1):
        key = key * vocab_size + tokens[j : j + len(key)]
    return key


def _value(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The value of each wanted key, 0 for one that is not there; `keys` are sorted."""
    if not len(keys):
        return np.zeros(wanted.shape, np.int64)
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)
