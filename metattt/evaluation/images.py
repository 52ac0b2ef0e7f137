"""`metattt eval` of classifiers: top-1 and top-5 accuracy, cross-entropy, and how far the inner loops come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch.utils.data import DataLoader

from metattt.checkpoints.files import home
from metattt.checkpoints.trained import Trained
from metattt.data.images import NO_LABEL, Images
from metattt.errors import MetaTTTError
from metattt.evaluation.evaluate import Evaluation, data_of
from metattt.evaluation.output import check_same, drawn_alike, finite, table, tracked
from metattt.measures.inner_steps import inner_losses_by_layer
from metattt.measures.labelled import check_classes, classified
from metattt.registry import PARAMETERS

OF_LOADING = ("batch_size", "num_workers", "seed", "min_area", "flip", "augment", "corrupt", "img_size", "in_chans")
"""Fields of the data that do not choose the validation images."""
CHANGES = (  # by the command line
    "path", "batch_size", "dataset", "image_key", "label_key", "validation_path", "validation_split", "corrupt",
)  # fmt: skip


class ImageScores(NamedTuple):
    """How well a model classifies images.

    Attributes:
        images: their number.
        loss: cross-entropy (nats per image).
        top1, top5: share of images whose label is the first class, or among the first five.
        inner: number of a block, from 1 -> inner loss before the first step and after each; empty if not asked for.
    """

    images: int
    loss: float
    top1: float
    top5: float
    inner: dict[int, list[float]]


def evaluate(job: Evaluation) -> dict[str, ImageScores]:
    """Scores classifiers on the validation or test images of their runs; see `Evaluation`.

    Raises:
        MetaTTTError: images or settings that cannot be used, classes or labels that a model does not know.
    """
    chosen = job.chosen
    if chosen.split not in ("validation", "test"):
        raise MetaTTTError(
            f"split={chosen.split} is for text: images are evaluated on those held out, split=validation or split=test"
        )
    sources = {name: _source(one, job.changes) for name, one in job.known.items()}
    check_same(sources, OF_LOADING, "images", CHANGES)
    scores: dict[str, ImageScores] = {}
    for name, source in sources.items():
        model = job.model(name)
        data: Images = job.data(source)
        data.evaluation = job.known[name].evaluation or data.evaluation
        data.known_classes = job.known[name].classes
        data.setup("test" if chosen.split == "test" else "validate")
        loader = data.test_dataloader() if chosen.split == "test" else data.val_dataloader()
        with drawn_alike(model):
            scores[name] = score(model, loader, chosen.inner_loss_windows if chosen.inner_loss else 0)
        if len(sources) > 1:  # now: the next one may be damaged
            job.console.print(f"{name}: top-1 {scores[name].top1:.4f}")
        if chosen.inner_loss and not scores[name].inner:
            job.console.print(f"no inner-loss curves of {name}: no layer takes steps on the whole image")
    _print(job.console, scores, chosen.split)
    with job.report("images", "inner_loss") as made:
        figures = ([name, one.images, one.top1, one.top5, one.loss] for name, one in scores.items())
        made.csv("images", ("model", "images", "top1", "top5", "loss"), figures)
        curves = {name: one.inner for name, one in scores.items() if one.inner}
        if curves:
            steps = (
                (name, block, step, loss)
                for name, blocks in curves.items()
                for block, losses in blocks.items()
                for step, loss in enumerate(losses)
            )
            made.csv("inner_loss", ("model", "block", "inner_step", "loss"), steps)
    return scores


def _source(model: Trained, given: dict[str, Any]) -> dict[str, Any]:
    """The data of a run with what the command line changes."""
    run = data_of(model)
    if not run:
        raise MetaTTTError(f"{home(model.path)} comes with no images: evaluate the checkpoint of a run")
    allowed = [key for key in CHANGES if key in PARAMETERS.get(run["_target_"], given)]
    for key in given:
        if key not in allowed:
            raise MetaTTTError(f"data.{key} does not apply to these images: they have {', '.join(allowed)}")
    if "path" in given:
        run.pop("validation_path", None)  # of the other images
    return run | given


@torch.no_grad()
def score(model: Any, loader: DataLoader[Any], inner: int = 0) -> ImageScores:
    """Accuracy and cross-entropy on images, each once.

    Args:
        model: the vision transformer, in evaluation mode.
        loader: batches of images and labels.
        inner: of the first so many images also the losses of the inner loops; 0 for none.
    """
    device = next(model.parameters()).device
    sums = torch.zeros(4, dtype=torch.double)
    curves: dict[int, Any] = {}
    for images, labels in tracked(loader, "images"):
        images, labels = images.to(device), labels.to(device)
        check_classes(labels, model.num_classes)
        some = images[labels != NO_LABEL][: max(0, inner - int(sums[-1]))]
        with drawn_alike(model):  # so that the predictions below are the same without inner losses
            for number, loss in inner_losses_by_layer(model, some).items() if len(some) else ():
                curves[number] = curves.get(number, 0) + len(some) * loss
        sums += torch.stack([one.double().cpu() for one in classified(finite(model(images).float()), labels)])
    if not sums[-1]:
        raise MetaTTTError("there are no images to evaluate on")
    loss, top1, top5, _ = (sums / sums[-1]).tolist()
    count = int(sums[-1])
    means = {number: (total / min(inner, count)).tolist() for number, total in curves.items()}
    return ImageScores(count, loss, top1, top5, means)


def _print(console: Console, scores: Mapping[str, ImageScores], split: str) -> None:
    columns = ("model", "images", "top-1 %", "top-5 %", "cross-entropy (nats)")
    rows = ((name, one.images, 100 * one.top1, 100 * one.top5, one.loss) for name, one in scores.items())
    console.print(table(f"{split} images", columns, rows))
    curves = [(name, block, *losses) for name, one in scores.items() for block, losses in one.inner.items()]
    if curves:
        steps = map(str, range(max(map(len, curves)) - 2))
        console.print(table("inner loss, before the first step and after each", ("model", "block", *steps), curves))
