"""TTT-Linear in a layer on the GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from metattt.inner.tokens import MiniBatches
from metattt.kernels.triton.advance import AdvancesOnGPU
from metattt.kernels.triton.on_gpu import OnGPU
from metattt.kernels.ttt_linear import tuning
from metattt.kernels.ttt_linear.learner import TTTLinearKernel


class TTTLinearOnGPU(TTTLinearKernel, AdvancesOnGPU, OnGPU):
    name = "ttt_linear.triton"

    def shared_bytes(self, width: int, size: int, dtype: torch.dtype) -> int:
        return min(tuning.shared_bytes(width, size, dtype.itemsize, form) for form in tuning.FORMS)

    def operation(
        self, q: Tensor, k: Tensor, v: Tensor, eta: Tensor, given: MiniBatches
    ) -> tuple[Tensor, list[Tensor]]:
        from metattt.kernels.ttt_linear.op import ttt_linear  # Triton is imported where it is used

        w, b = given.weights["w1"], given.weights.get("b1")
        norm = given.slow["norm_scale"], given.slow["norm_bias"]
        sizes: dict[str, Any] = {"tau": given.tau, "mini_batch_size": given.size, "initial_state": (w, b)}
        o, final = ttt_linear(q, k, v, eta, w, b, *norm, **sizes, output_final_state=True)
        assert final is not None
        return o, [final.w] if b is None else [final.w, final.b]

    def launch(self, *given: Any) -> None:
        from metattt.kernels.ttt_linear.decode import launch_token

        launch_token(*given)
