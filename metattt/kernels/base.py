"""The contract of a kernel: closed-form computation of whole mini-batches for one learner, and the choice between kernels.

A kernel lives in a folder of its own under `metattt/kernels`, whose `__init__.py` registers it; nothing else names it. It is asked
twice: when a layer is built whether it computes this combination of task, learner and optimizer (`covers`), and in every call whether
it takes these tensors (`accepts`). Where no kernel says yes, the generic dual form computes the same.
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from metattt.inner.forms import Tokens
from metattt.learners.base import Learner
from metattt.optimizers.base import InnerOptimizer
from metattt.state import Tensors
from metattt.tasks.base import Task


class MiniBatches(NamedTuple):
    """What a kernel reads: whole mini-batches of `b` tokens, one after the other, from committed weights to committed weights.

    Attributes:
        tokens: views `[B, H, n·b, d]` as the task made them (any floating type, any strides) and gates `[B, H, n·b]` in fp32 or wider.
        weights: fast weights W_a by name at the start, `[B, H, *shape]`, fp32 or wider.
        slow: outer-loop weights of the learner by name, `[H, *shape]`.
        tau: token steps `[1 or H, b]`; None: all 1.
        size: b, tokens per mini-batch.
        operand: type to which matmul operands are rounded.
        group_size: mini-batches whose weights are recomputed together in the backward pass; None leaves it to the kernel.
    """

    tokens: Tokens
    weights: Tensors
    slow: Tensors
    tau: Tensor | None
    size: int
    operand: torch.dtype
    group_size: int | None


Scan = Callable[[MiniBatches], tuple[Tensor, Tensors]]


class Kernel(ABC):
    """A closed form of one combination. It computes `anchor=minibatch`, `read=inclusive`, one step:

    `W_t = γ_t W_a − Σ_{s≤t} C_ts η_s ∇ℓ_s(W_a)` for the tokens t of a mini-batch, `y_t = f(q_t; W_t)`, and `W_a ← W_b` after it.
    """

    name: str  #: as messages show it: `<folder>.<implementation>`
    device: str  #: `cpu` or `cuda`
    traceable = False  #: whether `torch.compile` can look through it (a `torch.library` operation with its own derivative)

    @abstractmethod
    def covers(self, task: Task, learner: Learner, optimizer: InnerOptimizer) -> str | None:
        """Why this combination cannot be computed (a few words), or None if it can. Called once, when a layer is built."""

    @abstractmethod
    def accepts(self, given: MiniBatches) -> str | None:
        """Why these tensors cannot be taken (types, widths, gates), or None if they can. Called in every call on the kernel's device."""

    @abstractmethod
    def scan(self, given: MiniBatches, reference: Scan) -> tuple[Tensor, Tensors]:
        """Predictions `[B, H, n·b, d]` in the type of the gates, and the weights after the last mini-batch.

        Differentiable in every tensor of `given`. `reference` computes the same by the dual form: for derivatives that the kernel
        does not have (of its backward pass).
        """


KERNELS: dict[str, Kernel] = {}


def register_kernel(kernel: type[Kernel]) -> type[Kernel]:
    """Class decorator: makes a kernel available to every layer."""
    made = kernel()
    KERNELS[made.name] = made
    return kernel


@cache
def kernels() -> tuple[Kernel, ...]:
    """All registered kernels, those of `metattt/kernels` and those that a program registered before it built its first layer."""
    import metattt.kernels

    for module in pkgutil.iter_modules(metattt.kernels.__path__):
        importlib.import_module(f"metattt.kernels.{module.name}")
    return tuple(KERNELS.values())


def covering(task: Task, learner: Learner, optimizer: InnerOptimizer) -> tuple[list[Kernel], dict[str, str]]:
    """The kernels that compute a combination, and of the others why they do not, by name."""
    reasons = {kernel.name: kernel.covers(task, learner, optimizer) for kernel in kernels()}
    return [kernel for kernel in kernels() if reasons[kernel.name] is None], {name: why for name, why in reasons.items() if why is not None}


def explain(reasons: Mapping[str, str]) -> str:
    """Why kernels do not cover a combination, once for all kernels of an operation that give the same reason."""
    return "; ".join(dict.fromkeys(f"{name.split('.')[0]}: {why}" for name, why in reasons.items()))


def linear_rule(optimizer: InnerOptimizer) -> str | None:
    """Why an optimizer is not a linear rule that begins anew with every mini-batch, or None if it is: common to all kernels."""
    changed = [
        name
        for name in ("coefficients", "current", "commit", "observe", "in_token_space", "bases", "permutation")
        if getattr(type(optimizer), name) is not getattr(InnerOptimizer, name)
    ]
    for wrong, reason in (
        (bool(changed), f"{type(optimizer).__name__} has its own {', '.join(changed)}"),
        (optimizer.anchor != "minibatch", f"optimizer.anchor={optimizer.anchor}"),
        (optimizer.read != "inclusive", f"optimizer.read={optimizer.read}"),
        (optimizer.steps != 1, f"optimizer.steps={optimizer.steps}"),
        (optimizer.max_norm is not None, "optimizer.max_norm clips"),
        (optimizer.has_momentum, "momentum is carried between mini-batches"),
        (optimizer.pull, "optimizer.pull decays towards W0"),
    ):
        if wrong:
            return reason
    return None
