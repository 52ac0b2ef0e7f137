"""The layer under test, and how it is run and compared."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.inner.planning import ASKED
from metattt.layer import TTTLayer
from metattt.learners.base import Learner
from metattt.optimizers.base import InnerOptimizer
from metattt.state import State, Tensors
from metattt.tasks.base import Task

STEPS = (1e-5, 1e-4, 1e-6, 1e-7)  # of differences
AGREES = 1e-7  # a tenth of the bound of a derivative, or less: one difference within it is enough


class NotApplicable(Exception):
    """A law does not apply to this combination; the message is the reason."""


class Found(NamedTuple):
    """The result of a law.

    Attributes:
        error: worst relative error; None where the law does not apply, or the module raised an exception.
        bound: of the error.
        note: why it does not apply, the exception, what is broken, or why a bound is wider than usual.
        failed: whether the law is broken.
    """

    error: float | None
    bound: float
    note: str
    failed: bool


def judged(judge: Callable[[], Found], bound: float) -> Found:
    """What a law finds; or that it does not apply, or what a broken part or module raises."""
    try:
        return judge()
    except NotApplicable as reason:
        return Found(None, bound, f"does not apply: {reason}", False)
    except Exception as error:
        return Found(None, bound, told(error), True)


def told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:100]}"


class Run(NamedTuple):
    """The results of one or several calls on a sequence: outputs `[B, T, D]`, final state, gradients by parameter name
    (and `x`)."""

    y: Tensor
    state: State
    grads: Tensors


@dataclass(frozen=True)
class Specimen:
    """Makes the same layer any number of times, with other forms or mini-batches if a law needs them.

    Args:
        learner, task, optimizer: functions that return a new part.
        dim, num_heads: as in `TTTLayer`.
        options: the other keyword arguments of `TTTLayer`.
        longest_mini_batch: larger mini-batches are cut to this many tokens, so that short sequences still cross their
            ends.
    """

    learner: Callable[[], Learner]
    task: Callable[[], Task]
    optimizer: Callable[[], InnerOptimizer]
    dim: int = 8
    num_heads: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)
    longest_mini_batch: int = 4

    @cached_property
    def sample(self) -> TTTLayer:
        """Such a layer, for what changes none."""
        return self.make()

    def make(
        self,
        *,
        dtype: torch.dtype = torch.float64,
        form: str | None = None,
        mini_batch_size: int | None = None,
        anchor: Any = None,
        plain: bool = False,
        group_size: int | None = None,
        seed: int = 0,
    ) -> TTTLayer:
        """A new layer, with the same parameters every time.

        Args:
            form: None keeps the one in `options`.
            mini_batch_size, anchor: None keeps the optimizer's own.
            plain: no token steps (τ = 1), and positions that repeat every four tokens whatever b is.
            group_size: None keeps the one in `options`.
            seed: of the initial parameters.

        Raises:
            MetaTTTError: the layer does not support the combination.
        """
        options = dict(self.options)
        options |= {key: value for key, value in (("form", form), ("group_size", group_size)) if value is not None}
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            task, optimizer = self.task(), self.optimizer()
            optimizer.mini_batch_size = mini_batch_size or min(optimizer.mini_batch_size, self.longest_mini_batch)
            optimizer.anchor = anchor or optimizer.anchor
            if plain:
                optimizer.token_steps = lambda: None  # type: ignore[method-assign]
                views = task.views
                periodic = lambda x, state, ctx: views(x, state, ctx._replace(mini_batch_size=4))  # noqa: E731
                task.views = periodic  # type: ignore[method-assign]
            layer = TTTLayer(self.dim, self.num_heads, task, self.learner(), optimizer, **options)
            randomize(layer)
            return layer.to(dtype)

    def forms(self, dtype: torch.dtype = torch.float64) -> list[str]:
        """The forms that can compute this combination with tokens of a type, the oracle first."""
        if not self.sample.learner.has_weights:  # an error in every form is an error, not a missing form
            return []
        found, x = [], self.tokens(dtype=dtype)
        for form in ASKED[1:]:
            try:
                layer = self.make(form=form, dtype=dtype)
                if form == "fused":  # a kernel sees types, and how many pairs a token gives, in a call
                    with torch.no_grad():
                        layer(x)
            except MetaTTTError:
                continue
            found.append(layer.form)
        return found

    def tokens(self, batch: int = 2, extra: int = 3, dtype: torch.dtype = torch.float64) -> Tensor:
        """Random tokens `[B, 2b + extra, D]`: at least two mini-batches and an open one."""
        length = 2 * self.sample.optimizer.mini_batch_size + extra
        return torch.randn(batch, max(length, 7), self.dim, generator=torch.Generator().manual_seed(1), dtype=dtype)


def randomize(layer: TTTLayer) -> None:
    """Moves every trained parameter away from its initial value, with sizes that keep the inner loop stable.

    Initial values hide errors: a zero W0 or bias, a norm scale of one, an untrained convolution.
    """
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if parameter.requires_grad:
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(noise.to(parameter) * 0.5 / math.sqrt(max(parameter.shape[-2:], default=1)))


def run(
    layer: TTTLayer,
    x: Tensor,
    cuts: Sequence[int] = (),
    *,
    state: State | None = None,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    grads: bool = False,
) -> Run:
    """Calls the layer on `x` `[B, T, D]`, split before the tokens `cuts`, with the state passed on.

    The random numbers that a task draws (corruption) are the same in every run with the same B.
    """
    x = x.detach().clone().requires_grad_(grads)
    ys, marks = [], {"mask": mask, "reset": reset}
    with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(grads):
        torch.default_generator.manual_seed(0)
        for start, end in zip([0, *cuts], [*cuts, x.shape[1]], strict=True):
            flags = {name: given[:, start:end] for name, given in marks.items() if given is not None}
            y, state = layer(x[:, start:end], state, **flags)
            ys.append(y)
    y = torch.cat(ys, dim=1)
    return Run(y.detach(), cast(State, state), gradients(layer, x, (y * cotangent(y)).sum()) if grads else {})


def gradients(layer: TTTLayer, x: Tensor, loss: Tensor) -> Tensors:
    """Gradients of `loss` with respect to the tokens and every parameter that is trained; zeros where there is none."""
    leaves = {"x": x} | {name: p for name, p in layer.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def cotangent(y: Tensor) -> Tensor:
    """A fixed weight for every output, so that no gradient cancels by symmetry."""
    return torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).cos().view_as(y)


@torch.no_grad()
def difference_error(outputs: Callable[[], Tensor], leaves: Sequence[Tensor], gradients: Sequence[Tensor]) -> float:
    """Worst relative error of the gradients of a weighted sum of outputs by `leaves`, from which `outputs` makes them:
    against central differences, along one direction for each leaf: at random, and as much along what is claimed, which
    an error of its size would hardly change at random."""
    largest, worst = max(one.norm().item() for one in gradients), 0.0
    generator = torch.Generator().manual_seed(3)
    for leaf, gradient in zip(leaves, gradients, strict=True):
        direction, start = torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype), leaf.clone()
        along = gradient * (direction.norm() / max(gradient.norm().item(), 1e-30))
        direction += along if (direction * gradient).sum() > 0 else -along  # they do not cancel
        direction /= direction.norm()
        claimed, scale = float((gradient * direction).sum()), max(gradient.norm().item(), 1e-3 * largest, 1e-30)
        error = math.inf
        for step in STEPS:  # the best one counts: how far a function is nearly straight is not known
            sums = []
            for sign in (1, -1):
                leaf.copy_(start + sign * step * direction)
                y = outputs()
                sums.append(float((y * cotangent(y)).sum()))
            error = min(error, abs((sums[0] - sums[1]) / (2 * step) - claimed) / scale)
            if error <= AGREES:
                break
        leaf.copy_(start)
        worst = max(worst, error)
    return worst


def distance(found: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Largest difference relative to the largest expected entry (or `floor`); infinite where anything is not finite."""
    if found.shape != expected.shape or not (found.isfinite().all() and expected.isfinite().all()):
        return math.inf
    if found.numel() == 0:
        return 0.0
    scale = max(expected.abs().max().item(), floor)
    gap = (found - expected).abs().max().item()
    return gap / scale if scale > 0 else (math.inf if gap > 0 else 0.0)


