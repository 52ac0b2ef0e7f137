"""TTT-Linear by Triton: the launches of `forward.py`, `backward.py` and `decode.py`, as `OnGPU` calls them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from metattt.inner.tokens import MiniBatches
from metattt.kernels.operator import Results
from metattt.kernels.triton.on_gpu import OnGPU, gradients, launched, parameters, rows, sequences
from metattt.kernels.ttt_linear import tuning
from metattt.kernels.ttt_linear.learner import TTTLinearKernel

if TYPE_CHECKING:  # Triton is imported where it is used
    from metattt.kernels.ttt_linear.forward import Forward


class TTTLinearOnGPU(TTTLinearKernel, OnGPU):
    name = "ttt_linear.triton"

    def shared_bytes(self, width: int, size: int, dtype: torch.dtype) -> int:
        return min(tuning.shared_bytes(width, size, dtype.itemsize, form) for form in tuning.FORMS)

    def group_size(self, given: MiniBatches, documents: Tensor | None = None) -> int:
        return tuning.Call.of(given.tokens.k.transpose(1, 2), given.size, sequences(given, documents)).segment()

    def results(
        self, given: MiniBatches, group: int, keep: bool, final: bool = True, documents: Tensor | None = None
    ) -> Results:
        from metattt.kernels.ttt_linear import forward

        views = (x.transpose(1, 2) for x in (given.tokens.q, given.tokens.k))
        out = forward.allocate(*views, sequences(given, documents), given.size, group, keep, final)
        return _results(given, out, keep, final)

    def forward(
        self, given: MiniBatches, group: int, keep: bool, final: bool = True, documents: Tensor | None = None
    ) -> Results:
        from metattt.kernels.ttt_linear import forward

        views, weights = launched(given), self.part(list(given.weights.values()))
        out = forward.allocate(*views[:2], sequences(given, documents), given.size, group, keep, final)
        forward.launch_forward(out, *views, *weights, *parameters(given), documents, given.size, group)
        return _results(given, out, keep, final)

    def backward(
        self, given: MiniBatches, group: int, kept: Sequence[Tensor], dy: Tensor | None,
        dweights: Sequence[Tensor | None], documents: Tensor | None = None,
    ) -> list[Tensor]:  # fmt: skip
        from metattt.kernels.ttt_linear import backward

        q, k, v, eta = launched(given)
        scale, shift, tau = parameters(given)
        states, biased = len(given.weights), len(given.weights) > 1
        out = backward.allocate(q, k, v, eta, sequences(given, documents), biased, tau is not None, given.size)
        d_o = torch.zeros_like(q) if dy is None else rows(dy.transpose(1, 2))
        d_state = None
        if any(x is not None for x in dweights):
            shapes = (out.w.shape, out.w.shape[:-1]) * 2
            parts = *self.part(dweights[:states]), *self.part(dweights[states : 2 * states])
            d_state = tuple(eta.new_zeros(s) if x is None else x for x, s in zip(parts, shapes, strict=True))
        backward.launch_backward(
            out, d_o, d_state, q, k, v, eta, scale, shift, tau, documents, *kept[-2:], given.size, group
        )
        others = (None if tau is None else out.tau, out.scale, out.shift, out.w, out.b if biased else None)
        return gradients(given, (out.k, out.v, out.q, out.eta), others)

    def launch(self, *given: Any) -> None:
        from metattt.kernels.ttt_linear.decode import launch_token

        launch_token(*given)


def _results(given: MiniBatches, out: Forward, keep: bool, final: bool) -> Results:
    states = [out.w, out.b, out.update_w, out.update_b][:: 2 // len(given.weights)]
    return out.o.transpose(1, 2), states if final else [], [out.weighted, out.anchors] if keep else []
