"""What the inner loop achieves: its loss before the first step and after each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from metattt.errors import MetaTTTError
from metattt.inner.final import steps
from metattt.inner.loop import InnerLoop
from metattt.inner.tokens import Tokens, consecutive, each
from metattt.layer import TTTLayer
from metattt.learners.fast_weights import FastWeights
from metattt.state import State, Tensors

if TYPE_CHECKING:
    from metattt.models.vision import ImageTransformer


@torch.no_grad()
def inner_losses(layer: TTTLayer, x: Tensor) -> Tensor:
    """Loss of the learner on all tokens, before the first inner step and after each (arXiv 2310.13807, Fig. 1 and 3).

    Averaged over tokens and sequences and divided by the head width, as the paper logs it; the sum over heads is its
    curve.

    Args:
        layer: a layer whose queries read the final weights (`optimizer=whole`).
        x: `[B, T, D]`, the layer's input.

    Returns:
        `[steps + 1, H]`.

    Raises:
        MetaTTTError: a layer without inner steps over the whole call.
    """
    rule, learner = layer.optimizer, layer.learner
    if not learner.has_weights or rule.read != "final":
        raise MetaTTTError(
            f"{type(rule).__name__} takes no steps on the whole call: inner_losses needs a layer with optimizer=whole"
        )
    batch, count = x.shape[:2]
    state = layer.start(x)
    after, tokens, losses = layer.call(x, state).after, tokens_of(layer, x, state), []
    loop = loop_for(layer, tokens)
    blocks, _ = consecutive(count, 0, layer.plan.block)
    sizes = [block.length for block in each(blocks)] if learner.mixes_tokens else rule.compute_chunk or 2048
    pieces = tokens.split(sizes)
    for memory in steps(loop, tokens, loop.start(batch, tokens.gates.eta.dtype), blocks, None, after):
        weights = rule.current(memory, after % rule.mini_batch_size)
        parts = [losses_with(layer, weights, piece).sum((0, 2)) for piece in pieces]
        losses.append(torch.stack(parts).sum(0) / (batch * count * layer.head_dim))
    return torch.stack(losses)


@torch.no_grad()
def inner_losses_by_layer(model: ImageTransformer, images: Tensor) -> dict[int, Tensor]:
    """The curves of every layer that takes steps on the whole image.

    Args:
        model: the model, on the device of the images.
        images: `[B, C, h, w]`.

    Returns:
        By number of the block, from 1: `[T + 1]` losses, averaged over images and tokens and summed over heads.
    """
    found: dict[int, Tensor] = {}
    blocks: Any = model.blocks
    layers: dict[int, Any] = {number: block.attn.layer for number, block in enumerate(blocks, start=1)}
    layers = {n: one for n, one in layers.items() if learns(one) and one.optimizer.read == "final"}

    def measure(number: int, x: Tensor, _: Any) -> None:
        found[number] = inner_losses(layers[number], x).sum(1)

    with before_each(layers, measure):  # at once: the inputs of all layers would take memory
        if layers:
            model(images)
    return found


def tokens_of(layer: TTTLayer, x: Tensor, state: State) -> Tokens:
    """What the inner loop of a layer reads where the layer reads `x` `[B, T, D]` after `state`."""
    views, gates, *_ = layer.tokens(x, state, layer.call(x, state).ctx)
    return Tokens(views, gates)


def loop_for(layer: TTTLayer, tokens: Tokens) -> InnerLoop:
    """The inner loop of a layer, with the types in which it computes on these tokens."""
    slow = {name: value.to(tokens.gates.eta.dtype) for name, value in layer.learner.slow.items()}
    return layer.inner._replace(slow=slow, matmul_dtype=tokens.views.k.dtype)


def losses_with(layer: TTTLayer, weights: Tensors, tokens: Tokens) -> Tensor:
    """ℓ of every token under one set of weights per sequence, `[B, H, n]`, or of every pair of a token."""
    loop, (k, v) = loop_for(layer, tokens), (view.to(tokens.gates.eta.dtype) for view in tokens.views[:2])
    with torch.autocast(k.device.type, enabled=False):
        return loop.losses(FastWeights(weights, loop.slow, loop.matmul_dtype), k, v)


def read_in_pieces(
    layer: TTTLayer, x: Tensor, state: State | None, lengths: Sequence[int]
) -> Iterator[tuple[Tokens, Tensors, Tensors, Tensors]]:
    """What a layer's own inner loop does with `x` `[B, T, D]`, read in pieces.

    Args:
        layer: with weights to train.
        x: its input.
        state: that the text continues; None: it starts from W0.
        lengths: of the pieces (tokens); what is left of the tokens is not read.

    Yields:
        The tokens of a piece, and weights `[B, H, *shape]` by name: W0, those before the piece and those after it.
    """
    rule, loop = layer.optimizer, layer.inner
    state = layer.start(x) if state is None else state
    tokens, first = tokens_of(layer, x, state), 0
    begun = now = rule.current(loop.start(len(x), tokens.gates.eta.dtype), 0)
    if state.weights:
        now = rule.current(state.weights, _filled(state, rule.mini_batch_size))
    for length in lengths:
        here = slice(first, first + length)
        piece, part, first = tokens.map(lambda view: view[:, :, here]), x[:, here], first + length  # noqa: B023
        before = now
        _, state = loop.run(piece, state, layer.call(part, state))
        now = rule.current(state.weights, _filled(state, rule.mini_batch_size))
        yield piece, begun, before, now


def _filled(state: State, size: int) -> int | Tensor:
    """Tokens of the open mini-batch; `[B]` where they differ."""
    return state.pos % size if state.phase is None else state.phase


def learns(layer: object) -> TypeGuard[TTTLayer]:
    """Whether a layer has weights to train."""
    return isinstance(layer, TTTLayer) and layer.learner.has_weights


@contextmanager
def before_each(layers: Mapping[int, nn.Module], look: Callable[[int, Tensor, Any], None]) -> Iterator[None]:
    """In it, every call `layer(x, state)` of one of the layers begins with `look(number, x, state)`.

    Compiled blocks run as written: their code was traced without these hooks.
    """

    def hook(number: int, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        look(number, arguments[0], arguments[1] if len(arguments) > 1 else None)

    hooks = [layer.register_forward_pre_hook(partial(hook, number)) for number, layer in layers.items()]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for one in hooks:
            one.remove()
