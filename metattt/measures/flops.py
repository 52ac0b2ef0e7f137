"""Operations of a forward pass, counted on the meta device: no memory, little time."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from metattt.layer import TTTLayer
from metattt.models.end_to_end import EndToEnd
from metattt.optimizers import WholeSequence

if TYPE_CHECKING:
    from metattt.models.language_model import LanguageModel
    from metattt.models.vision import ImageTransformer


def flops_per_image(model: ImageTransformer) -> int:
    """Floating-point operations of the matrix products for one image, inner loops included; 2 for each multiply-add."""
    blank = copy.deepcopy(model).to("meta", torch.float32)
    image = torch.empty(1, model.in_chans, *model.patch_embed.img_size, device="meta")
    holders = [block.attn for block in blank.blocks]
    return _of_model(blank, holders, image, model.patch_embed.num_patches, model.embed_dim)


def flops_per_window(model: LanguageModel, length: int) -> int:
    """The same for a window of `length` tokens.

    Args:
        model: on the meta device, as `Builder.empty` makes it; its layers are taken out of it.
        length: T, tokens that are predicted.
    """
    ids = torch.zeros(1, length, dtype=torch.long, device="meta")
    # the steps of `EndToEnd` go back through its last layers, which stay
    apart = model.blocks[: model.prefix] if isinstance(model, EndToEnd) else model.blocks
    return _of_model(model, apart, ids, length, model.dim)


def _of_model(model: nn.Module, holders: Iterable[Any], x: Tensor, count: int, dim: int) -> int:
    """Of a model whose `holders` have the layers; each kind of layer is counted once, for `count` tokens."""
    total, counted = 0, dict[str, int]()
    for holder in holders:
        alike = _description(holder.layer)
        if alike not in counted:
            counted[alike] = flops_of_layer(holder.layer, count, dim)
        total += counted[alike]
        holder.layer = _SkippedLayer()
    return total + count_flops(model.eval(), x)


def flops_of_layer(layer: nn.Module, count: int, dim: int) -> int:
    """The same for a sequence layer on the meta device, and one sequence of `count` tokens of width `dim`.

    A layer that reads mini-batch by mini-batch costs the same for each, so that two and three of them, and what is left
    over, tell the cost of all.
    """
    for module in layer.modules():
        if isinstance(module, WholeSequence):
            module.seed = None  # the meta device has no generators
            module.compute_chunk = count  # all tokens at once
    for module in layer.modules():
        if isinstance(module, TTTLayer):
            module.plan  # noqa: B018, made anew for these settings, and not what is counted
    if isinstance(layer, TTTLayer) and layer.learner.has_weights and layer.optimizer.read != "final":
        size = layer.optimizer.block
        if count > 3 * size:
            lengths = (blocks * size + count % size for blocks in (2, 2, 3))  # a first call tries things out
            _, two, three = (count_flops(layer, torch.empty(1, length, dim, device="meta")) for length in lengths)
            return two + (count // size - 2) * (three - two)
        count_flops(layer, torch.empty(1, count, dim, device="meta"))  # the same
    return count_flops(layer, torch.empty(1, count, dim, device="meta"))


def _description(layer: nn.Module) -> str:
    """Of layers that cost the same: classes, sizes and settings of all modules in them."""
    settings = [
        (
            type(module).__name__,
            [(name, value) for name, value in vars(module).items() if isinstance(value, int | float | str)],
        )
        for module in layer.modules()
    ]
    return str(settings + [tuple(parameter.shape) for parameter in layer.parameters()])


def count_flops(module: nn.Module, x: Tensor) -> int:
    """Of one call, however it is computed; 2 for each multiply-add."""
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = _OneTotal()  # type: ignore[assignment]
    # (torch does not count all operators that attention may become)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        module(x)
    return counter.get_total_flops()


class _SkippedLayer(nn.Module):
    """In the place of a layer."""

    def forward(self, x: Tensor, state: Any = None, **options: Any) -> tuple[Tensor, Any]:
        return x, state


class _OneTotal(nullcontext[None]):
    """In the place of the counter's module tracker, whose hooks do not allow `autograd.grad` inside a module."""

    parents = ("Global",)
