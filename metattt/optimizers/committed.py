"""What gates may depend on besides the token: the weights of the last commit."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from metattt.state import Tensors


class Committed(Protocol):
    """W_a, the weights of the last commit, and `n` tokens of the mini-batch after it.

    All parts of a mini-batch see the same W_a, however a sequence is split.

    Attributes:
        weights: W_a by name, `[B, H, *shape]`.
        k, v, q: views of the tokens, `[B, H, n, ·]`.
    """

    weights: Tensors
    k: Tensor
    v: Tensor
    q: Tensor

    def predict(self, x: Tensor) -> Tensor:
        """f(x; W_a), `[B, H, n, d]`."""

    def losses(self) -> Tensor:
        """ℓ(f(k_t; W_a), v_t), `[B, H, n]`."""

    def gradient_norms(self) -> Tensor:
        """‖∇ℓ_t(W_a)‖ over all fast weights, `[B, H, n]`."""
