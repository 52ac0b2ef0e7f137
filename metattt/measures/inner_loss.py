"""Inner-loss curves: how well the hidden state of each layer solves its own task along a sequence (arXiv 2407.04620,
Fig. 7)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from metattt.combined import Combined
from metattt.errors import MetaTTTError, NotFinite
from metattt.layer import TTTLayer
from metattt.measures.inner_steps import before_each, loop_for, read_in_pieces
from metattt.models.language_model import LanguageModel
from metattt.state import WHOLE_CALL, State

Curves = dict[str, Tensor]
COLUMNS = ("position", "init", "step_0", "step_1", "target_variance")


def inner_loss_curves(model: LanguageModel, ids: Tensor, segment: int = 2048) -> dict[int, Curves]:
    """Squared error of every layer's learner on the last token of each mini-batch: mean over sequences, heads and
    features.

    | name | weights |
    |---|---|
    | `init` | W0, with which the sequence began |
    | `step_0` | those at the start of the mini-batch |
    | `step_1` | those after the mini-batch |

    `target_variance` is the error of the best constant: the squared distance of the target of these tokens (`v`, or
    `v − k` where the learner is `x + LN(f(x))`) from its mean over the sequence.

    Args:
        model: the model, in evaluation mode.
        ids: `[B, T]` token ids, without padding. Each row is one sequence: the state does not start again at documents.
        segment: tokens per call of the model, cut to whole mini-batches; the state is handed on.

    Returns:
        By the index of the block, `[T // b]` numbers by name (b is the layer's mini-batch size), and under `position`
        the position of the last token of each mini-batch, counted from 1. Left out: tokens after the last whole
        mini-batch, and blocks of `unmeasured`.

    Raises:
        MetaTTTError: no layer can be measured, or there are fewer tokens than in one mini-batch.
    """
    skipped = unmeasured(model)
    layers: dict[int, Any] = {index: block.layer for index, block in enumerate(model.blocks) if index not in skipped}
    if not layers:
        raise MetaTTTError(f"no layer has inner-loss curves: {next(iter(skipped.values()))}")
    sizes: list[int] = [layer.optimizer.mini_batch_size for layer in layers.values()]
    if ids.shape[1] < max(sizes):
        raise MetaTTTError(
            f"{ids.shape[1]} tokens are less than one mini-batch of {max(sizes)}: give longer windows "
            "(data.context_length)"
        )
    period = math.lcm(*sizes)
    seen: dict[int, list[Curves]] = {index: [] for index in layers}  # of each mini-batch
    with (
        torch.no_grad(),
        before_each(layers, lambda index, x, state: seen[index].extend(_mini_batches(layers[index], x, state))),
    ):
        state = None
        for piece in ids.split(max(1, segment // period) * period, dim=1):  # each begins with a mini-batch
            _, state = model.features(piece, state)
    return {index: _curves(found, layers[index].optimizer.mini_batch_size) for index, found in seen.items()}


def unmeasured(model: LanguageModel) -> dict[int, str]:
    """The blocks whose layer has no inner-loss curves, and why."""
    reasons = {}
    for index, block in enumerate(model.blocks):
        layer: Any = block.layer
        if isinstance(layer, Combined):
            reasons[index] = "the two layers in its place are not measured"
        elif not isinstance(layer, TTTLayer):
            reasons[index] = f"{type(layer).__name__} has no inner loop"
        elif not layer.learner.has_weights:
            reasons[index] = f"{type(layer.learner).__name__} keeps its data and has no weights to train"
        elif layer.optimizer.read == "final":
            reasons[index] = "optimizer.read=final trains on the whole sequence and has no mini-batches"
        elif layer.optimizer.mini_batch_size == WHOLE_CALL:
            reasons[index] = "optimizer.mini_batch_size=null makes one mini-batch of a call"
        elif layer.task.label_dim != layer.head_dim:
            reasons[index] = (
                f"the labels of {type(layer.task).__name__} are not as wide as predictions, so it has no squared "
                "error of its own"
            )
    return reasons


def average(model: LanguageModel, loader: Iterable[Tensor], windows: int, segment: int) -> dict[int, Curves]:
    """`inner_loss_curves`, averaged over the first windows of a text.

    Args:
        model: the model, in evaluation mode.
        loader: batches of windows `[B, T + 1]`, whose last token is not read.
        windows: number of windows to read, at most.
        segment: tokens per call of the model.

    Raises:
        NotFinite: a curve that is not finite; else as `inner_loss_curves`.
    """
    device = next(model.parameters()).device
    sums: dict[int, Curves] = {}
    total = 0
    for batch in loader:
        batch = batch[: windows - total]
        for index, curves in inner_loss_curves(model, batch[:, :-1].to(device), segment).items():
            known = sums.get(index, {})
            sums[index] = {name: known.get(name, 0) + len(batch) * values.double() for name, values in curves.items()}
            if not all(bool(values.isfinite().all()) for values in curves.values()):
                raise NotFinite(f"the inner loss of layer {index} is not finite: its inner loop diverges on this text")
        total += len(batch)
        if total >= windows:
            break
    return {index: {name: values / total for name, values in curves.items()} for index, curves in sums.items()}


def _mini_batches(layer: TTTLayer, x: Tensor, state: State | None) -> Iterator[Curves]:
    """Runs the inner loop of a layer on what it is about to read. Of each mini-batch: its errors by name, and the
    targets `[B, H, d]`, the `last` one and the `sum` of all."""
    learner, size = layer.learner, layer.optimizer.mini_batch_size
    for tokens, *weights in read_in_pieces(layer, x, state, [size] * (x.shape[1] // size)):
        k, v = (view.to(tokens.gates.eta.dtype) for view in tokens.views[:2])
        loop, found = loop_for(layer, tokens), {}
        with torch.autocast(k.device.type, enabled=False):
            for name, fast in zip(("init", "step_0", "step_1"), weights, strict=True):
                # a learner that mixes tokens sees those before the last one
                asked = k if learner.mixes_tokens else k[:, :, -1:]
                found[name] = (loop.predict(fast, asked)[:, :, -1] - v[:, :, -1]).square().mean()
        target = v - k if learner.residual else v
        yield {**found, "last": target[:, :, -1], "sum": target.sum(2)}


def _curves(found: Sequence[Curves], size: int) -> Curves:
    """`[T // b]` numbers by name, of what `_mini_batches` of `size` tokens have."""
    curves = {name: torch.stack([one[name] for one in found]) for name in ("init", "step_0", "step_1")}
    mean = sum(one["sum"] for one in found) / (len(found) * size)
    curves["target_variance"] = torch.stack([(one["last"] - mean).square().mean() for one in found])
    curves["position"] = torch.arange(1, len(found) + 1) * size
    return curves


# -- output ------------------------------------------------------------------------------------------------------------


def rows(curves: Mapping[str, Mapping[int, Curves]]) -> Iterator[tuple[Any, ...]]:
    """Model, layer, mini-batch and `COLUMNS` of every mini-batch."""
    for label, layers in curves.items():
        for index, statistics in layers.items():
            columns = [statistics[name].tolist() for name in COLUMNS]
            yield from ((label, index, number, *row) for number, row in enumerate(zip(*columns, strict=True)))
