"""Classes to subclass: one pytest test for each law, on your component combined with ours."""

from __future__ import annotations

import unittest
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

from metattt.learners import MLP, KernelEstimator, Learner, Linear, LogLinear, NonParametric
from metattt.optimizers import Append, GradientDescent, InnerOptimizer
from metattt.tasks import Reconstruction, Task
from metattt.testing.laws import LAWS
from metattt.testing.specimen import NotApplicable, Specimen


class Conformance:
    """One test for each law of `LAWS`, on every specimen of `specimens()`. A law that applies to none is skipped, with
    its reason."""

    dim: ClassVar[int] = 8  #: model width of the layers that are built
    num_heads: ClassVar[int] = 2
    options: ClassVar[Mapping[str, Any]] = {}  #: other keyword arguments of `TTTLayer`

    def specimens(self) -> dict[str, Specimen]:
        """The layers to test, by a name for messages."""
        raise NotImplementedError(f"{type(self).__name__} must define specimens, or subclass LearnerConformance")

    def specimen(
        self, learner: Callable[[], Learner], task: Callable[[], Task], optimizer: Callable[[], InnerOptimizer]
    ) -> Specimen:
        return Specimen(learner, task, optimizer, self.dim, self.num_heads, self.options)

    def examine(self, name: str) -> None:
        """Checks one law.

        Raises:
            AssertionError: the law is broken; the message names the companions, the error and the bound.
        """
        law, reasons = LAWS[name], []
        specimens = self.specimens()
        for label, spec in specimens.items():
            try:
                found = law.judge(spec)
            except NotApplicable as reason:
                reasons.append(f"{label}: {reason}")
                continue
            why = f"; {found.note}" if found.note else ""
            assert not found.failed, f"{law.title}: error {found.error:.2e} is above {found.bound:.0e} ({label}{why})"
        if len(reasons) == len(specimens):
            raise unittest.SkipTest("does not apply: " + "; ".join(dict.fromkeys(reasons)))


def _test_of(law: str) -> Callable[[Conformance], None]:
    return lambda self: self.examine(law)


for _law in LAWS:
    setattr(Conformance, f"test_{_law}", _test_of(_law))


def published_task() -> Task:
    """The views of the published models: they carry convolution tails and know their place in the mini-batch."""
    return Reconstruction(views="shared_qk", rope="mini_batch")


class LearnerConformance(Conformance):
    """Checks every law on a learner. Subclass it and set `make`:

    ```python
    class TestFourier(LearnerConformance):
        make = staticmethod(lambda: Fourier())
    ```
    """

    make: Callable[[], Learner]  #: returns a new learner

    def specimens(self) -> dict[str, Specimen]:
        return {
            type(rule()).__name__ + " " + label: self.specimen(self.make, published_task, rule)
            for label, rule in rules_for(self.make()).items()
        }


class TaskConformance(Conformance):
    """Checks every law on a task. Subclass it and set `make` to a function that returns a new task."""

    make: Callable[[], Task]  #: returns a new task
    residual: ClassVar[bool] = True  #: of the learners it is tried with; False for a task that sets `input_dim`

    def specimens(self) -> dict[str, Specimen]:
        linear, mlp = partial(Linear, residual=self.residual), partial(MLP, residual=self.residual)
        head_dim = self.dim // self.num_heads
        made = {
            "Linear by mini-batch": self.specimen(linear, self.make, lambda: GradientDescent(4, token_steps="shared")),
            "MLP by mini-batch": self.specimen(mlp, self.make, lambda: GradientDescent(4)),
            "Linear online": self.specimen(
                lambda: Linear(residual=False, norm=False), self.make, lambda: GradientDescent(4, "online")
            ),
        }
        if self.make().setup(self.dim, self.num_heads, head_dim).label_dim == head_dim:  # attention answers with labels
            made["KernelEstimator"] = self.specimen(KernelEstimator, self.make, Append)
        return made


class OptimizerConformance(Conformance):
    """Checks every law on an inner optimizer. Subclass it and set `make` to a function that returns a new optimizer."""

    make: Callable[[], InnerOptimizer]  #: returns a new optimizer

    def specimens(self) -> dict[str, Specimen]:
        if not self.make().updates:
            learner = LogLinear if self.make().data_gates else KernelEstimator
            return {learner.__name__: self.specimen(learner, published_task, self.make)}
        return {
            "Linear": self.specimen(Linear, published_task, self.make),
            "MLP": self.specimen(MLP, published_task, self.make),
            "plain Linear": self.specimen(
                lambda: Linear(bias=False, residual=False, norm=False, learn_init=False), Reconstruction, self.make
            ),
        }


def rules_for(learner: Learner) -> dict[str, Callable[[], InnerOptimizer]]:
    """Rules of ours that a learner can be combined with, by name."""
    if isinstance(learner, NonParametric):
        known: dict[str, Callable[[], InnerOptimizer]] = {"": Append}
        if learner.gates:
            known["with gates"] = lambda: Append(
                write="per_head" if "write" in learner.gates else "none",
                decay="per_head" if "keep" in learner.gates else "none",
                levels=3 if "levels" in learner.gates else 0,
            )
        return known
    rules: dict[str, Callable[[], InnerOptimizer]] = {"read=previous": lambda: GradientDescent(4, read="previous")}
    if not learner.mixes_tokens:
        rules |= {
            "with token steps": lambda: GradientDescent(4, token_steps="shared"),
            "read=exclusive": lambda: GradientDescent(4, read="exclusive", token_steps="per_head", compute_chunk=2),
            "online": lambda: GradientDescent(4, "online"),
            "batch": lambda: GradientDescent(4, "batch", compute_chunk=3),
        }
    return rules
