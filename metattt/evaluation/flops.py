"""Operations of a forward pass, counted on the meta device: no memory, no time."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from torch.utils.flop_counter import FlopCounterMode

from metattt.models.vision import ImageTransformer
from metattt.optimizers import WholeSequence


def flops_per_image(model: ImageTransformer) -> int:
    """Floating-point operations of the matrix products for one image, inner loops included; 2 for each multiply-add."""
    blank = copy.deepcopy(model).to("meta").eval()
    image = torch.empty(1, model.in_chans, *model.patch_embed.img_size, device="meta")
    for module in blank.modules():
        if isinstance(module, WholeSequence):
            module.seed = None  # the meta device has no generators
            module.compute_chunk = image.numel()  # all tokens at once
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = _OneTotal()  # type: ignore[assignment]
    with torch.no_grad(), mock.patch.object(torch, "autocast", _nothing), counter:
        blank(image)
    return counter.get_total_flops()


class _OneTotal(nullcontext[None]):
    """In the place of the counter's module tracker, whose hooks do not allow `autograd.grad` inside a module."""

    parents = ("Global",)


def _nothing(device_type: str, enabled: bool = True) -> Any:
    """In the place of `torch.autocast`, which does not know the meta device."""
    return nullcontext()
