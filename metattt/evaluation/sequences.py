"""`metattt eval` of models trained on synthetic sequences: accuracy and loss, by how much was shown before."""

from __future__ import annotations

from itertools import chain, starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metattt.data.sequences import Part, SequenceData
from metattt.errors import MetaTTTError
from metattt.evaluation.evaluate import Evaluation, data_of
from metattt.evaluation.output import check_same, drawn_alike, finite, table, tracked
from metattt.measures.labelled import is_asked, labelled_predictions, losses_and_hits

OF_TRAINING = ("seed", "batch_size", "num_workers")  # fields of the data that do not choose the sequences


class SequenceScores(NamedTuple):
    """How well a model answers, by the number of a question in its sequence, from 0: of `data=in_context` the number of
    examples before it.

    Attributes:
        loss: `[n]` mean cross-entropy (nats), or squared error.
        accuracy: `[n]` share of right answers; None where numbers are asked for.
        sequences: their number.
        counts: `[n]` of them, those that ask so many questions.
    """

    loss: Tensor
    accuracy: Tensor | None
    sequences: int
    counts: Tensor

    def mean(self, values: Tensor) -> float:
        """Over all questions of all sequences."""
        return float((values * self.counts).sum() / self.counts.sum())


def evaluate(job: Evaluation) -> dict[str, SequenceScores]:
    """Scores models on the validation or test sequences of their runs; see `Evaluation`.

    Raises:
        MetaTTTError: models of other data, settings that cannot be used, answers that are not finite.
    """
    chosen = job.chosen
    if chosen.split not in ("validation", "test"):
        raise MetaTTTError(f"split={chosen.split} has no end, or is for text: set split=validation or split=test")
    if chosen.inner_loss:
        raise MetaTTTError("inner_loss=true is for text and images, and these are synthetic sequences: leave it out")
    for key, value in job.changes.items():
        raise MetaTTTError(
            f"data.{key}={value} does not apply: a model is evaluated on sequences like those of its run"
        )
    sources = {name: data_of(one) for name, one in job.known.items()}
    check_same(sources, OF_TRAINING, "sequences")
    scores: dict[str, SequenceScores] = {}
    for name, source in sources.items():
        model = job.model(name)
        data: SequenceData = job.data(source)
        with drawn_alike(model):
            scores[name] = score(model, data, chosen.split)
        if len(sources) > 1:  # now: the next one may be damaged
            job.console.print(f"{name}: loss {scores[name].mean(scores[name].loss):.4f}")
    columns = ("model", "sequences", "accuracy %", "loss", "loss, first question", "last question")
    job.console.print(table(f"{chosen.split} sequences", columns, starmap(_row, scores.items())))
    with job.report("sequences") as made:
        made.csv("sequences", ("model", "question", "loss", "accuracy"), chain(*starmap(_curve, scores.items())))
    return scores


@torch.no_grad()
def score(model: Any, data: SequenceData, part: Part = "validation") -> SequenceScores:
    """Loss and accuracy of a language model or a `Regression`, in evaluation mode, on the sequences of a split, each
    once."""
    device = next(model.parameters()).device
    losses, hits, numbers, count = [], [], [], 0
    for batch in tracked(data.loader(part), "sequences"):
        found, labels = labelled_predictions(model, *(one.to(device) for one in batch))
        loss, hit = losses_and_hits(finite(found), labels)
        count += len(batch[0])
        asked = is_asked(batch[1])
        numbers.append(asked.cumsum(1)[asked] - 1)
        losses.append(loss.double().cpu())
        hits += [] if hit is None else [hit.double().cpu()]
    counts = torch.cat(numbers).bincount()

    def means(values: list[Tensor]) -> Tensor:
        return torch.cat(numbers).bincount(torch.cat(values)) / counts

    return SequenceScores(means(losses), means(hits) if hits else None, count, counts)


def _row(name: str, one: SequenceScores) -> list[object]:
    accuracy = "" if one.accuracy is None else 100 * one.mean(one.accuracy)
    return [name, one.sequences, accuracy, one.mean(one.loss), one.loss[0].item(), one.loss[-1].item()]


def _curve(name: str, one: SequenceScores) -> list[tuple[Any, ...]]:
    rates = [""] * len(one.loss) if one.accuracy is None else one.accuracy.tolist()
    return [(name, number, *row) for number, row in enumerate(zip(one.loss.tolist(), rates, strict=True))]
