"""TTT-MLP in C++ on the CPU: the same closed form as `closed_form.py`, one learner after the other."""

from __future__ import annotations

from pathlib import Path

from metattt.inner.tokens import MiniBatches
from metattt.kernels.cpu.native_scan import NativeForm
from metattt.kernels.ttt_mlp.learner import TTTMLPKernel


class NativeTTTMLP(TTTMLPKernel, NativeForm):
    name = "ttt_mlp.native"
    source = Path(__file__).with_name("native.cpp")
    source_of_tokens = Path(__file__).with_name("advance.cpp")

    def defines(self, given: MiniBatches) -> dict[str, int] | str:
        width, hidden = next(iter(given.weights.values())).shape[-2:]
        if hidden % 16:
            return f"a hidden width of {hidden}"
        return {"WIDTH": width, "HIDDEN": hidden, "TOKENS": given.size, "BIAS": int(len(given.weights) > 2)}
