"""TTT-MLP in a layer on the GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from metattt.inner.tokens import MiniBatches
from metattt.kernels.triton.advance import AdvancesOnGPU
from metattt.kernels.triton.on_gpu import OnGPU
from metattt.kernels.ttt_mlp.learner import TTTMLPKernel
from metattt.kernels.ttt_mlp.tuning import shared_bytes


class TTTMLPOnGPU(TTTMLPKernel, AdvancesOnGPU, OnGPU):
    name = "ttt_mlp.triton"

    def reason_rejected(self, given: MiniBatches) -> str | None:
        width, hidden = given.weights["w1"].shape[-2:]
        if hidden != 4 * width:
            return f"learner of {hidden} hidden units, not {4 * width}"
        return super().reason_rejected(given)

    def shared_bytes(self, width: int, size: int, dtype: torch.dtype) -> int:
        return shared_bytes(width, size, dtype)

    def operation(
        self, q: Tensor, k: Tensor, v: Tensor, eta: Tensor, given: MiniBatches
    ) -> tuple[Tensor, list[Tensor]]:
        from metattt.kernels.ttt_mlp.op import ttt_mlp  # Triton is imported where it is used

        w1, b1, w2, b2 = (given.weights.get(name) for name in ("w1", "b1", "w2", "b2"))
        assert w1 is not None and w2 is not None
        norm = given.slow["norm_scale"], given.slow["norm_bias"]
        sizes: dict[str, Any] = {"tau": given.tau, "mini_batch_size": given.size}
        o, final = ttt_mlp(
            q, k, v, eta, w1, b1, w2, b2, *norm, **sizes, initial_state=(w1, b1, w2, b2), output_final_state=True
        )
        assert final is not None
        return o, [x for x in (final.w1, final.b1, final.w2, final.b2) if x is not None]

    def reason_not_decoded(self, given: MiniBatches) -> str | None:
        hidden = given.weights["w1"].shape[-1]
        return f"{hidden} hidden units, not a multiple of 32" if hidden % 32 else super().reason_not_decoded(given)

    def launch(self, *given: Any) -> None:
        from metattt.kernels.ttt_mlp.decode import launch_token

        launch_token(*given)
