"""What regression in context is measured against: estimators fitted anew to the examples before every question."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from metattt.data.sequences import Part, SequenceData
from metattt.optional import need

Array = np.ndarray
Fit = Callable[[Array, Array, Array], Array]  # x [S, i, d], y [S, i] and questions [S, d] to answers [S]
LEAST_RIDGE = 1e-9  # in the place of 0: the minimum-norm solution, without a rank to decide

RIDGES = (LEAST_RIDGE, 0.01, 0.1, 0.3, 1.0, 3.0)
LASSOS = (0.001, 0.01, 0.03, 0.1)
NETWORK_RATES = (0.01, 0.03, 0.1)
NETWORK_STEPS = 200
TUNING = 64  # sequences that settings are chosen on


class Baseline(NamedTuple):
    """An estimator with the setting that was best on validation sequences.

    Attributes:
        name: with the setting.
        errors: `[n]` mean squared error on the test sequences, by the number of examples before the question.
    """

    name: str
    errors: list[float]


def baselines(data: SequenceData, function: str, hidden: int) -> list[Baseline]:
    """Those for a kind of function: least squares and ridge regression for all; the lasso for `sparse`, a two-layer
    network fitted by Adam for `network`. Settings are chosen on validation sequences.

    Args:
        data: of `data=in_context`.
        function: of it.
        hidden: units of the network that is fitted.
    """
    tuning = examples(data, "validation", min(TUNING, data.validation_size))
    test = examples(data, "test", data.validation_size)
    found = [Baseline("least squares", errors(least_squares, *test))]
    kinds: list[tuple[str, Callable[[float], Fit], Sequence[float]]] = [("ridge, λ=", ridge, RIDGES)]
    if function == "sparse":
        kinds.append(("lasso, α=", lasso, LASSOS))
    if function == "network":
        name = f"network of {hidden} units, Adam, lr="
        kinds.append((name, lambda rate: network(hidden, rate, NETWORK_STEPS), NETWORK_RATES))
    for name, make, settings in kinds:
        best = min(settings, key=lambda one: float(np.mean(errors(make(one), *tuning))))
        found.append(Baseline(f"{name}{best:g}", errors(make(best), *test)))
    return found


def examples(data: SequenceData, part: Part, count: int) -> tuple[Array, Array]:
    """x `[S, n, d]` and y `[S, n]` of the first sequences of a split, in float64."""
    drawn = [data.sequence(part, index) for index in range(count)]
    x = np.stack([inputs[::2, :-1] for inputs, _ in drawn]).astype(np.float64)
    return x, np.stack([labels[::2] for _, labels in drawn]).astype(np.float64)


def errors(fit: Fit, x: Array, y: Array) -> list[float]:
    """Mean squared error of an estimator that is fitted to the first i examples and asked the next, for i from 0 (where
    the answer is 0)."""
    found = [float(np.mean(y[:, 0] ** 2))]
    for i in range(1, x.shape[1]):
        found.append(float(np.mean((fit(x[:, :i], y[:, :i], x[:, i]) - y[:, i]) ** 2)))
    return found


def least_squares(x: Array, y: Array, question: Array) -> Array:
    """The solution of least norm."""
    return np.einsum("sd,sdi,si->s", question, np.linalg.pinv(x), y)


def ridge(strength: float) -> Fit:
    """`(XᵀX + λI)⁻¹Xᵀy`: the mean of the posterior where the weights have the variance noise²/λ."""

    def fit(x: Array, y: Array, question: Array) -> Array:
        gram = np.einsum("sid,sie->sde", x, x) + strength * np.eye(x.shape[2])
        weights = np.linalg.solve(gram, np.einsum("sid,si->sd", x, y)[..., None])[..., 0]
        return np.einsum("sd,sd->s", question, weights)

    return fit


def lasso(strength: float) -> Fit:
    """scikit-learn's lasso without an intercept."""
    linear = need("sklearn.linear_model", extra="images", what="claim=in_context with sparse functions")

    def fit(x: Array, y: Array, question: Array) -> Array:
        model = linear.Lasso(alpha=strength, fit_intercept=False, max_iter=2000)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of few examples: it has not converged
            return np.array([model.fit(*one).predict(q[None])[0] for *one, q in zip(x, y, question, strict=True)])

    return fit


def network(hidden: int, rate: float, steps: int) -> Fit:
    """Two layers with relu, fitted to every sequence from its own random weights by Adam on all examples."""

    def fit(x: Array, y: Array, question: Array) -> Array:
        generator = torch.Generator().manual_seed(0)
        count, _, width = x.shape
        inputs, targets, asked = (torch.from_numpy(one).float() for one in (x, y, question))
        first = torch.randn(count, width, hidden, generator=generator) / width**0.5
        second = torch.randn(count, hidden, 1, generator=generator) / hidden**0.5
        weights = [first.requires_grad_(), second.requires_grad_()]
        adam = torch.optim.Adam(weights, lr=rate)
        for _ in range(steps):
            adam.zero_grad()
            answers = ((inputs @ first).relu() @ second).squeeze(-1)
            loss = (answers - targets).square().mean(1).sum()  # sequences are fitted apart: no mean over them
            loss.backward()
            adam.step()
        with torch.no_grad():
            return ((asked.unsqueeze(1) @ first).relu() @ second).flatten().double().numpy()

    return fit
