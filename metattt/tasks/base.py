"""The contract of a task: what is learned from a token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from torch import Tensor

from metattt.component import Component
from metattt.errors import MetaTTTError
from metattt.state import Context, Tensors


class Views(NamedTuple):
    """The three views of a token, each `[B, H, T, ·]`: training view k, label view v, test view q.

    With grouped-query heads k and v are `[B, G, T, ·]`, each shared by H / G neighbouring heads of q.

    Two more views turn a linear learner's gradient `kᵀ(k W − v)` into a generalised delta rule, `bᵀ(p W) − kᵀ v`:

    * `erase_key` (p): the prediction for p is erased; None: k. With `b = k` the rule is `kᵀ(p W − v)`;
    * `erase_direction` (b): the direction along which it is erased; None: k.

    A token that gives n pairs has k, v, p and b `[B, H, T, n, ·]`, and may have a `weight` `[B, H, T, n]` of their
    losses. The pairs are learned one after the other and read once (DeltaProduct, arXiv 2502.10297), or, if the task
    sets `together`, all at the same weights (the Omega rule, arXiv 2505.23735).
    """

    k: Tensor
    v: Tensor
    q: Tensor
    erase_key: Tensor | None = None
    erase_direction: Tensor | None = None
    weight: Tensor | None = None

    def for_every_head(self) -> Views:
        """k and v for each of the H heads."""
        copies = self.q.shape[1] // self.k.shape[1]
        if copies == 1:
            return self
        copied: list[Any] = [x if x is None or x is self.q else x.repeat_interleave(copies, 1) for x in self]
        return Views(*copied)


class Task(Component, ABC):
    """Self-supervised learning on one token: views θK, θV, θQ and a loss.

    Constructors take hyper-parameters only; `setup` creates the parameters once the layer knows its widths.
    """

    _group = "task"
    #: the loss is exactly ½‖prediction − v‖²: online linear rules can then be solved instead of looped
    squared_error = False
    together = False  #: a token's n pairs take their gradients at the same weights, not one after the other
    causal = True  #: False if the views of a token depend on later ones

    def setup(self, dim: int, num_heads: int, head_dim: int) -> Task:
        """Creates the outer-loop parameters for tokens of width `dim`. Called once, by the layer.

        Raises:
            MetaTTTError: the task already belongs to a layer.
        """
        with self.claimed():
            self.input_dim = self.label_dim = head_dim
            self.build(dim, num_heads, head_dim)
        return self

    @abstractmethod
    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        """Creates the parameters, and sets `label_dim` if the label view v is not `head_dim` wide, and `input_dim` if
        k and q are not."""

    @abstractmethod
    def views(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[Views, Tensors]:
        """`x` `[B, T, D]` to its views, and what the next call needs (convolution tails). `state` is empty at the
        start."""

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """The projections of `x` `[B, T, D]` that two layers share (`metattt.combined.Combined`).

        Raises:
            MetaTTTError: the task does not separate projections from views.
        """
        raise MetaTTTError(
            f"{type(self).__name__} has no projections that two layers can share: set layer.shared=false"
        )

    def borrow(self, lender: Task) -> None:
        """Removes the projections: `views` receives the result of `lender.project(x)` as `projected`.

        Raises:
            MetaTTTError: the views cannot be made from that.
        """
        raise MetaTTTError(
            f"{type(self).__name__} has no projections that two layers can share: set layer.shared=false"
        )

    def slope(self, prediction: str) -> str | None:
        """The formula of `∂ℓ_t/∂prediction` for `metattt layers layer=<name>`; None: no formula."""
        return f"{prediction} − v_t" if self.squared_error else None

    @abstractmethod
    def loss(self, prediction: Tensor, v: Tensor) -> Tensor:
        """ℓ per token: predictions `[B, H, T, d]` and labels `[B, H, T, ·]` to `[B, H, T]`. Tokens must not mix."""


def squared_error(prediction: Tensor, v: Tensor) -> Tensor:
    """½‖prediction − v‖² per token."""
    return 0.5 * (prediction - v).square().sum(-1)


def dot_product(prediction: Tensor, v: Tensor) -> Tensor:
    """−⟨prediction, v⟩ per token."""
    return -(prediction * v).sum(-1)
