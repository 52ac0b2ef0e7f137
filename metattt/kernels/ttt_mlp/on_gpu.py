"""TTT-MLP by Triton: the launches of `forward.py`, `backward.py` and `decode.py`, as `OnGPU` calls them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from metattt.inner.tokens import MiniBatches
from metattt.kernels.operator import Pass, Results, empty_like_tokens, rows
from metattt.kernels.residual import TTTMLPKernel
from metattt.kernels.triton.on_gpu import OnGPU, Part, gradients, launched, parameters
from metattt.kernels.ttt_mlp import tuning


class TTTMLPOnGPU(TTTMLPKernel, OnGPU):
    name = "ttt_mlp.triton"
    tuning = tuning
    operands = torch.float32
    uses_after = True

    def reason_rejected(self, given: MiniBatches) -> str | None:
        width, hidden = given.weights["w1"].shape[-2:]
        if hidden != 4 * width:
            return f"learner of {hidden} hidden units, not {4 * width}"
        return super().reason_rejected(given)

    def shared_bytes(self, width: int, size: int, dtype: torch.dtype) -> int:
        return tuning.shared_bytes(width, size)

    def results(self, call: Pass) -> Results:
        from metattt.kernels.ttt_mlp.forward import slots

        given, k, eta = call.given, call.given.tokens.views.k, call.given.tokens.gates.eta

        def states(count: int) -> list[Tensor]:
            shapes = [w.shape[-3:] if name.startswith("w") else w.shape[-2:] for name, w in given.weights.items()]
            return [eta.new_empty(count, *shape) for shape in shapes]

        kept = states(slots(k.transpose(1, 2), call.documents, given.size, call.group)) if call.keep else []
        return empty_like_tokens(k), [*states(call.sequences), *states(call.sequences)], kept

    def forward(self, call: Pass) -> Results:
        from metattt.kernels.ttt_mlp.forward import forward

        (q, k, v, eta), (scale, shift, tau) = launched(call.given), parameters(call.given)
        weights, sizes = self.part(list(call.given.weights.values())), (call.given.size, call.group if call.keep else 0)
        launch = self._launch("forward", call)
        o, *parts = forward(q, k, v, eta, tau, weights, scale, shift, call.documents, *sizes, launch)
        after, update, kept = ([x for x in part or () if x is not None] for part in parts)
        return o.transpose(1, 2), [*after, *update], kept

    def backward(
        self, call: Pass, kept: Sequence[Tensor], dy: Tensor | None, dweights: Sequence[Tensor | None]
    ) -> list[Tensor]:
        from metattt.kernels.ttt_mlp.backward import backward

        (q, k, v, eta), (scale, shift, tau) = launched(call.given), parameters(call.given)
        n = len(call.given.weights)
        found = backward(
            q, k, v, eta, tau, scale, shift, call.documents, call.given.size, call.group,
            self.part(kept[:n]), self.part(kept[-n:]), torch.zeros_like(q) if dy is None else rows(dy.transpose(1, 2)),
            self.part(dweights[:n]), self.part(dweights[n : 2 * n]), self._launch("forward", call),
            self._launch("backward", call),
        )  # fmt: skip
        others = (found.tau, found.scale, found.bias, *found.weights)
        return gradients(call.given, (found.k, found.v, found.q, found.eta), others)

    def _launch(self, kernel: str, call: Pass) -> tuning.Config:
        return tuning.config(kernel, call.given.tokens.views.k.shape[-1], call.given.size)

    def reason_not_decoded(self, given: MiniBatches) -> str | None:
        hidden = given.weights["w1"].shape[-1]
        return f"{hidden} hidden units, not a multiple of 32" if hidden % 32 else super().reason_not_decoded(given)

    def decoder(self, width: int, size: int, weights: Part) -> tuple[Any, dict[str, Any]]:
        from metattt.kernels.ttt_mlp.decode import decode_kernel
        from metattt.kernels.ttt_mlp.forward import launch_options

        sizes = {"DP": tuning.padded(width, size)[0], "F": weights[0].shape[-1], "B": size}
        return decode_kernel, {**sizes, **launch_options(tuning.config("decode", width, size))}
