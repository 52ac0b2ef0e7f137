"""TTT-Linear in C++ on the CPU: the same closed form as `closed_form.py`, one learner after the other."""

from __future__ import annotations

from pathlib import Path

from metattt.inner.tokens import MiniBatches
from metattt.kernels.cpu.native_scan import NativeForm
from metattt.kernels.ttt_linear.learner import TTTLinearKernel


class NativeTTTLinear(TTTLinearKernel, NativeForm):
    name = "ttt_linear.native"
    source = Path(__file__).with_name("native.cpp")
    source_of_tokens = Path(__file__).with_name("advance.cpp")

    def defines(self, given: MiniBatches) -> dict[str, int] | str:
        return {"WIDTH": given.tokens.views.k.shape[-1], "TOKENS": given.size, "BIAS": int(len(given.weights) > 1)}
