"""The outer loop without gradients: slopes of the loss along random directions, from forward passes alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from metattt.errors import check_integer, check_number
from metattt.registry import register
from metattt.training.recipes import AdamW


@register(group="training", name="zeroth_order")
class ZerothOrder(AdamW):
    """Gradient descent on two-sided estimates along random directions (SPSA; in place as in MeZO, arXiv 2305.17333,
    Alg. 1).

    `θ ← (1 − lr λ) θ − lr · mean_n s_n z_n`, `s_n = (L(θ + ε z_n) − L(θ − ε z_n)) / 2ε`, `z_n ~ N(0, I)`: the
    expectation of `s z` is the gradient, up to O(ε²). A direction is its seed, drawn again whenever it is needed. So a
    step takes the memory of a forward pass: no graph, no second derivatives of the inner loop, no gradient, no moments.

    Args:
        lr: peak learning rate. The estimate's noise grows with the number of parameters P: stay below 1/P in units of
            the curvature.
        epsilon: ε, half the distance between the two points.
        directions: n, directions per step; each costs two forward passes.
        weight_decay: λ of projections and embeddings.
        warmup_fraction, min_lr: as in `AdamW`.
        seed: of the directions.

    Raises:
        MetaTTTError: a value that is not allowed.
    """

    forward_only = True

    def __init__(
        self,
        lr: float = 1e-5,
        epsilon: float = 1e-3,
        directions: int = 1,
        weight_decay: float = 0.0,
        warmup_fraction: float = 0.1,
        min_lr: float = 0.0,
        seed: int = 0,
    ):
        super().__init__(lr=lr, weight_decay=weight_decay, warmup_fraction=warmup_fraction, min_lr=min_lr)
        check_number("training.epsilon", epsilon, above=0)
        check_integer("training.directions", directions, most=100_000)
        check_integer("training.seed", seed, 0, 2**32 - 1)
        self.epsilon, self.directions, self.seed = epsilon, directions, seed

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return RandomDirections(self.groups(model), self.lr, self.epsilon, self.directions, self.seed)


class RandomDirections(torch.optim.Optimizer):
    """The step of `ZerothOrder`. Its `closure` returns the loss of one batch; `backward` is never called.

    Args:
        params: parameters, or groups of them with `weight_decay`.
        lr, epsilon, directions, seed: see `ZerothOrder`.
    """

    def __init__(self, params: Any, lr: float, epsilon: float = 1e-3, directions: int = 1, seed: int = 0):
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, "step": 0})
        self.epsilon, self.directions, self.seed = epsilon, directions, seed

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> float:  # type: ignore[override]
        """Estimates, moves, and returns the mean loss of the points that were tried; NaN, if one of them has no finite
        loss: then the parameters stay."""
        assert closure is not None
        parameters = [p for group in self.param_groups for p in group["params"]]
        first = self.seed * 1_000_003 + self.param_groups[0]["step"] * self.directions
        seeds = [(first + n) % 2**63 for n in range(self.directions)]
        found = [two_sided(closure, parameters, seed, self.epsilon) for seed in seeds]
        for group in self.param_groups:
            group["step"] += 1
        if not all(math.isfinite(slope) for slope, _ in found):  # no direction to go: the weights stay
            return math.nan
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
        lr = self.param_groups[0]["lr"]
        for seed, (slope, _) in zip(seeds, found, strict=True):
            shift(parameters, seed, -lr * slope / self.directions)
        return sum(loss for _, loss in found) / len(found)


def two_sided(
    closure: Callable[[], Any], parameters: Sequence[Tensor], seed: int, epsilon: float
) -> tuple[float, float]:
    """`(L(θ + ε z) − L(θ − ε z)) / 2ε` along the direction of `seed`, and the mean of the two losses.

    Both points see the same random numbers of the model. θ is put back, up to rounding.
    """
    devices = [torch.cuda.current_device()] if parameters[0].is_cuda else []
    with torch.random.fork_rng(devices):
        shift(parameters, seed, epsilon)
        above = float(closure())
    shift(parameters, seed, -2 * epsilon)
    below = float(closure())
    shift(parameters, seed, epsilon)
    return (above - below) / (2 * epsilon), (above + below) / 2


@torch.no_grad()
def shift(parameters: Sequence[Tensor], seed: int, distance: float) -> None:
    """`θ ← θ + distance · z`, in place."""
    for parameter, z in zip(parameters, direction(parameters, seed), strict=True):
        parameter.add_(z, alpha=distance)


def direction(parameters: Sequence[Tensor], seed: int) -> Iterator[Tensor]:
    """z of `seed`, one standard normal tensor after the other: the same whenever it is asked for."""
    generator = torch.Generator(parameters[0].device).manual_seed(seed)
    for parameter in parameters:
        yield torch.randn(parameter.shape, generator=generator, device=parameter.device, dtype=parameter.dtype)
