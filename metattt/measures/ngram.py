"""The n-gram baseline: byte counts with Witten-Bell smoothing. What a model must beat to have learned more than byte
pairs."""

from __future__ import annotations

import numpy as np

from metattt.errors import MetaTTTError


class NGram:
    """`P(x_t | x_{t−n} … x_{t−1})` from counts, interpolated with the shorter contexts (Witten and Bell 1991, method
    C).

        P_k(x | h) = (c(h, x) + u(h) P_{k−1}(x | h')) / (c(h) + u(h))

    where `c` counts the training text, `u(h)` is the number of different tokens seen after the context `h`, and `h'` is
    `h` without its first token; `P_{−1}` is uniform. Nothing is tuned. A context never seen backs off to the shorter
    one.

    Args:
        vocab_size: V. Counts take `4 V^(order + 1)` bytes.
        order: n, tokens of context.

    Raises:
        MetaTTTError: if the counts would take more than 2 GiB.
    """

    def __init__(self, vocab_size: int, order: int = 2):
        if vocab_size ** (order + 1) > 2**29:
            raise MetaTTTError(
                f"counts of order {order} over {vocab_size} tokens take more than 2 GiB: use a smaller order"
            )
        self.vocab_size, self.order = vocab_size, order
        self.counts: list[np.ndarray] = []  # by order k: [V^k, V]

    def fit(self, windows: np.ndarray) -> NGram:
        """Counts the training text: windows `[N, T + 1]` that follow one another, so that contexts reach across
        them."""
        stream = windows.reshape(-1).astype(np.int64)
        self.counts = []
        for k in range(self.order + 1):
            key = np.zeros(max(0, len(stream) - k), np.int64)
            for j in range(k + 1):
                key = key * self.vocab_size + stream[j : j + len(key)]
            counts = np.bincount(key, minlength=self.vocab_size ** (k + 1)).astype(np.int32)
            self.counts.append(counts.reshape(-1, self.vocab_size))
        return self

    def nats(self, windows: np.ndarray) -> np.ndarray:
        """`−ln P` of every token but the first of each window: `[N, T + 1]` to `[N, T]`.

        As for a model, the context of a token is what precedes it in its own window.
        """
        ids = windows.astype(np.int64)
        probability = np.full(ids[:, 1:].shape, 1 / self.vocab_size)
        for k, counts in enumerate(self.counts):
            first = max(k, 1)  # the first column with k tokens before it, of those that are predicted
            if first >= ids.shape[1]:
                break
            context = np.zeros_like(ids[:, first:])
            for j in range(k, 0, -1):
                context = context * self.vocab_size + ids[:, first - j : ids.shape[1] - j]
            total, distinct = counts.sum(1, dtype=np.int64), np.count_nonzero(counts, axis=1)
            seen, shorter = distinct[context], probability[:, first - 1 :]
            count = counts[context, ids[:, first:]]
            weight = np.maximum(total[context] + seen, 1)
            probability[:, first - 1 :] = np.where(seen > 0, (count + seen * shorter) / weight, shorter)
        return -np.log(probability)

    def bits_per_byte(self, windows: np.ndarray, token_bytes: np.ndarray) -> float:
        """Total `−log2 P` of the predicted tokens of the windows over the bytes `token_bytes[id]` that they stand
        for."""
        return float(self.nats(windows).sum() / np.log(2) / token_bytes[windows[:, 1:]].sum())
