"""The plan of the inner loop of one layer: made when the layer is built, used in every call."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from metattt.component import Component
from metattt.inner.tokens import MiniBatches, Scan
from metattt.learners.base import Learner
from metattt.optimizers.base import InnerOptimizer
from metattt.state import Tensors
from metattt.tasks.base import Task

log = logging.getLogger("metattt")

HOOKED = "the learner has forward hooks"  #: why no kernel and no solved form is used, which do not call it


class Kernel(Protocol):
    """The interface of a kernel, as the inner loop uses it; see `metattt.kernels.base`."""

    name: str
    device: str
    anchor: str
    traceable: bool
    documents: str

    def reason_not_covered(self, task: Task, learner: Learner, optimizer: InnerOptimizer) -> str | None: ...
    def function(self, weights: Mapping[str, Tensor], slow: Mapping[str, Tensor], x: Tensor) -> Tensor: ...
    def loss(self, prediction: Tensor, v: Tensor) -> Tensor: ...
    def reason_rejected(self, given: MiniBatches) -> str | None: ...
    def scan(self, given: MiniBatches, reference: Scan) -> tuple[Tensor, Tensors]: ...
    def reason_not_decoded(self, given: MiniBatches) -> str | None: ...
    def advance(
        self, given: MiniBatches, update: Tensors | None, phase: int | Tensor, donate_state: bool
    ) -> tuple[Tensor, Tensors, Tensors | None]: ...


@dataclass
class Plan:
    """How the inner loop of one layer is computed. It depends on the settings of the parts; if they change, the layer
    makes a new plan.

    Attributes:
        form: the form (`metattt.inner.forms.FORMS`) of chunks that no kernel accepts; empty for a learner without
            weights.
        linear: the loss of an online rule of a linear learner, whose gradients are known in closed form: `squared`,
            `dot`, or nothing.
        kernels: those that compute this combination; the first one that accepts a call is used.
        reasons: why the other kernels, or the solved form, cannot be used, by name.
        strict: a call that no kernel accepts raises an error instead of using `dual`.
        slots: names of the tensors carried for every fast weight.
        period: tokens after which the rule repeats itself; None: all tokens are alike to it.
        block: tokens per step of the scan.
        chunk: tokens per compute step; None: a whole block.
        replays: an open mini-batch is stored as raw tokens, and recomputed by the next call.
        outer: what the outer loop differentiates: `exact` or `first_order` (`TTTLayer`).
        sees_weights: gates depend on the weights (`InnerOptimizer.gates_at`).
        looks_ahead: tokens of a mini-batch see later ones.
        weights: shapes `[H, *shape]` of the fast weights by name.
        shapes: output shapes of the learner's primitives by the shapes of the tokens, found out once.
        checked: kinds of tokens (`Tokens.kind`) that have passed the checks.
        beside: tensors that recomputation would miss (`execution.captured`), by the kind of a call; computed once.
        said: messages that were logged, and are not repeated.
    """

    form: str
    linear: str = ""
    kernels: list[Kernel] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    strict: bool = False
    slots: tuple[str, ...] = ()
    period: int | None = None
    block: int = 1
    chunk: int | None = None
    replays: bool = False
    sees_weights: bool = False
    looks_ahead: bool = False
    outer: str = "exact"
    weights: dict[str, tuple[int, ...]] = field(default_factory=dict)
    shapes: dict[tuple[object, ...], list[torch.Size]] = field(default_factory=dict)
    checked: set[tuple[object, ...]] = field(default_factory=set)
    beside: dict[tuple[object, ...], list[str]] = field(default_factory=dict)
    said: set[tuple[str, ...]] = field(default_factory=set)
    basis: tuple[object, ...] = ()  #: the state of the parts that it was made for
    #: a task or learner, a module inside it, and what was assigned to that module (`component.assigned`)
    inside: list[tuple[Component, nn.Module, list[object]]] = field(default_factory=list)

    @property
    def shown(self) -> str:
        """The form as `layer.form` names it: `fused` if kernels are tried first, `scan` for a learner without
        weights."""
        asked = "dual" if self.solved or self.form == "mixed" else self.form
        return "fused" if self.kernels else asked or "scan"

    @property
    def solved(self) -> bool:
        """Whether gradients at the newest weights are found without an inner backward pass."""
        return self.form in ("solved", "chunks")

    def __reduce__(self) -> tuple[object, ...]:
        return Plan, ("",)  # not written to disk or copied: such a layer makes its plan again

    def say_stored(self, beside: list[str]) -> None:
        """Warns once that mini-batches are stored because of tensors that recomputation would miss."""
        if ("stored",) not in self.said:
            self.said.add(("stored",))
            log.warning(
                "every mini-batch is stored for the backward pass, which takes more memory: the inner loop reaches %s "
                "by a closure or a tensor made outside; use parameters as attributes of a part, or set "
                "layer.group_size=0",
                beside[0] if len(beside) == 1 else f"{beside[0]} and {len(beside) - 1} more",
            )
