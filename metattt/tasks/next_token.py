"""Predict the label of a token from the one before it: next-token prediction inside the layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from metattt.modules import document_tail
from metattt.registry import register
from metattt.state import Context, Tensors
from metattt.tasks.base import Views
from metattt.tasks.reconstruction import Projected, Reconstruction


@register(group="task", name="next_token")
class NextToken(Reconstruction):
    """Train on `k_{t−1} → v_t`, read with `q_t`: the prediction at t is a guess of token t + 1.

    The first token of a document has no token before it: it is predicted from a learned start vector. Views, corruption
    and losses are those of `Reconstruction`, whose arguments it takes.
    """

    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        super().build(dim, num_heads, head_dim)
        self.start = nn.Parameter(torch.zeros(self.groups, 1, head_dim))

    def equations(self) -> list[str]:
        k, *others = super().equations()
        return ["k_t = p_{t−1}, p_0 learned", k.replace("k_t =", "p_t ="), *others]

    def views(
        self, x: Tensor, state: Tensors, ctx: Context, projected: Projected | None = None
    ) -> tuple[Views, Tensors]:
        views, after = super().views(x, state, ctx, projected)
        k = views.k
        start = self.start.to(k.dtype).expand(k.shape[0], -1, -1, -1)
        padded = torch.cat([state["previous"].to(k.dtype) if "previous" in state else start, k], dim=2)
        before = padded[:, :, :-1]
        if ctx.first is not None:
            before = torch.where(ctx.first[:, None, :, None], start, before)
        last = document_tail(padded.transpose(1, 2).flatten(2), 1, ctx)
        after["previous"] = last.unflatten(2, k.shape[1::2]).transpose(1, 2)
        return Views(before, views.v, views.q), after
