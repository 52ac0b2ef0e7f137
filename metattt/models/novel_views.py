"""A model that learns given views of a scene, and answers with the colours of views that are asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from metattt.errors import MetaTTTError, check_heads
from metattt.models.block import INIT_STD, Backbone, check_function, take
from metattt.modules import RMSNorm
from metattt.registry import register
from metattt.setting import setting


@register(group="model", name="novel_views")
class NovelViews(Backbone):
    """LaCT for novel views (arXiv 2505.23884, Sec. 3.2 and 4.1), with any layer that learns and reads apart. In every
    block the hidden state learns all given tokens, and then all tokens are read with it, given and asked for:

    ```
    x += attention(norm(x))                      # in each view by itself
    x += layer.read(norm(x), layer.learn(norm(x) of given tokens))
    x += SwiGLU(norm(x))
    ```

    Args:
        image_size, patch_size, num_layers: pixels in a row of a view and of a token; number of blocks.
        dim, num_heads: D, width of the residual stream; heads of the attention.
        layer: makes the sequence layer of one block; called `num_layers` times.
    """

    image_size: int = setting()
    patch_size: int = setting()
    dim: int = setting()
    num_heads: int = setting()
    num_layers: int = setting()
    layer: Callable[[], nn.Module] = setting()
    ffn_dim, pre_conv, conv_width, norm_eps = None, False, 1, 1e-6  # of the blocks

    def create_modules(self) -> None:
        dim, layer = self.dim, take(self, "layer")
        check_function("layer", layer)
        check_heads(dim, self.num_heads)
        self.view_tokens, colours = (self.image_size // self.patch_size) ** 2, 3 * self.patch_size**2
        self.in_features = 3 * colours + 1
        self.embed = nn.Linear(self.in_features, dim)
        self.make_blocks([layer], self.num_layers, causal=False)
        for block in self.blocks:
            block.view_norm = RMSNorm(dim, eps=self.norm_eps)
            block.attention = nn.MultiheadAttention(dim, self.num_heads, bias=False, batch_first=True)
            for weight in block.attention.parameters():
                nn.init.normal_(weight, std=INIT_STD)
        self.final_norm, self.head = RMSNorm(dim, eps=self.norm_eps), nn.Linear(dim, colours)

    def forward(self, x: Tensor) -> Tensor:
        """`x` `[B, T, F]`, tokens of whole views as `NovelViewsData` makes them, to colours `[B, T, C]`."""
        if x.ndim != 3 or x.shape[2] != self.in_features or x.shape[1] % self.view_tokens:
            raise MetaTTTError(
                f"x has shape {list(x.shape)}, the model takes [B, T, {self.in_features}] with {self.view_tokens} "
                "tokens of each view: set model.image_size and model.patch_size"
            )
        given, shown = x[..., -1] > 0, x[..., -1] != 0
        learned = given.any(0).nonzero().flatten()  # places with a given token in any of the sequences
        x = self.embed(x)
        block: Any  # with two modules more than others have
        for block in self.blocks:
            views = block.view_norm(x).view(-1, self.view_tokens, self.dim)
            x = x + block.attention(views, views, views, need_weights=False)[0].reshape(x.shape)
            seen = block.layer_norm(x)
            state = block.layer.learn(seen[:, learned], mask=given[:, learned]) if len(learned) else None
            x = x + block.layer.read(seen, state, mask=shown)
            x = x + block.ffn(block.ffn_norm(x))
        return torch.sigmoid(self.head(self.final_norm(x)))
