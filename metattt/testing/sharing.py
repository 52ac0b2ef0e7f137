"""The laws about memory: later calls do not change a state, and calls in several threads do not interfere."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from metattt.layer import TTTLayer
from metattt.nested import tensors_of
from metattt.testing.specimen import NotApplicable, Specimen, distance, run

THREADS = 4


def aliasing(spec: Specimen) -> float:
    """No state shares memory with the layer's parameters, and a passed state is not written to: a step of the outer
    optimizer changes no state, and changing a state in place changes no layer."""
    layer = spec.sample
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
    """Calls from several threads at once give the same results as one after the other."""
    layer = spec.sample
    x = spec.tokens()
    inputs = [x.roll(index, 1) + index for index in range(THREADS)]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        expected = [_several_calls(layer, tokens) for tokens in inputs]
        again = [distance(_several_calls(layer, tokens), y) for tokens, y in zip(inputs, expected, strict=True)]
        if any(gap > 1e-12 for gap in again):
            finite = max(again) < math.inf
            raise NotApplicable("every call draws new random numbers" if finite else "outputs are not finite")
    with ThreadPoolExecutor(THREADS) as pool:
        try:
            found = list(pool.map(lambda tokens: _several_calls(layer, tokens), inputs * 2))
        except Exception:  # calls may disturb each other in any way
            return math.inf
    return max(distance(y, then) for y, then in zip(found, expected * 2, strict=True))


def _several_calls(layer: TTTLayer, x: Tensor) -> Tensor:
    """Outputs of one call and, if the layer has a state, of several calls with the state passed on."""
    with torch.no_grad():
        y, _ = layer(x)
        if not layer.learner.streams:
            return y
        _, state = layer(x[:, :3])
        return torch.cat([y, layer(x[:, 3:], state)[0]], dim=1)
