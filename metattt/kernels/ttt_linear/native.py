"""TTT-Linear in C++ on the CPU, one learner after the other."""

from __future__ import annotations

from pathlib import Path

from metattt.kernels.cpu.native_scan import NativeForm, Sizes
from metattt.kernels.residual import TTTLinearKernel


class NativeTTTLinear(TTTLinearKernel, NativeForm):
    name = "ttt_linear.native"
    source = Path(__file__).with_name("native.cpp")
    source_of_tokens = Path(__file__).with_name("advance.cpp")

    def defines(self, sizes: Sizes) -> dict[str, int] | str:
        return {"WIDTH": sizes.width, "TOKENS": sizes.tokens, "BIAS": int(sizes.weights > 1)}
