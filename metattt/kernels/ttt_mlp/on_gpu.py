"""TTT-MLP by Triton: the launches of `forward.py`, `backward.py` and `decode.py`, as `OnGPU` calls them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from metattt.inner.tokens import MiniBatches
from metattt.kernels.operator import Results, empty_like_tokens
from metattt.kernels.triton.device import multiprocessors
from metattt.kernels.triton.on_gpu import OnGPU, gradients, launched, parameters, rows, sequences
from metattt.kernels.ttt_mlp import tuning
from metattt.kernels.ttt_mlp.learner import TTTMLPKernel


class TTTMLPOnGPU(TTTMLPKernel, OnGPU):
    name = "ttt_mlp.triton"

    def reason_rejected(self, given: MiniBatches) -> str | None:
        width, hidden = given.weights["w1"].shape[-2:]
        if hidden != 4 * width:
            return f"learner of {hidden} hidden units, not {4 * width}"
        return super().reason_rejected(given)

    def shared_bytes(self, width: int, size: int, dtype: torch.dtype) -> int:
        return tuning.shared_bytes(width, size, dtype)

    def group_size(self, given: MiniBatches, documents: Tensor | None = None) -> int:
        return tuning.SEGMENT

    def results(
        self, given: MiniBatches, group: int, keep: bool, final: bool = True, documents: Tensor | None = None
    ) -> Results:
        from metattt.kernels.ttt_mlp.forward import slots

        k, eta = given.tokens.k, given.tokens.gates.eta

        def states(count: int) -> list[Tensor]:
            shapes = [w.shape[-3:] if name.startswith("w") else w.shape[-2:] for name, w in given.weights.items()]
            return [eta.new_empty(count, *shape) for shape in shapes]

        count = sequences(given, documents)
        kept = states(slots(k.transpose(1, 2), documents, given.size, group)) if keep else []
        return empty_like_tokens(k), [*states(count), *states(count)], kept

    def forward(
        self, given: MiniBatches, group: int, keep: bool, final: bool = True, documents: Tensor | None = None
    ) -> Results:
        from metattt.kernels.ttt_mlp.forward import forward

        (q, k, v, eta), (scale, shift, tau) = launched(given), parameters(given)
        weights, launch = self.part(list(given.weights.values())), self._config("forward", given, documents)
        o, after, update, kept = forward(
            q, k, v, eta, tau, weights, scale, shift, documents, given.size, group if keep else 0, launch
        )
        present = [[x for x in part or () if x is not None] for part in (after, update, kept)]
        return o.transpose(1, 2), [*present[0], *present[1]], present[2]

    def backward(
        self, given: MiniBatches, group: int, kept: Sequence[Tensor], dy: Tensor | None,
        dweights: Sequence[Tensor | None], documents: Tensor | None = None,
    ) -> list[Tensor]:  # fmt: skip
        from metattt.kernels.ttt_mlp.backward import backward

        (q, k, v, eta), (scale, shift, tau) = launched(given), parameters(given)
        states = len(given.weights)
        after, kept, d_after, d_update = (
            self.part(x) for x in (kept[:states], kept[-states:], dweights[:states], dweights[states : 2 * states])
        )
        do = torch.zeros_like(q) if dy is None else rows(dy.transpose(1, 2))
        launches = (self._config(kernel, given, documents) for kernel in ("forward", "backward"))
        found = backward(
            q, k, v, eta, tau, scale, shift, documents, given.size, group, after, kept, do, d_after, d_update, *launches
        )
        others = (found.tau, found.scale, found.bias, *found.weights)
        return gradients(given, (found.k, found.v, found.q, found.eta), others)

    def _config(self, kernel: str, given: MiniBatches, documents: Tensor | None) -> tuning.Config:
        batch, heads, length, width = given.tokens.k.shape
        count = sequences(given, documents)
        chunks = batch * length // (given.size * max(count, 1))
        per_sm = count * heads // multiprocessors(given.tokens.k.device)
        return tuning.config(kernel, width, given.size, given.tokens.k.dtype, per_sm, chunks)

    def reason_not_decoded(self, given: MiniBatches) -> str | None:
        hidden = given.weights["w1"].shape[-1]
        return f"{hidden} hidden units, not a multiple of 32" if hidden % 32 else super().reason_not_decoded(given)

    def launch(self, *given: Any) -> None:
        from metattt.kernels.ttt_mlp.decode import launch_token

        launch_token(*given)
