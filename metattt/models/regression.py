"""A model that reads vectors and answers with a number at each: for regression in context."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from metattt.models.block import Backbone, check_function, take
from metattt.models.language_model import LanguageModelState
from metattt.modules import RMSNorm
from metattt.registry import register
from metattt.setting import setting
from metattt.state import Context


@register(group="model", name="regression")
class Regression(Backbone):
    """A linear map in the place of the embedding, the blocks of `LanguageModel`, and a head with one output (the model
    of Garg et al., arXiv 2208.01066, Sec. 3, with any layer).

    Args:
        in_features: F, numbers in a token.
        dim, num_layers, layer, ffn_dim, pre_conv, conv_width, norm_eps: as for `LanguageModel`.

    Raises:
        MetaTTTError: a size that is not positive, or a layer that sees the future.
    """

    in_features: int = setting()
    dim: int = setting()
    num_layers: int = setting()
    layer: Callable[[], nn.Module] = setting()
    ffn_dim: int | None = setting(default=None)
    pre_conv: bool = setting(default=True)
    conv_width: int = setting(default=4)
    norm_eps: float = setting(default=1e-6, above=0)

    def create_modules(self) -> None:
        dim, layer = self.dim, take(self, "layer")
        check_function("layer", layer)
        self.read = nn.Linear(self.in_features, dim)
        self.make_blocks([layer], self.num_layers)
        self.final_norm, self.head = RMSNorm(dim, eps=self.norm_eps), nn.Linear(dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        """`x` `[B, T, F]` to answers `[B, T]`, each made from the tokens up to it."""
        return self.step(x)[0]

    def step(self, x: Tensor, state: LanguageModelState | None = None) -> tuple[Tensor, LanguageModelState]:
        """As `forward`, going on from `state` (None: from the beginning), with the state after the last token.

        Raises:
            MetaTTTError: the state of another model.
        """
        none = (None,) * len(self.blocks)
        before = LanguageModelState(none, none) if state is None else state
        self.check_blocks_of(len(before.layers))
        ctx = Context(torch.zeros(x.shape[:2], dtype=torch.long, device=x.device), None, None, 1)  # the layers count
        y, layers, tails = self._through(len(self.blocks), self.read(x), before, ctx, None, False)
        return self.head(self.final_norm(y)).squeeze(-1), LanguageModelState(tuple(layers), tuple(tails))
