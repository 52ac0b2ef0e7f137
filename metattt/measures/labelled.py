"""What a model answers where a sequence asks, or of what class an image is: losses, and hits of classes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from metattt.data.sequences import NO_LABEL
from metattt.errors import MetaTTTError

FIRST = 5  # classes among which the right one counts for top-5


def labelled_predictions(model: Any, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The model's predictions at the tokens that have a label, and the labels.

    Args:
        model: a language model, or a `Regression`.
        inputs: `[B, T]` ids, or `[B, T, F]` vectors.
        labels: `[B, T]` classes with `NO_LABEL`, or numbers with NaN, where nothing is asked.

    Returns:
        Logits `[N, V]` and classes `[N]`; or numbers `[N]` and numbers `[N]`, in the order of `labels.flatten()`.
    """
    asked = is_asked(labels)
    if labels.is_floating_point():
        return model(inputs)[asked], labels[asked]
    features, _ = model.features(inputs)
    return model.head(features[asked]), labels[asked]  # logits of the other tokens are never made


def is_asked(labels: Tensor) -> Tensor:
    """Where there is a label, of labels as `labelled_predictions` takes them."""
    return ~labels.isnan() if labels.is_floating_point() else labels != NO_LABEL


def losses_and_hits(found: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
    """Of what `labelled_predictions` returns: the loss of each `[N]` (nats; of numbers the squared error), and whether
    the class is the right one `[N]` (0 or 1; of numbers None)."""
    if labels.is_floating_point():
        return (found.to(torch.promote_types(found.dtype, torch.float32)) - labels).square(), None
    hits = (found.argmax(-1) == labels).float()
    return F.cross_entropy(found.to(torch.promote_types(found.dtype, torch.float32)), labels, reduction="none"), hits


def check_classes(labels: Tensor, count: int, least: int = NO_LABEL) -> None:
    """Raises an error for labels `[B]` of images that are not classes of the model: not every source declares its
    number of classes."""
    if (wrong := labels[(labels < least) | (labels >= count)]).numel():
        raise MetaTTTError(
            f"an image has the label {wrong[0]}, and the model has {count} classes: set model.num_classes"
        )


def classified(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Over images with logits `[B, V]` and labels `[B]`: the sum of the cross-entropy (nats), how many have their label
    as the first class and among the first five, and how many have a label."""
    found = logits.topk(min(FIRST, logits.shape[1]), dim=1).indices == labels.unsqueeze(1)
    nats = F.cross_entropy(logits, labels, reduction="sum", ignore_index=NO_LABEL)
    return nats, found[:, 0].sum(), found.sum(), (labels != NO_LABEL).sum()
