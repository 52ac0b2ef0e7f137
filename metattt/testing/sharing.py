"""The laws about memory: a state belongs to who holds it, and calls do not meet inside a layer."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from metattt.layer import TTTLayer
from metattt.state import tensors_of
from metattt.testing.specimen import NotApplicable, Specimen, distance, run

THREADS = 4


def aliasing(spec: Specimen) -> float:
    """No state shares memory with the layer's parameters, nor is a given one written to: a step of the outer
    optimizer changes no state, and what is done in place to a state changes no layer."""
    layer = spec.make()
    own = {tensor.untyped_storage().data_ptr() for tensor in (*layer.parameters(), *layer.buffers())}
    x = spec.tokens()
    worst = 0.0
    size = layer.optimizer.mini_batch_size
    for count in (1, size, size + 1):  # without, with a commit, and after it
        state = run(layer, x[:, :count]).state
        if any(tensor.untyped_storage().data_ptr() in own for tensor in tensors_of(state)):
            return math.inf
        if not layer.learner.streams:
            continue
        before = [tensor.clone() for tensor in tensors_of(state)]
        run(layer, x[:, count:], state=state)
        worst = max(worst, *(distance(now, then) for now, then in zip(tensors_of(state), before, strict=True)))
    return worst


def threads(spec: Specimen) -> float:
    """Calls from several threads at once give what they give one after the other."""
    layer = spec.make()
    x = spec.tokens()
    inputs = [x.roll(index, 1) + index for index in range(THREADS)]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        expected = [_several_calls(layer, tokens) for tokens in inputs]
        if any(distance(_several_calls(layer, tokens), y) > 1e-12 for tokens, y in zip(inputs, expected, strict=True)):
            raise NotApplicable("every call draws new random numbers")
    with ThreadPoolExecutor(THREADS) as pool:
        try:
            found = list(pool.map(lambda tokens: _several_calls(layer, tokens), inputs * 2))
        except Exception:  # whatever calls do to each other
            return math.inf
    return max(distance(y, then) for y, then in zip(found, expected * 2, strict=True))


def _several_calls(layer: TTTLayer, x: Tensor) -> Tensor:
    """Outputs of one call, and, where the layer goes on, of calls that hand the state on."""
    with torch.no_grad():
        y, _ = layer(x)
        if not layer.learner.streams:
            return y
        _, state = layer(x[:, :3])
        return torch.cat([y, layer(x[:, 3:], state)[0]], dim=1)
