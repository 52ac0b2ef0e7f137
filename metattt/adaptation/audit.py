"""Finds tokens that were scored after they had been learned, or from which a prediction was made that should not see
them.

`leaks` takes nobody's word: it changes a text from some token on and scores it once more. All predictions up to that
token, which were made from the tokens before it, must stay as they were. `unseen` compares what a score says of its
weights with what was scored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from metattt.adaptation.adapter import Score
from metattt.errors import MetaTTTError, check_integer

NOISE = 0.05  # of the largest logit: what rounding may change between two calls
Scorer = Callable[[list[Tensor]], list[Tensor]]
"""Documents, `[n]` token ids each, to the logits `[n, V]` that their tokens were predicted with."""


class Leak(NamedTuple):
    """A prediction that depends on what it should not see.

    Attributes:
        document: number of the document.
        token: its token whose prediction moved.
        changed: document and token from which on the text was changed.
        difference: of the logits, at most.
    """

    document: int
    token: int
    changed: tuple[int, int]
    difference: float


def leaks(
    scorer: Scorer,
    documents: Sequence[Tensor],
    vocab_size: int,
    positions: Sequence[int] | None = None,
    carries: bool = False,
    seed: int = 0,
) -> Iterator[Leak]:
    """The first leak that each change of the text shows, one after the other; none of an honest scorer.

    A prediction of token i that depends on token j ≥ i is found by a change from token p on, i ≤ p ≤ j. The scorer runs
    twice and once more for each change.

    Args:
        scorer: what is examined.
        documents: a text, in the order in which it is scored.
        vocab_size: ids are below it.
        positions: tokens from which on a document is changed; None: all.
        carries: a document may see what was learned of those before it; else it may see itself alone.
        seed: of the changes.

    Raises:
        MetaTTTError: no documents, positions that are in none, logits of other tokens than theirs, or a scorer whose
            logits for the same text differ so much that leaks would hide behind it.
    """
    if not any(map(len, documents)):
        raise MetaTTTError("documents hold no tokens: nothing would be examined")
    if positions is not None and not any(0 <= place < len(one) for place in positions for one in documents):
        raise MetaTTTError(f"positions={list(positions)} are in no document: nothing would be examined")
    check_integer("vocab_size", vocab_size, 2)
    generator = torch.Generator().manual_seed(seed)
    expected, again = scorer(list(documents)), scorer(list(documents))
    lengths = [*map(len, documents)], [len(one) if one.ndim == 2 else list(one.shape) for one in expected]
    if lengths[0] != lengths[1]:
        raise MetaTTTError(
            f"the scorer returns logits of {lengths[1]} tokens for documents of {lengths[0]}: return [n, V] for each, "
            "in row i what token i was predicted with (anything for the first, which nothing predicts)"
        )
    noise = max(_moved(one, other) for one, other in zip(expected, again, strict=True))
    if noise > NOISE * max(_moved(one, torch.zeros_like(one)) for one in expected):
        raise MetaTTTError(
            f"the scorer's logits for the same documents differ by {noise:.2g}, behind which leaks would hide: let it "
            "forget what it learned in earlier calls, without dropout"
        )
    for number, document in enumerate(documents):
        for place in range(len(document)) if positions is None else positions:
            if not 0 <= place < len(document):
                continue
            changed = document.clone()
            step = torch.randint(1, vocab_size, (len(document) - place,), generator=generator).to(document.device)
            changed[place:] = (changed[place:] + step) % vocab_size
            scored = scorer([*documents[:number], changed, *documents[number + 1 :]])
            if leak := _first(expected, scored, number, place, carries, 2 * noise):
                yield leak


def unseen(scores: Sequence[Score]) -> bool:
    """Whether no score has been made with weights that say that they had learned one of its tokens."""
    return all(
        dict(known).get(document, 0) <= score.start + column
        for score in scores
        for column, rows in score.seen
        for document, known in zip(score.documents, rows, strict=True)
    )


def repeated(documents: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Documents with the tokens of an earlier one: where weights are carried on, these were learned before they are
    scored, and their scores say nothing. Pairs of the earlier and the later number."""
    first: dict[str, int] = {}
    found = []
    for number, document in enumerate(documents):
        digest = hashlib.sha256(document.cpu().long().numpy().tobytes()).hexdigest()
        if (before := first.setdefault(digest, number)) != number:
            found.append((before, number))
    return found


def _first(
    expected: Sequence[Tensor], scored: Sequence[Tensor], number: int, place: int, carries: bool, noise: float
) -> Leak | None:
    """The first prediction that moved by a change of document `number` from token `place` on, of those that must not:
    up to that token, and in documents that do not see this one."""
    for document, one in enumerate(expected):
        if document > number and carries:
            break
        stop = place + 1 if document == number else len(one)
        difference = _differences(one[:stop], scored[document][:stop]).amax(-1)
        moved = (difference > noise) | difference.isnan()
        moved[:1] &= ~one[:1].isnan().all(-1)  # nothing predicts the first token
        if bool(moved.any()):
            token = int(moved.int().argmax())
            return Leak(document, token, (number, place), float(difference[token]))
    return None


def _moved(one: Tensor, other: Tensor) -> float:
    differences = _differences(one, other)  # what is not finite is no noise, behind which a leak may hide
    return float(differences[differences.isfinite()].max()) if differences.isfinite().any() else 0.0


def _differences(one: Tensor, other: Tensor) -> Tensor:
    """0 also between equal infinities, as logits of tokens that are ruled out."""
    one, other = one.double(), other.double()
    return (one - other).abs().masked_fill(one == other, 0)
