"""Which numbers of a training step are not finite: a flag that costs one reduction, and the names once it is raised."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from metattt.layer import TTTLayer

NAMED = 3  # parameters, windows or heads in a message; the others are counted


class Found(NamedTuple):
    """A parameter with numbers that are not finite.

    Attributes:
        name: of the parameter in the model.
        layer: index of its block; None outside of all blocks.
        heads: those concerned; empty where the parameter has no axis of heads.
        finite: every number is finite by itself, but no norm of them is.
    """

    name: str
    layer: int | None
    heads: tuple[int, ...]
    finite: bool

    def __str__(self) -> str:
        heads = f" (head{'s' * (len(self.heads) > 1)} {listed(self.heads)})" if self.heads else ""
        return f"{self.name}{heads}{' (too large to be squared)' if self.finite else ''}"


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """A tensor put together from what all processes hold; all of them have to call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def overflows(tensors: Iterable[Tensor]) -> Tensor | None:
    """Whether the norm of all these tensors together is not finite, as a number 0 or 1 on their device; None of none.

    One multi-tensor reduction over what this process holds, and no wait for the device. A norm beyond the type's range
    counts: Adam squares what it is given.
    """
    parts = [local(tensor.detach()) for tensor in tensors if tensor.is_floating_point()]
    return (~torch.isfinite(get_total_norm(parts))).float() if parts else None


def name_parameters(model: nn.Module, gradients: bool) -> list[Found]:
    """The parameters of a model whose values (or `gradients`) have a norm that is not finite, the one nearest to the
    output first: a backward pass spoils what comes after the fault, which is what is nearer to the input.

    Processes that share a divided model have to call it together.
    """
    found = []
    heads = _heads(model)
    for name, parameter in model.named_parameters():
        tensor = parameter.grad if gradients else parameter
        if tensor is None:
            continue
        value = whole(tensor.detach())
        if torch.isfinite(value.float().norm()):
            continue
        bad = ~torch.isfinite(value)
        count = next((count for prefix, count in heads.items() if name.startswith(prefix)), 0)
        concerned = bad.reshape(count, -1).any(1).nonzero().flatten().tolist() if count and len(value) == count else []
        found.append(Found(name, block_of(name), tuple(concerned), not bool(bad.any())))
    return sorted(found, key=lambda one: -1 if one.layer is None else one.layer, reverse=True)


def block_of(name: str) -> int | None:
    """Index of the block that a module or parameter belongs to: `blocks.3.layer` is of block 3."""
    match = re.search(r"(?:^|\.)blocks\.(\d+)\.", f"{name}.")
    return int(match[1]) if match else None


def name_tokens(losses: Tensor) -> str | None:
    """Where the losses of a batch, `[B, T]` of tokens or `[B]` of images, are not finite; None if all are."""
    bad = ~torch.isfinite(losses)
    if not bad.any():
        return None
    if losses.ndim == 1:
        return f"images {listed(bad.nonzero().flatten().tolist())} of {len(losses)}"
    size = f"{losses.shape[0]} windows of {losses.shape[1]} tokens"
    if bad.all():
        return f"every token of {size}"
    rows = bad.any(1).nonzero().flatten().tolist()
    shown = [f"window {row} from token {int(bad[row].int().argmax()) + 1} on" for row in rows[:NAMED]]
    more = f" and in {len(rows) - NAMED} more" if len(rows) > NAMED else ""
    return f"{', '.join(shown)}{more}, of {size}"


def listed(numbers: Iterable[int]) -> str:
    """Numbers for people, neighbours as a range: `0, 3–5`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in runs)


def _heads(model: nn.Module) -> dict[str, int]:
    """Prefix of the parameters whose first axis may be the heads, and the number of heads."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, TTTLayer)]
    return {f"{name}.{part}.": layer.num_heads for name, layer in layers for part in ("learner", "optimizer")}
