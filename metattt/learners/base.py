"""The contract of a learner: the model inside the hidden state."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from metattt.errors import MetaTTTError, check_flag
from metattt.learners.fast_weights import FastWeights
from metattt.modules import standardize
from metattt.part import Part
from metattt.room import check_room
from metattt.state import Context, DataGates, Tensors
from metattt.tasks.base import Views


@dataclass(frozen=True)
class Weight:
    """One weight of a learner, per head.

    Args:
        shape: shape without the head axis; matrices are `(d_in, d_out)`.
        std: standard deviation of the normal initial value; 0 gives zeros.
        bound: draw from U(−bound, bound) instead.
        value: constant initial value instead (1 for a norm's scale).
        fast: trained by the inner loop. A slow weight is an ordinary outer-loop parameter of `f`.
    """

    shape: tuple[int, ...]
    std: float = 0.02
    bound: float | None = None
    value: float | None = None
    fast: bool = True

    def sample(self, num_heads: int) -> Tensor:
        if self.value is not None:
            return torch.full((num_heads, *self.shape), float(self.value))
        if self.bound is not None:
            return torch.empty(num_heads, *self.shape).uniform_(-self.bound, self.bound)
        return torch.randn(num_heads, *self.shape) * self.std if self.std else torch.zeros(num_heads, *self.shape)


class Learner(Part, ABC):
    """A model whose weights are the hidden state: `f(x; W)`.

    A subclass names its weights in `weights` and computes `f` in `forward`, reaching weights only through the accessor
    `w`. With `residual` and `norm` the layer uses `x + LN(f(x))`, the form of the TTT paper (Sec. 2.7); LN's affine is
    a slow weight.

    Args:
        residual: add the input to the output. Needs `d_in = d_out`.
        norm: normalise the output per head, with a learnable affine.
        learn_init: train W0 in the outer loop. Otherwise W0 stays at its initial value.

    Raises:
        MetaTTTError: a switch that is neither True nor False.
    """

    #: True if `f` looks at more than one token (attention inside `f`): then the layer replays open mini-batches
    mixes_tokens = False
    has_weights = True  #: False for learners whose state is the data itself (`NonParametric`)
    causal = True  #: False for learners that answer a query from later tokens too
    takes_groups = False  #: True if k and v may have fewer heads than q (grouped-query heads); else each gets a copy
    streams = True  #: False if every call is a set of tokens of its own: no state is taken, and no reset

    def __init__(self, *, residual: bool = False, norm: bool = False, learn_init: bool = True):
        super().__init__()
        for name, value in (("residual", residual), ("norm", norm), ("learn_init", learn_init)):
            check_flag(f"learner.{name}", value)
        self.residual, self.norm, self.learn_init = residual, norm, learn_init
        self.init = nn.ParameterDict()  # W0, by name: [H, *shape]
        self.slow = nn.ParameterDict()  # outer-loop weights of f: [H, *shape]
        self.shapes: dict[str, tuple[int, ...]] = {}  # of both, by name, with the axis of heads

    @abstractmethod
    def weights(self, d_in: int, d_out: int) -> dict[str, Weight]:
        """The weights of one head, by name, for inputs of width `d_in` and predictions of width `d_out`."""

    def forward(self, w: FastWeights, x: Tensor) -> Tensor:
        """`f(x; W)`: `[B, H, T, d_in]` to `[B, H, T, d_out]`."""
        return super().forward(w, x)

    @property
    def linear_map(self) -> tuple[str, str | None] | None:
        """Names of W and b if the learner is exactly `xW + b`: online rules can then be solved instead of looped."""
        return None

    def setup(self, num_heads: int, d_in: int, d_out: int) -> Learner:
        """Creates W0 and the slow weights. Called once, by the layer.

        Raises:
            MetaTTTError: the learner already belongs to a layer, a residual connection between different widths, or
                weights that this machine cannot hold.
        """
        with self.claimed():
            if self.residual and d_in != d_out:
                raise MetaTTTError(
                    f"residual=True needs equal widths, not {d_in} and {d_out}: set learner.residual=false"
                )
            self.shapes = {}
            self.init, self.slow = (
                nn.ParameterDict(),
                nn.ParameterDict(),
            )  # none that a copy of the unbuilt learner shares
            weights = self.weights(d_in, d_out)
            check_room(
                num_heads * sum(math.prod(weight.shape) for weight in weights.values()),
                f"a {type(self).__name__} learner",
                "lower the sizes of learner, or dim",
            )
            for name, weight in weights.items():
                sample = weight.sample(num_heads)
                self.shapes[name] = tuple(sample.shape)
                if weight.fast:
                    self.init[name] = nn.Parameter(sample, requires_grad=self.learn_init)
                else:
                    self.slow[name] = nn.Parameter(sample)
            if self.norm:
                self.shapes |= {"norm_scale": (num_heads, d_out), "norm_bias": (num_heads, d_out)}
                self.slow["norm_scale"] = nn.Parameter(torch.ones(num_heads, d_out))
                self.slow["norm_bias"] = nn.Parameter(torch.zeros(num_heads, d_out))
        return self

    def equations(self) -> list[str]:
        name = type(self).__name__
        plain = type(self).wrap is Learner.wrap and type(self).predict is Learner.predict
        value = f"{name}(x; W)"
        return [f"f(x; W) = {self.wrapped(value) if plain else value}", *super().equations()]

    def wrapped(self, y: str, x: str = "x") -> str:
        """What `wrap` does, in symbols."""
        y = f"LN({y})" if self.norm else y
        return f"{x} + {y}" if self.residual else y

    def predict(self, w: FastWeights, x: Tensor) -> Tensor:
        """What the layer calls: `forward` with the residual and norm switches applied."""
        return self.wrap(w, x, self(w, x))

    def wrap(self, w: FastWeights, x: Tensor, y: Tensor) -> Tensor:
        """`x + LN(y)`, as the switches say."""
        if self.norm:
            y = w.bias(w.scale(standardize(y), "norm_scale"), "norm_bias")
        return x + y if self.residual else y


class NonParametric(Learner):
    """A learner whose state is the data itself: it reads the whole sequence and needs no update rule."""

    has_weights = False
    #: those of `write`, `keep` and `levels` that `scan` uses: a rule that gives others is refused
    gates: frozenset[str] = frozenset()

    @abstractmethod
    def scan(self, views: Views, state: Tensors, ctx: Context, gates: DataGates) -> tuple[Tensor, Tensors]:
        """Predictions `[B, H, T, d]` for the queries, each from the data up to its own token, and the data to carry on.

        `state` is empty at the start; padding comes last and must not be seen by any query (`ctx.valid`), nor may other
        documents. `gates` are those of the rule, in fp32 or wider, and inert at padding.
        """
