"""Whether the inner loop of a layer learns: does a token's own step lower its loss, do the steps before it, and are
the gates alive?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from metattt.combined import Combined
from metattt.layer import TTTLayer
from metattt.measures.inner_steps import before_each, inner_losses, learns, losses_with, read_in_pieces, tokens_of

TOKENS = 32  # looked at in each sequence: whole mini-batches, spread over it


class Health(NamedTuple):
    """What was seen of one layer. A gate that the rule does not have is None.

    Attributes:
        before: `[H, n]` ℓ(W_{t−1}), the loss of a token before its own step, by its place in the mini-batch: mean over
            sequences and mini-batches. Where weights move once per mini-batch: with those at its start.
        after: `[H, n]` ℓ(W_t); with those at the end of the mini-batch.
        rising: `[H, n]` share of tokens whose loss is larger after than before.
        worse: `[H, n]` share of tokens whose loss before their own step is larger than with W0: what was learned from
            the tokens before them harms.
        eta: `[H]` largest |η κ| of a token.
        alpha: `[H]` largest α of a token, or of one of its channels.
        tau: `[1 or H, b]` token steps.
        tokens: T, of the sequences that were read.
    """

    before: Tensor
    after: Tensor
    rising: Tensor
    worse: Tensor
    eta: Tensor
    alpha: Tensor | None
    tau: Tensor | None
    tokens: int


def inner_health(model: nn.Module, run: Callable[[], Any]) -> dict[int, Health]:
    """Looks at every layer with an inner loop while a model runs.

    Args:
        model: with `blocks`, whose layer is `block.layer`, or of timm's models `block.attn.layer`.
        run: runs the model once, without derivatives.

    Returns:
        By index of the block. Left out: layers without weights to train.
    """
    found: dict[int, Health] = {}
    candidates = {index: learning(block) for index, block in enumerate(getattr(model, "blocks", ()))}
    layers = {index: layer for index, layer in candidates.items() if layer is not None}

    def look(index: int, x: Tensor, _: Any) -> None:
        found[index] = layer_health(layers[index], x)

    with before_each(layers, look):
        if layers:
            run()
    return found


def learning(block: nn.Module) -> TTTLayer | None:
    """The layer of a block that has weights to train, which may be one of two in its place; None: there is none, or
    its views are made elsewhere."""
    layer = getattr(block, "layer", None) or getattr(getattr(block, "attn", None), "layer", None)
    if isinstance(layer, Combined):
        return None if layer.out is not None else next(filter(learns, layer.modules()), None)
    return layer if learns(layer) else None


@torch.no_grad()
def layer_health(layer: TTTLayer, x: Tensor) -> Health:
    """Looks at one layer.

    Args:
        layer: with weights to train.
        x: `[B, T, D]`, its input, read from W0 on as one sequence.
    """
    rule = layer.optimizer
    gates = tokens_of(layer, x, layer.start(x)).gates
    eta = gates.eta if gates.eta.ndim == 3 else gates.eta.abs().amax(-1)  # of the pairs of a token
    eta = eta if gates.weight_lr is None else eta * gates.weight_lr.abs().amax(-1)
    eta = eta if gates.kappa is None else eta * gates.kappa
    gate = getattr(rule, "decay_gate", None)  # some rules hand on its logits
    alpha = gate(x) if gate is not None else None
    alpha = gates.alpha if alpha is None else alpha
    alpha = alpha if gates.decay is None else gates.decay.exp().amax(-1)
    if rule.read == "final":
        losses = inner_losses(layer, x).unsqueeze(-1)  # [steps + 1, H, 1]
        before, after = losses[0], losses[-1]
        rising, worse = (after > before).to(after.dtype), torch.zeros_like(after)
    else:
        before, after, rising, worse = _by_place(layer, x)
    largest = eta.abs().amax((0, 2)), None if alpha is None else alpha.amax((0, 2))
    return Health(before, after, rising, worse, *largest, rule.token_steps(), x.shape[1])


def _by_place(layer: TTTLayer, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`before`, `after`, `rising` and `worse` of `Health`, of `TOKENS` tokens of every sequence."""
    rule, count = layer.optimizer, x.shape[1]
    size = min(rule.mini_batch_size, count)
    by_token = rule.read in ("inclusive", "exclusive") and not layer.learner.mixes_tokens
    lengths: list[int] = []
    marks: list[int | None] = []  # which mini-batch a piece belongs to; None: it lies between two that are looked at
    wanted, last = min(count // size, max(1, TOKENS // size)), count // size - 1
    for index in [last] if wanted == 1 else [place * last // (wanted - 1) for place in range(wanted)]:
        gap = index * size - sum(lengths)
        inside = [1] * size if by_token else [size]
        lengths += [*([gap] if gap else []), *inside]
        marks += [*([None] if gap else []), *[index] * len(inside)]
    seen: dict[int, list[tuple[Tensor, ...]]] = {}  # with W0, W_{t−1} and W_t: [B, H, n] of the pieces
    for mark, (token, *weights) in zip(marks, read_in_pieces(layer, x, None, lengths), strict=True):
        if mark is not None:
            losses = (losses_with(layer, one, token) for one in weights)
            seen.setdefault(mark, []).append(tuple(one if one.ndim == 3 else one.mean(3) for one in losses))
    whole = [[torch.cat(values, 2) for values in zip(*pieces, strict=True)] for pieces in seen.values()]
    start, before, after = (torch.stack(values) for values in zip(*whole, strict=True))  # [mini-batches, B, H, n]
    measured = (before, after, ~(after <= before), ~(before <= start))  # NaN is no progress either
    before, after, rising, worse = (one.to(start.dtype).mean((0, 1)) for one in measured)
    return before, after, rising, worse
