"""TTT-MLP in C++ on the CPU, one learner after the other."""

from __future__ import annotations

from pathlib import Path

from metattt.kernels.cpu.native_scan import NativeForm, Sizes
from metattt.kernels.residual import TTTMLPKernel


class NativeTTTMLP(TTTMLPKernel, NativeForm):
    name = "ttt_mlp.native"
    source = Path(__file__).with_name("native.cpp")
    source_of_tokens = Path(__file__).with_name("advance.cpp")

    def defines(self, sizes: Sizes) -> dict[str, int] | str:
        if sizes.hidden % 16:
            return f"a hidden width of {sizes.hidden}"
        biased = int(sizes.weights > 2)
        return {"WIDTH": sizes.width, "HIDDEN": sizes.hidden, "TOKENS": sizes.tokens, "BIAS": biased}
