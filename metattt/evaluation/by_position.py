"""Loss by token position: what a model gains from a longer context (arXiv 2407.04620, Fig. 5)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from metattt.errors import NotFinite, check_choice, check_integer
from metattt.evaluation.output import table
from metattt.models.language_model import LanguageModel, tokens_per_call

BINS = ("log", "fixed", "none")


@dataclass(frozen=True)
class Scores:
    """Sums over the windows of a text, or over documents, by position: entry t is the prediction of a token from the
    t + 1 tokens before it.

    Attributes:
        nats: `[T]` cross-entropy.
        bytes: `[T]` bytes that the predicted tokens stand for.
        count: `[T]` predictions.
        seconds: that the predictions took, where it was measured.
    """

    nats: np.ndarray
    bytes: np.ndarray
    count: np.ndarray
    seconds: float = 0.0

    @property
    def tokens(self) -> int:
        """Number of predicted tokens."""
        return int(self.count.sum())

    @property
    def loss(self) -> float:
        """Nats per token."""
        return float(self.nats.sum()) / self.tokens

    @property
    def perplexity(self) -> float:
        """Per token."""
        return math.exp(min(self.loss, 700.0))  # a double ends near exp(709)

    @property
    def bits_per_byte(self) -> float:
        """NaN if the tokens stand for no bytes (separators alone)."""
        count = int(self.bytes.sum())
        return float(self.nats.sum()) / math.log(2) / count if count else math.nan

    def between(self, start: int, stop: int) -> Scores:
        """The scores of the positions `start` … `stop − 1`."""
        return Scores(self.nats[start:stop], self.bytes[start:stop], self.count[start:stop])


def score(
    model: LanguageModel,
    loader: Iterable[Tensor],
    token_bytes: Tensor,
    segment: int = 2048,
    document_start: int | None = None,
) -> Scores:
    """Scores a model on windows `[B, T + 1]`: every token but the first of each is predicted from those before it.

    A window is read in segments whose state is handed on, so that memory depends on the segment and not on T. (Learners
    whose state is the data itself keep the data.)

    Args:
        model: the model, in evaluation mode.
        loader: batches of windows, all of the same length.
        token_bytes: `[V]` bytes that each token stands for.
        segment: tokens per call of the model; all of a window where a layer's mini-batch is a whole call.
        document_start: the token at which the inner loop starts again from W0; None: it never does.

    Raises:
        MetaTTTError: a segment that is not positive; `NotFinite`, a loss that is none.
    """
    check_integer("segment", segment)
    device = next(model.parameters()).device
    nats = num_bytes = torch.zeros((), dtype=torch.long)
    windows = 0
    for batch in loader:
        losses = _losses(model, batch.to(device), segment, document_start)
        nats = nats + losses.double().sum(0).cpu()
        if not bool(nats.isfinite().all()):
            place = int((~nats.isfinite()).int().argmax())
            raise NotFinite(
                f"the loss is {nats[place].item()} from position {place + 1} on: the weights, or what the inner "
                "loop makes of them on this text, have diverged; take an earlier checkpoint"
            )
        num_bytes = num_bytes + token_bytes[batch[:, 1:]].sum(0)
        windows += len(batch)
    return Scores(nats.numpy(), num_bytes.numpy(), np.full(len(nats), windows))


def _losses(model: LanguageModel, ids: Tensor, segment: int, document_start: int | None) -> Tensor:
    """Cross-entropy of every prediction, `[B, T + 1]` ids to `[B, T]` nats."""
    losses = []
    state = None
    segment = tokens_per_call(model, segment, ids.shape[1])
    with torch.inference_mode():
        for start in range(0, ids.shape[1] - 1, segment):
            read = ids[:, start : min(start + segment, ids.shape[1] - 1)]
            labels = ids[:, start + 1 : start + 1 + read.shape[1]]
            reset = None if document_start is None else read == document_start
            nats, state = model.cross_entropy(read, labels, state, reset, reduction="none")
            losses.append(nats)
        return torch.cat(losses, dim=1)


# -- bins --------------------------------------------------------------------------------------------------------------


def bin_edges(length: int, bins: str, count: int) -> list[int]:
    """Edges `0 = e_0 < … < e_n = length` of the bins `e_i … e_{i+1} − 1` that smooth a curve over positions.

    Args:
        length: T, positions.
        bins: `log` (each bin longer than the last by a constant factor), `fixed` (all of the same length) or `none`
            (one per position).
        count: bins at most; less where they would be shorter than a token. `none` ignores it.
    """
    check_choice("bins", bins, BINS)
    check_integer("num_bins", count)
    if bins == "none":
        return list(range(length + 1))
    edges = np.geomspace(1, length + 1, count + 1) - 1 if bins == "log" else np.linspace(0, length, count + 1)
    return sorted({0, length, *(round(float(edge)) for edge in edges)})


# -- output ------------------------------------------------------------------------------------------------------------


COLUMNS = ("model", "first", "last", "tokens", "loss", "perplexity", "bits_per_byte")


def bits_by_position(scores: Mapping[str, Scores], edges: Sequence[int]) -> Table:
    """Bits per byte by position: a row for every bin, a column for every model."""
    rows = (
        (
            f"{start + 1:,}" if stop == start + 1 else f"{start + 1:,} – {stop:,}",
            *(one.between(start, stop).bits_per_byte for one in scores.values()),
        )
        for start, stop in pairwise(edges)
    )
    return table("bits per byte by position (tokens)", ("position", *scores), rows, left=0)


def rows(scores: Mapping[str, Scores], edges: Sequence[int]) -> Iterator[tuple[Any, ...]]:
    """`COLUMNS` of every model and bin: positions `first` … `last`, counted from 1, and the mean over them and over
    windows."""
    for label, all_positions in scores.items():
        for start, stop in pairwise(edges):
            one = all_positions.between(start, stop)
            yield label, start + 1, stop, one.tokens, one.loss, one.perplexity, one.bits_per_byte


def places(edges: Sequence[int], bins: str) -> list[float]:
    """The middle of each bin, for a curve; on a logarithmic axis, where the bins are `log`."""
    first, last = np.array(edges[:-1]) + 1, np.array(edges[1:])
    found: list[float] = (np.sqrt(first * last) if bins == "log" else (first + last) / 2).tolist()
    return found