def gradient_distance(found: Mapping[Any, Tensor], expected: Mapping[Any, Tensor]) -> float:
    """Worst `distance` over all gradients. One that is zero but for rounding (of an offset in front of a norm, say) is
    measured against the largest of all: with the laws' 1e-9 in float64, to 45 units of its last place."""
    if found.keys() != expected.keys():
        return math.inf
    largest = max(g.abs().max().item() for g in expected.values())
    share = 1e-5 if next(iter(expected.values())).dtype == torch.float64 else 1e-2
    return max(distance(found[name], expected[name], share * largest) for name in expected)


def compare(found: Run, expected: Run) -> float:
    """Worst relative error of outputs and gradients."""
    worst = distance(found.y, expected.y)
    return max(worst, gradient_distance(found.grads, expected.grads)) if expected.grads else worst


def state_distance(layer: TTTLayer, found: State, expected: State) -> float:
    """Worst relative error of two states: of their tensors, and of the outputs of later calls with them."""
    if not torch.equal(found.pos, expected.pos):
        return math.inf
    worst, size = 0.0, layer.optimizer.mini_batch_size
    if layer.learner.has_weights:
        now, then = (layer.optimizer.current(s.weights, s.pos % size) for s in (found, expected))
        worst = max(distance(now[name], then[name]) for name in then)
    generator = torch.Generator().manual_seed(2)
    weight = layer.out.weight
    later = torch.randn(expected.pos.shape[0], size + 2, layer.dim, generator=generator, dtype=weight.dtype)
    later = later.to(weight.device)
    return max(worst, distance(run(layer, later, state=found).y, run(layer, later, state=expected).y))
