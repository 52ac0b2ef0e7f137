"""The laws about batches, padded and packed sequences: every row must give the outputs of its tokens alone."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from metattt.layer import TTTLayer
from metattt.state import State
from metattt.testing.specimen import (
    NotApplicable,
    Run,
    Specimen,
    cotangent,
    distance,
    gradient_distance,
    gradients,
    run,
)


def masks(spec: Specimen) -> float:
    """Padding at the left, at the right and inside changes no output, gradient or later output, independent of its
    values. A row of padding only is a sequence that has not started."""
    layer = spec.sample
    x = spec.tokens(batch=4)
    lengths = [x.shape[1], x.shape[1] - 3, 2, 0]
    apart = [_alone(layer, x[:, :length], row) for row, length in enumerate(lengths)]
    later = torch.stack([_later(layer, state, len(x))[row] for row, (_, state) in enumerate(apart)])
    worst = 0.0
    for layout in ("left", "right", "inside"):
        padded, mask = pad(x, lengths, layout)
        inside = layout == "inside"
        together = run(layer, padded, mask=mask, grads=inside)
        if together.y[~mask].any():
            return math.inf
        worst = max(worst, *(distance(together.y[row, mask[row]], y) for row, (y, _) in enumerate(apart)))
        worst = max(worst, distance(_later(layer, together.state, len(x)), later))
        if inside:
            worst = max(worst, _gradients_apart(layer, x, lengths, mask, together))
        if layer.optimizer.read not in ("block", "final") and layer.learner.streams:
            half = padded.shape[1] // 2
            parts = run(layer, padded, [3, half, half + 1], mask=mask)  # different phases at every cut
            worst = max(worst, distance(parts.y, together.y), distance(_later(layer, parts.state, len(x)), later))
    return worst


def alone(spec: Specimen) -> float:
    """A sequence has the outputs that it has without the others of its batch."""
    layer, x = spec.sample, spec.tokens()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        if 1e-12 < distance(layer(x)[0], layer(x)[0]) < math.inf:
            raise NotApplicable("every call draws new random numbers")
    # as the first row: by its place a sequence draws its noise
    return max(distance(run(layer, rows[:1]).y, run(layer, rows).y[:1]) for rows in (x, x.flip(0)))


def packing(spec: Specimen) -> float:
    """Documents packed into one sequence equal the same documents run separately, also with a state before them."""
    layer = spec.sample
    if layer.optimizer.read == "final":
        raise NotApplicable("optimizer.read=final reads every query after the whole call")
    if not layer.learner.streams:
        raise NotApplicable(f"{type(layer.learner).__name__} treats every call as one document")
    x = spec.tokens(batch=3, extra=layer.optimizer.mini_batch_size)
    length = x.shape[1]
    starts = [[length // 4, length // 4 + 1, length // 2], [0, length // 3], [length - 1]]
    reset = torch.zeros(3, length, dtype=torch.bool)
    for row, places in enumerate(starts):
        reset[row, places] = True
    before, mask = pad(
        torch.randn(x.shape, generator=torch.Generator().manual_seed(6), dtype=x.dtype), [5, 3, 2], "right"
    )
    worst = 0.0
    for carried in (None, run(layer, before, mask=mask).state):
        together, later = run(layer, x, reset=reset, state=carried), []
        for row, places in enumerate(starts):
            ends = sorted({0, *places, length})
            for start, end in itertools.pairwise(ends):
                y, state = _alone(layer, x[:, start:end], row, carried if start not in places else None)
                worst = max(worst, distance(together.y[row, start:end], y))
            later.append(_later(layer, state, len(x))[row])
        worst = max(worst, distance(_later(layer, together.state, len(x)), torch.stack(later)))
        if layer.optimizer.read != "block" and carried is not None:
            parts = run(layer, x, [2, length - 2, length - 1], reset=reset, state=carried)
            worst = max(worst, distance(parts.y, together.y))
    return worst


def pad(x: Tensor, lengths: list[int], layout: str) -> tuple[Tensor, Tensor]:
    """The first `lengths` tokens of `x` `[B, T, D]` among padding that holds NaN, and the mask `[B, T + 5]`."""
    columns = x.shape[1] + 5
    mask = torch.zeros(x.shape[0], columns, dtype=torch.bool)
    generator = torch.Generator().manual_seed(7)
    for row, length in enumerate(lengths):
        order = torch.randperm(columns, generator=generator)[:length] if layout == "inside" else torch.arange(columns)
        mask[row, order[len(order) - length :] if layout == "left" else order[:length]] = True
    padded = x.new_full((x.shape[0], columns, x.shape[2]), math.nan)
    padded[mask] = torch.cat([row[:length] for row, length in zip(x, lengths, strict=True)])
    return padded, mask


def _alone(layer: TTTLayer, x: Tensor, row: int, state: State | None = None) -> tuple[Tensor, State | None]:
    """The outputs `[T, D]` of one row without padding, and the state after it (None: it has no tokens); run with as
    many copies as there are rows, so that row `row` draws its own noise."""
    if x.shape[1] == 0:
        return x[row], None
    if state is not None:
        state = state.select(torch.full((x.shape[0],), row))
    alone = run(layer, x[row].expand(x.shape[0], -1, -1), state=state)
    return alone.y[row], alone.state


def _later(layer: TTTLayer, state: State | None, batch: int) -> Tensor:
    """The outputs for the same later tokens in every row, and the number of tokens read. None: nothing was read."""
    if not layer.learner.streams:
        return torch.zeros(batch)
    generator = torch.Generator().manual_seed(8)
    count = layer.optimizer.mini_batch_size + 2
    tokens = torch.randn(1, count, layer.dim, generator=generator, dtype=layer.out.weight.dtype).expand(batch, -1, -1)
    after = run(layer, tokens, state=state)
    return torch.cat([after.y.flatten(1), after.state.pos.unsqueeze(1)], dim=1)


def _gradients_apart(layer: TTTLayer, x: Tensor, lengths: list[int], mask: Tensor, together: Run) -> float:
    """The gradients of the padded run against those of all rows run separately, under the same loss."""
    weight = cotangent(together.y)
    if together.grads["x"][~mask].any():
        return math.inf
    x = x.detach().clone().requires_grad_()
    loss = x.new_zeros(())
    for row, length in enumerate(lengths):
        if not length:
            continue
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            y, _ = layer(x[row : row + 1, :length].expand(x.shape[0], -1, -1))
        loss = loss + (y[row] * weight[row, mask[row]]).sum()
    expected = gradients(layer, x, loss)
    found = dict(together.grads)
    tokens = torch.zeros_like(x)
    for row, length in enumerate(lengths):
        tokens[row, :length] = found["x"][row, mask[row]]
    return gradient_distance(found | {"x": tokens}, expected)
