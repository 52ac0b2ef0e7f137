"""A TTT layer in the place of attention in a vision transformer of timm, trained in a plain PyTorch loop.

    python examples/timm_vit.py [steps=150]

The model is timm's own, with timm's patch embedding, class token and head; every second block gets a layer that learns on the
image (MTTT-Linear: every token sees all others). The images are scikit-learn's handwritten digits; a quarter is held out.
"""

from __future__ import annotations

import sys
from typing import Any

import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import metattt

DIM, HEADS, BATCH, RATE = 48, 2, 64, 3e-3


class Attention(nn.Module):
    """What timm's blocks call: `[B, N, D]` to `[B, N, D]`."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
        """`attn_mask` must be None: the layer decides which tokens see each other."""
        assert attn_mask is None
        y, _ = self.layer(x)  # the state after the image is of no use here
        return y


def make_model(replace: bool) -> nn.Module:
    """A small vision transformer; `replace` puts our layer into every second block."""
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=2, in_chans=1, num_classes=10, embed_dim=DIM, depth=4, num_heads=HEADS
    )
    for block in model.blocks[1::2] if replace else ():
        block.attn = Attention(metattt.build("mttt_linear", dim=DIM, num_heads=HEADS))
    return model


def main(steps: int = 150) -> dict[str, float]:
    """Prints and returns the accuracy on the digits that are held out."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 8 - 1  # [1797, 1, 8, 8]
    labels = torch.from_numpy(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held, rest = order[: len(order) // 4], order[len(order) // 4 :]
    found = {}
    for name in ("attention in all blocks", "MTTT-Linear in every second block"):
        model = make_model(replace=name.startswith("MTTT"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
        for _ in range(steps):
            batch = rest[torch.randint(len(rest), (BATCH,))]
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        with torch.no_grad():
            found[name] = (model.eval()(images[held]).argmax(1) == labels[held]).float().mean().item()
        count = sum(parameter.numel() for parameter in model.parameters())
        print(f"{name:<36}{count:>10,} parameters   top-1 {100 * found[name]:.1f} %")
    return found


if __name__ == "__main__":
    main(*(int(word.removeprefix("steps=")) for word in sys.argv[1:]))
