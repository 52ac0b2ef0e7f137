"""The contract of a learner: the model inside the hidden state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor, nn

from metattt.component import Component
from metattt.learners.fast_weights import FastWeights
from metattt.learners.weight import Weight, chosen, declared, step_factors
from metattt.modules import standardize
from metattt.setting import setting


class Learner(Component, ABC):
    """A model whose weights are the hidden state: `f(x; W)`.

    A subclass names its weights in `weights` and computes `f` in `forward`, reaching weights only through the accessor
    `w`. With `residual` and `norm` the layer uses `x + LN(f(x))`, the form of the TTT paper (Sec. 2.7); LN's affine is
    a slow weight.

    Args:
        residual: add the input to the output. Needs `d_in = d_out`.
        norm: normalise the output per head, with a learnable affine.
        learn_init: train W0 in the outer loop. Otherwise W0 stays at its initial value.

    Every learner also takes these arguments, even if its own `__init__` does not name them:

        trainable: names of the fast weights (the norm's affine may be one); all others become slow and are trained by
            the outer loop, even with `learn_init=False`. None: as declared in `weights`.
        step_scale: c, the factors of the fast weights' gradients: `W_t = W_{t−1} − η_t c_W ∇_W ℓ_t`. By name (others
            keep 1), or one number ρ: `ρ^(L−l)` for the weights of layer l of L, which leaves the last layer as it is.
    """

    #: True if `f` mixes tokens (attention inside `f`): then the layer recomputes open mini-batches
    mixes_tokens = False
    has_weights = True  #: False for learners whose state is the data itself (`metattt.learners.non_parametric`)
    causal = True  #: False for learners whose predictions depend on later tokens
    takes_groups = False  #: True if k and v may have fewer heads than q (grouped-query heads); else each gets a copy
    streams = True  #: False if every call is a set of tokens of its own: no state is taken, and no reset
    _group = "learner"
    residual: bool = setting(default=False, kw_only=True, fixed=True)
    norm: bool = setting(default=False, kw_only=True, fixed=True)
    learn_init: bool = setting(default=True, kw_only=True, fixed=True)
    trainable: list[str] | None = setting(default=None, kw_only=True, always=True, fixed=True)
    step_scale: Mapping[str, float] | float | None = setting(default=None, kw_only=True, always=True, fixed=True)
    _reserved = Component._reserved | {"init", "slow", "shapes", "step_scales"}
    init: nn.ParameterDict = setting(init=False)  #: W0, by name: [H, *shape]
    slow: nn.ParameterDict = setting(init=False)  #: outer-loop weights of f: [H, *shape]
    shapes: dict[str, tuple[int, ...]] = setting(init=False)  #: of both, by name, with the axis of heads
    step_scales: dict[str, float] = setting(init=False)  #: c of the fast weights where it is not 1

    def configure(self) -> None:
        super().configure()
        self._begin()

    def _begin(self) -> None:
        """Starts without weights, so that copies of an unbuilt learner share none."""
        self._modules.update(init=nn.ParameterDict(), slow=nn.ParameterDict())
        self.__dict__.update(shapes={}, step_scales={})

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
            MetaTTTError: the learner already belongs to a layer.
            KeyError: a name of a weight that torch does not allow.
        """
        with self.claimed():
            self._begin()
            weights = declared(self.weights(d_in, d_out), type(self).__name__, self.has_weights)
            if self.norm:
                weights["norm_scale"] = Weight((d_out,), value=1.0, fast=False, layer="norm")
                weights["norm_bias"] = Weight((d_out,), 0.0, fast=False, layer="norm")
            if self.trainable is not None:
                weights = chosen(weights, self.trainable, type(self).__name__)
            if self.step_scale is not None:
                self.step_scales.update(step_factors(weights, self.step_scale, type(self).__name__))
            for name, weight in weights.items():
                sample = weight.sample(num_heads)
                self.shapes[name] = tuple(sample.shape)
                held = self.init if weight.fast else self.slow
                held[name] = nn.Parameter(sample, requires_grad=self.learn_init or not weight.fast)
        return self

    def equations(self) -> list[str]:
        name = type(self).__name__
        plain = type(self).wrap is Learner.wrap and type(self).predict is Learner.predict
        value = f"{name}(x; W)"
        return [f"f(x; W) = {self.wrapped(value) if plain else value}", *super().equations()]

    def wrapped(self, y: str, x: str = "x") -> str:
        """The formula of `wrap`."""
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
