"""Tests what kernels and solved forms assume of a task and a learner.

A solved or closed form is correct for one loss and one function. Names, classes and flags of a task and a learner are
not trusted: both sides are computed on tiny random tensors in double precision, of several sizes and scales, in
training and in evaluation mode. If a function depends on anything besides its arguments (its own parameter), the test
fails, because that may change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from metattt.component import Component
from metattt.functional import replica
from metattt.learners.base import Learner
from metattt.learners.fast_weights import FastWeights
from metattt.nested import tensors_of
from metattt.tasks.base import Task

Loss = Callable[[Tensor, Tensor], Tensor]
Function = Callable[[Mapping[str, Tensor], Mapping[str, Tensor], Tensor], Tensor]
"""`function(weights, slow, x)`: predictions `[B, H, T, d]` for `x` `[B, H, T, d]`; weights `[B, H, *shape]`, slow
`[H, *shape]`."""

SAMPLES = ((1, 1, 1.0), (2, 3, 1e-3), (1, 5, 30.0), (1, 70, 1e4))
"""(sequences, tokens, scale of the numbers): a loss may be quadratic near 0 alone, a function may cut off large
values."""
TOLERANCE = 1e-9
Sample = tuple[Tensor, Tensor, Tensor]
"""What was found, what was expected, and its size."""
CHECKED: WeakKeyDictionary[Component, dict[tuple[object, ...], tuple[tuple[object, ...], str | None]]] = (
    WeakKeyDictionary()
)
"""Results of the tests by part, with the state of the part that was tested."""


def other_loss(task: Task, claimed: Loss, num_heads: int, width: int) -> str | None:
    """Why a task's loss is not the claimed one, or None if it is."""
    if task.label_dim != width:
        return f"the labels of {type(task).__name__} are not as wide as predictions"

    def sample(task: Any, generator: torch.Generator, batch: int, count: int, scale: float) -> Sample:
        prediction, v = (scale * _random(generator, batch, num_heads, count, width) for _ in range(2))
        v[:, :, -1] = 0
        expected = claimed(prediction, v)
        return task.loss(prediction, v), expected, expected.abs()

    name, key = f"{type(task).__name__}.loss", ("loss", claimed, num_heads, width)
    differs = f"{name} is another loss than the closed form's"
    return _kept(task, key, (type(task).loss,), lambda: _evaluated(task, sample, name, differs))


def other_function(learner: Learner, claimed: Function, num_heads: int, width: int) -> str | None:
    """Why a learner's function is not the claimed one, or None if it is."""
    shapes = learner.shapes

    def sample(learner: Any, generator: torch.Generator, batch: int, count: int, scale: float) -> Sample:
        fast = {name: _weight(generator, batch, *shape) for name, shape in shapes.items() if name in learner.init}
        slow = {name: _random(generator, *shape) for name, shape in shapes.items() if name in learner.slow}
        x = scale * _random(generator, batch, num_heads, count, width)
        expected = claimed(fast, slow, x)
        return learner.predict(FastWeights(fast, slow, torch.float64), x), expected, expected.abs().max()

    kind, key = type(learner).__name__, ("function", claimed, num_heads, width)
    differs = f"{kind} is another function than the closed form's"
    return _kept(learner, key, _methods(learner), lambda: _evaluated(learner, sample, f"{kind}.forward", differs))


def remembered(learner: Learner, task: Task, key: tuple[object, ...], find_out: Callable[[], str | None]) -> str | None:
    """The result of `find_out` for a learner and a task together, cached until one of them or of their methods
    changes."""
    return _kept(learner, key, (id(task), task.changes, type(task).loss, *_methods(learner)), find_out)


def _methods(learner: Learner) -> tuple[object, ...]:
    kind = type(learner)
    return kind.forward, kind.predict, kind.wrap


def _kept(
    part: Component, key: tuple[object, ...], rests_on: tuple[object, ...], find_out: Callable[[], str | None]
) -> str | None:
    """The result of `find_out`, cached until the part or what the result `rests_on` changes."""
    known, stamp = CHECKED.setdefault(part, {}), (part.changes, *rests_on)
    if key not in known or known[key][0] != stamp:
        known[key] = stamp, find_out()
    return known[key][1]


def _evaluated(part: Component, sample: Callable[..., Sample], name: str, differs: str) -> str | None:
    """Why a part's method is not what is claimed, in training or evaluation mode; `differs` if results do.

    Args:
        sample: from the part in this mode, a generator and an entry of `SAMPLES`.
        name: of the method.
    """
    own = {id(x) for x in (*part.parameters(), *part.buffers())}
    for training in (True, False):
        generator, copy = torch.Generator().manual_seed(int(training)), replica(part).train(training)
        with (
            torch.device("cpu"),
            torch.no_grad(),
            torch.autocast("cpu", enabled=False),
            _Touched(own) as touched,
        ):
            try:
                alike = all(_close(*sample(copy, generator, *size)) for size in SAMPLES)
            except (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
                return f"{name} does not run on tiny tokens in double precision: {str(error).splitlines()[0]}"
        if not alike:
            return differs
        if touched.found:
            return f"{name} depends on parameters besides its weights"
    return None


class _Touched(TorchFunctionMode):
    """Notices whether any of some tensors takes part in an operation, or anything else that is trained."""

    def __init__(self, watched: set[int]):
        super().__init__()
        self.watched, self.found = watched, False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        taking_part = tensors_of((args, kwargs))
        self.found = self.found or any(x.requires_grad or id(x) in self.watched for x in taking_part)
        return function(*args, **(kwargs or {}))


def _random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _weight(generator: torch.Generator, *shape: int) -> Tensor:
    """A fast weight `[B, H, *shape]` of such a size that its products stay near 1."""
    return _random(generator, *shape) / (shape[-2] if len(shape) > 3 else 1) ** 0.5


def _close(found: Tensor, expected: Tensor, size: Tensor) -> bool:
    return found.shape == expected.shape and bool(((found - expected).abs() <= TOLERANCE * size).all())
