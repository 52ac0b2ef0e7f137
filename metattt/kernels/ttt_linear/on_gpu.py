"""TTT-Linear by Triton: the launches of `forward.py`, `backward.py` and `decode.py`, as `OnGPU` calls them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from metattt.kernels.naive import EPS
from metattt.kernels.operator import Pass, Results, rows
from metattt.kernels.residual import TTTLinearKernel
from metattt.kernels.triton.on_gpu import OnGPU, Part, gradients, launched, parameters
from metattt.kernels.ttt_linear import tuning

if TYPE_CHECKING:  # Triton is imported where it is used
    from metattt.kernels.ttt_linear.forward import Forward


class TTTLinearOnGPU(TTTLinearKernel, OnGPU):
    name = "ttt_linear.triton"
    tuning = tuning

    def shared_bytes(self, width: int, size: int, dtype: torch.dtype) -> int:
        return tuning.shared_bytes(width, size, dtype.itemsize)

    def results(self, call: Pass) -> Results:
        from metattt.kernels.ttt_linear import forward

        q, k = (x.transpose(1, 2) for x in (call.given.tokens.views.q, call.given.tokens.views.k))
        return _results(
            call, forward.allocate(q, k, call.sequences, call.given.size, call.group, call.keep, call.final)
        )

    def forward(self, call: Pass) -> Results:
        from metattt.kernels.ttt_linear import forward

        given, group = call.given, call.group
        (q, k, v, eta), (w, b) = launched(given), self.part(list(given.weights.values()))
        out = forward.allocate(q, k, call.sequences, given.size, group, call.keep, call.final)
        forward.launch_forward(out, q, k, v, eta, w, b, *parameters(given), call.documents, given.size, group)
        return _results(call, out)

    def backward(
        self, call: Pass, kept: Sequence[Tensor], dy: Tensor | None, dweights: Sequence[Tensor | None]
    ) -> list[Tensor]:
        from metattt.kernels.ttt_linear import backward

        given, biased = call.given, len(call.given.weights) > 1
        (q, k, v, eta), norm = launched(given), parameters(given)
        tau = given.tau
        out = backward.allocate(q, k, v, eta, call.sequences, biased, tau is not None, given.size)
        d_o = torch.zeros_like(q) if dy is None else rows(dy.transpose(1, 2))
        d_state = None
        if any(x is not None for x in dweights):
            shapes = (out.w.shape, out.w.shape[:-1]) * 2
            pairs = zip(dweights[:4], shapes, strict=True)
            d_state = tuple(eta.new_zeros(shape) if x is None else x.contiguous() for x, shape in pairs)
        backward.launch_backward(
            out, d_o, d_state, q, k, v, eta, *norm, call.documents, kept[-2], kept[-1], given.size, call.group
        )
        others = (None if tau is None else out.tau, out.scale, out.shift, out.w, out.b if biased else None)
        return gradients(given, (out.k, out.v, out.q, out.eta), others)

    def decoder(self, width: int, size: int, weights: Part) -> tuple[Any, dict[str, Any]]:
        from metattt.kernels.ttt_linear.decode import decode_kernel

        wide = tuning.padded(width)
        return decode_kernel, {"DP": wide, "SIZE": size, "EPS": EPS, **tuning.decode_launch(wide)._asdict()}


def _results(call: Pass, out: Forward) -> Results:
    states = [out.w, out.b, out.update_w, out.update_b]  # without bias, its part is zero
    return out.o.transpose(1, 2), states if call.final else [], [out.weighted, out.anchors] if call.keep else []
