"""TTT-Linear in C++ on the CPU: the same closed form as `closed_form.py`, one learner after the other."""

from __future__ import annotations

from pathlib import Path

from metattt.inner.tokens import MiniBatches
from metattt.kernels.cpu.native_scan import NativeForm
from metattt.kernels.ttt_linear.covers import function, uncovered
from metattt.learners.base import Learner
from metattt.optimizers.base import InnerOptimizer
from metattt.tasks.base import Task


class NativeTTTLinear(NativeForm):
    name = "ttt_linear.native"
    weights = ("w1", "b1")
    source = Path(__file__).with_name("native.cpp")
    source_of_tokens = Path(__file__).with_name("advance.cpp")
    largest_group = 16

    function = staticmethod(function)

    def covers(self, task: Task, learner: Learner, optimizer: InnerOptimizer) -> str | None:
        return uncovered(task, learner, optimizer)

    def defines(self, given: MiniBatches) -> dict[str, int] | str:
        return {"WIDTH": given.tokens.views.k.shape[-1], "TOKENS": given.size, "BIAS": int(len(given.weights) > 1)}
