"""The contract of a kernel: closed-form computation of whole mini-batches for one learner, and the choice between
kernels.

A kernel lives in a folder of its own under `metattt/kernels`, whose `__init__.py` registers it; nothing else names it.
It is asked twice for a reason against it: when a layer is built, of this combination of task, learner and optimizer
(`reason_not_covered`), and in every call, of these tensors (`reason_rejected`). Where every kernel has one, the generic
dual form computes the same.
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.inner.tokens import MiniBatches, Scan
from metattt.learners.base import Learner
from metattt.optimizers.base import InnerOptimizer
from metattt.optimizers.checks import linear_rule as linear_rule  # for kernels of one's own
from metattt.state import Tensors
from metattt.tasks.base import Task, squared_error

CPU = torch.device("cpu")


class Kernel(ABC):
    """A closed form of one combination. It computes `anchor=minibatch`, `read=inclusive`, one step:

    `W_t = γ_t W_a − Σ_{s≤t} C_ts η_s ∇ℓ_s(W_a)` for the tokens t of a mini-batch, `y_t = f(q_t; W_t)`, and `W_a ← W_b`
    after it.
    """

    name: str  #: as messages show it: `<folder>.<implementation>`
    device: str  #: `cpu` or `cuda`
    anchor = "minibatch"  #: of the rules it computes; with `online`, tokens may have erase views and several pairs
    #: how `scan` takes packed documents: `apart`, a call for the tokens between their starts; `inside`, by `begins` and
    #: `origin`; `row`, all of them in one row of tokens
    documents = "apart"
    traceable = False  #: whether `torch.compile` sees an operator of `torch.library` with a derivative in it

    @abstractmethod
    def reason_not_covered(self, task: Task, learner: Learner, optimizer: InnerOptimizer) -> str | None:
        """Why this combination cannot be computed (a few words), or None if it can.

        Called when a layer is built, and again when a setting of a part has changed. What it says of the learner's
        function and of the loss is not taken on trust: `function` and `loss` are compared with the objects themselves
        (`metattt.inner.verify`).
        """

    @staticmethod
    @abstractmethod
    def function(weights: Mapping[str, Tensor], slow: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """The learner's f as the kernel computes it, in plain torch: `x` `[B, H, T, d]` to predictions; the claim that
        is checked.

        Args:
            weights: fast weights by name, `[B, H, *shape]`.
            slow: outer-loop weights, `[H, *shape]`.
        """

    loss = staticmethod(squared_error)  #: per token, that the kernel is made for

    @abstractmethod
    def reason_rejected(self, given: MiniBatches) -> str | None:
        """Why these tensors cannot be taken (types, widths, gates), or None if they can. Called in every call on the
        kernel's device."""

    @abstractmethod
    def scan(self, given: MiniBatches, reference: Scan) -> tuple[Tensor, Tensors]:
        """Predictions `[B, H, n·b, d]` in the type of the gates, and the weights after the last mini-batch.

        Differentiable in every tensor of `given`. `reference` computes the same by the dual form: for derivatives that
        the kernel does not have (of its backward pass). With `documents = "row"` there is a third argument: None, or
        the bounds `[N + 1]` of N documents (in tokens, on the device); B is 1 then, and weights are `[N, H, *shape]`.
        """

    def reason_not_decoded(self, given: MiniBatches) -> str | None:
        """As `reason_rejected`, for `advance`."""
        return "whole mini-batches only"

    def advance(
        self, given: MiniBatches, update: Tensors | None, phase: int | Tensor, donate_state: bool
    ) -> tuple[Tensor, Tensors, Tensors | None]:
        """Tokens of one open mini-batch, without derivatives: decoding. Asked only where `reason_not_decoded` has no
        reason.

        `M ← M − η_t ∇ℓ_t(W_a)`, `W_t = W_a + τ_t M`, `y_t = f(q_t; W_t)`; place `b − 1` ends a mini-batch: `W_a ← W_t`,
        `M ← 0`.

        Args:
            given: its tokens are n consecutive ones of one mini-batch, all of them real; its weights are W_a.
            update: M by name `[B, H, *shape]`; None: zero.
            phase: place of the first token in its mini-batch; `[B]` int64 where sequences differ (then n = 1).
            donate_state: `given.weights` and `update` may be written over; otherwise they stay as they are.

        Returns:
            Predictions `[B, H, n, d]`, the committed weights W_a, and the update after the tokens. Where they complete
            the mini-batch the weights are the new ones and the update is None (zero, where sequences differ).
        """
        raise NotImplementedError(self.name)

    weights: tuple[str, ...]  #: of f in `x + LN(f(x))`, in order: `w1, b1` or `w1, b1, w2, b2`; or without b

    def check(
        self, given: MiniBatches, update: Tensors | None = None, phase: int | Tensor | None = None, native: bool = False
    ) -> None:
        """Refuses tensors of other shapes than k implies: code that gets addresses would read past their ends.

        Args:
            update, phase: see `advance`; without a phase the tokens are whole mini-batches.
            native: all tensors must be fp32, and on the CPU.

        Raises:
            MetaTTTError: shapes, types or devices that do not fit each other.
        """
        tokens, weights, tau = given.tokens, given.weights, given.tau
        if tuple(weights) != self.weights and tuple(weights) != self.weights[::2]:
            raise MetaTTTError(f"{self.name} was given the weights {list(weights)}: it takes {list(self.weights)}")
        shape = tokens.views.k.shape if tokens.views.k.ndim == 4 else (1, 1, 1, 16)
        batch, heads, count, width = shape
        hidden = weights["w1"].shape[-1] if "w2" in weights else width
        learner = ((width, hidden), (hidden,), (hidden, width), (width,))
        wanted: list[tuple[str, Tensor | None, tuple[int, ...]]] = [
            ("k", tokens.views.k, shape),
            ("v", tokens.views.v, shape),
            ("q", tokens.views.q, shape),
            ("eta", tokens.gates.eta, (batch, heads, count)),
            ("tau", tau, (1 if tau is not None and tau.shape[0] == 1 else heads, given.size)),
        ]
        for name, affine in given.slow.items():
            wanted.append((name, affine, (heads, width)))
        for name, own in zip(self.weights, learner, strict=False):
            if name in weights:
                wanted.append((name, weights[name], (batch, heads, *own)))
                wanted.append((f"origin {name}", given.origin.get(name), (1, heads, *own)))
                if update is not None:
                    wanted.append((f"update {name}", update[name], (batch, heads, *own)))
        device = CPU if native else tokens.views.k.device
        for name, x, expected in wanted:
            if x is None:
                continue
            known = not native or x.dtype == torch.float32 or name.startswith("update")  # an update is converted
            if x.shape != expected or x.device != device or not known:
                raise MetaTTTError(
                    f"{self.name} was given {name} {list(x.shape)} of {x.dtype} on {x.device}: it takes "
                    f"{list(expected)}{' of torch.float32' if native else ''} on {device}"
                )
        if isinstance(phase, Tensor):
            inside = phase.shape == (batch,) and not phase.is_floating_point() and count == 1 and phase.device == device
            inside = inside and (phase.dtype == torch.int64 or not native)  # which C++ reads, and looks at the values
        else:
            inside = count % given.size == 0 if phase is None else 0 <= phase <= given.size - count
        if not inside:
            raise MetaTTTError(f"{self.name} was given {count} tokens from place {phase} of {given.size} on")


KERNELS: dict[str, Kernel] = {}


def register_kernel(kernel: type[Kernel]) -> type[Kernel]:
    """Class decorator: makes a kernel available to every layer."""
    made = kernel()
    KERNELS[made.name] = made
    return kernel


@cache
def kernels() -> tuple[Kernel, ...]:
    """All registered kernels, those of `metattt/kernels` and those that a program registered before it built its first
    layer."""
    import metattt.kernels

    for module in pkgutil.iter_modules(metattt.kernels.__path__):
        importlib.import_module(f"metattt.kernels.{module.name}")
    return tuple(KERNELS.values())
