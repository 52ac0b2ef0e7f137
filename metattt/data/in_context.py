"""Regression in context: examples of a function that no other sequence has, and each answer asked for before it is
shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from metattt.data.sequences import OF_SEQUENCES, SequenceData
from metattt.errors import check_integer
from metattt.registry import register
from metattt.setting import setting

Values = Callable[[np.ndarray], np.ndarray]


@register(group="data", name="in_context")
class InContextData(SequenceData, takes=("function", "features", "examples", *OF_SEQUENCES)):
    """Sequences `x1, y1, x2, y2, …` with `x ~ N(0, I)` and `y = f(x) + noise`, a new f in each (Garg et al., arXiv
    2208.01066, Sec. 2 and 4). At `x_i` the label is `y_i`. A token is a vector of `features + 1` numbers: `(x, 0)` or
    `(0, y)`.

    f is one of: `linear`, w·x with w ~ N(0, I); `sparse`, the same with `nonzero` of the weights; `network`,
    `Σ_j a_j relu(w_j·x)` over `hidden` units with w ~ N(0, I), a ~ N(0, 2/hidden). It is divided by the square root of
    the number of weights that are not zero (`features` for networks), so that always to answer 0 has the mean squared
    error 1, apart from noise.

    Args:
        function: `linear`, `sparse` or `network`.
        features: d, numbers in x.
        examples: n, pairs of x and y; T = 2n tokens.
        nonzero: k, weights that are not zero (`sparse`).
        hidden: units of the networks (`network`).
        noise: standard deviation of what is added to y.
        batch_size, validation_size, seed, num_workers: see `SequenceData`.
    """

    function: Literal["linear", "sparse", "network"] = setting(default="linear")
    features: int = setting(default=8, most=2**16)
    examples: int = setting(default=20, most=2**16)
    nonzero: int = setting(default=2)
    hidden: int = setting(default=16, most=2**16)
    noise: float = setting(default=0.0, least=0)

    def check_settings(self) -> None:
        super().check_settings()
        if self.function == "sparse":
            check_integer("data.nonzero", self.nonzero, 1, self.features, advice=f", data.features={self.features}")
        self.length, self.inputs = 2 * self.examples, self.features + 1

    def describe(self) -> str:
        kind = {"sparse": f"sparse linear ({self.nonzero} of", "network": f"two-layer ({self.hidden} units,"}
        return (
            f"{kind.get(self.function, 'linear (')} {self.features} features) functions in context, {self.examples} "
            f"examples, noise {self.noise:g}"
        ).replace("( ", "(")

    def draw(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        f = self._function(random)
        x = random.standard_normal((self.examples, self.features)).astype(np.float32)
        y = (f(x.astype(np.float64)) + self.noise * random.standard_normal(self.examples)).astype(np.float32)
        inputs = np.zeros((self.length, self.features + 1), np.float32)
        labels = np.full(self.length, np.nan, np.float32)
        inputs[::2, :-1], inputs[1::2, -1], labels[::2] = x, y, y
        return inputs, labels

    def _function(self, random: np.random.Generator) -> Values:
        if self.function == "network":
            first = random.standard_normal((self.features, self.hidden))
            second = random.standard_normal(self.hidden) * np.sqrt(2 / self.hidden)
            return lambda x: np.maximum(x @ first, 0) @ second / np.sqrt(self.features)
        weights = random.standard_normal(self.features)
        count = self.features
        if self.function == "sparse":
            count = self.nonzero
            weights[random.permutation(self.features)[count:]] = 0
        return lambda x: x @ weights / np.sqrt(count)
