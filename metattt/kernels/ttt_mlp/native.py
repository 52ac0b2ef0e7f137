"""TTT-MLP in C++ on the CPU: the same closed form as `closed_form.py`, one learner after the other."""

from __future__ import annotations

from pathlib import Path

from metattt.inner.tokens import MiniBatches
from metattt.kernels.cpu.native_scan import NativeForm
from metattt.kernels.ttt_mlp.covers import function, uncovered
from metattt.learners.base import Learner
from metattt.optimizers.base import InnerOptimizer
from metattt.tasks.base import Task


class NativeTTTMLP(NativeForm):
    name = "ttt_mlp.native"
    weights = ("w1", "b1", "w2", "b2")
    source = Path(__file__).with_name("native.cpp")
    source_of_tokens = Path(__file__).with_name("advance.cpp")

    function = staticmethod(function)

    def reason_not_covered(self, task: Task, learner: Learner, optimizer: InnerOptimizer) -> str | None:
        return uncovered(task, learner, optimizer)

    def defines(self, given: MiniBatches) -> dict[str, int] | str:
        width, hidden = next(iter(given.weights.values())).shape[-2:]
        if hidden % 16:
            return f"a hidden width of {hidden}"
        return {"WIDTH": width, "HIDDEN": hidden, "TOKENS": given.size, "BIAS": int(len(given.weights) > 2)}
