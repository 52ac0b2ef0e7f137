"""A transformer block as the hidden state: attention inside the model that learns while it reads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.learners.base import Learner, Weight
from metattt.learners.fast_weights import FastWeights
from metattt.modules import standardize
from metattt.registry import register
from metattt.setting import setting


@register(group="learner", name="transformer")
class Transformer(Learner):
    """Pre-norm block: `h = x + A(LN(x))`, `f(x) = h + MLP(LN(h))`, with attention A over the tokens of the mini-batch
    up to each one.

    A token's loss thus depends on the tokens before it in the mini-batch, and a query attends to the queries before it.
    Attention and norms are composed of elementary operations, whose second derivatives are correct.

    Args:
        num_heads: attention heads inside one learner; they divide the head width.
        expansion: hidden width of the MLP as a multiple of the head width.
        learn_init: train W0. False keeps the random W0 it starts with.

    Raises:
        MetaTTTError: heads that do not divide the width, an expansion that is not positive, or labels of another width.
    """

    mixes_tokens = True

    norm = True
    num_heads: int = setting(default=1)
    expansion: float = setting(default=4.0, above=0, fixed=True)

    def weights(self, d_in: int, d_out: int) -> dict[str, Weight]:
        if d_in % self.num_heads:
            raise MetaTTTError(
                f"learner.num_heads={self.num_heads} does not divide the head width {d_in}: set learner.num_heads=1"
            )
        if d_in != d_out:
            raise MetaTTTError(
                f"a transformer block keeps the width, which is {d_in} for inputs and {d_out} for labels"
            )
        hidden = max(1, round(self.expansion * d_in))
        return {
            **{name: Weight((d_in, d_in), std=d_in**-0.5) for name in ("wq", "wk", "wv")},
            "wo": Weight((d_in, d_in)),
            "w1": Weight((d_in, hidden), std=d_in**-0.5),
            "w2": Weight((hidden, d_in)),
            "b1": Weight((hidden,), std=0.0),
            "b2": Weight((d_in,), std=0.0),
            **{f"scale{i}": Weight((d_in,), value=1.0) for i in (1, 2)},
            **{f"shift{i}": Weight((d_in,), std=0.0) for i in (1, 2)},
        }

    def equations(self) -> list[str]:
        width, heads = ("d", "") if self.num_heads == 1 else (f"(d/{self.num_heads})", f", {self.num_heads} heads")
        return [
            f"f(x; W) = {self.wrapped('h + gelu_tanh(LN(h) W1 + b1) W2 + b2')}, h = x + A(LN(x))",
            f"A(x) = softmax((x Wq)(x Wk)ᵀ/√{width})(x Wv) Wo{heads}, over the tokens of the mini-batch up to each one",
        ]

    def forward(self, w: FastWeights, x: Tensor) -> Tensor:
        h = x + self.attention(w, w.bias(w.scale(standardize(x), "scale1"), "shift1"))
        hidden = w.linear(w.bias(w.scale(standardize(h), "scale2"), "shift2"), "w1", "b1")
        return h + w.linear(F.gelu(hidden, approximate="tanh"), "w2", "b2")

    def attention(self, w: FastWeights, x: Tensor) -> Tensor:
        """Causal attention among the given tokens, `[B, H, T, d]`."""
        q, k, v = (w.linear(x, name).unflatten(-1, (self.num_heads, -1)).transpose(2, 3) for name in ("wq", "wk", "wv"))
        scores = q @ k.mT * q.shape[-1] ** -0.5  # [B, H, heads, T, T]
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        y = scores.masked_fill(later, -torch.inf).softmax(-1) @ v
        return w.linear(y.transpose(2, 3).flatten(-2), "wo")
