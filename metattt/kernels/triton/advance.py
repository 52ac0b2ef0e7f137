"""Decoding in a layer on the GPU: tokens of an open mini-batch, one launch each.

Nothing is read back from the device, no shape depends on a value, and where the caller gives the state up, every part
of it stays at its address: a call can be captured in a CUDA graph if its `phase` is a tensor.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from metattt.inner.tokens import MiniBatches
from metattt.kernels.base import Kernel
from metattt.kernels.triton.device import OPERANDS, WIDTHS
from metattt.state import Tensors

Part = tuple[Tensor | None, ...]
"""Weights, or what is summed up for them, in the order of `Kernel.weights`."""


class AdvancesOnGPU(Kernel):
    """The half of a Triton operation that decodes."""

    @abstractmethod
    def launch(
        self, o: Tensor, q: Tensor, k: Tensor, v: Tensor, eta: Tensor, scale: Tensor, shift: Tensor, tau: Tensor | None,
        phase: int | Tensor, size: int, weights: Part, update: Part | None, new_weights: Part | None, new_update: Part | None,
    ) -> None:  # fmt: skip
        """Launches the operation's `decode.launch_token`, which says what it takes."""

    def reason_not_decoded(self, given: MiniBatches) -> str | None:
        tokens = given.tokens
        width = tokens.views.k.shape[-1]
        if any(gate is not None for gate in tokens.gates[1:]):
            return "gates other than the step size"
        if any(x.dtype not in OPERANDS for x in (tokens.views.k, tokens.views.v, tokens.views.q)):
            return f"views of {str(tokens.views.k.dtype).removeprefix('torch.')}"
        if any(x.dtype != torch.float32 for x in (tokens.gates.eta, *given.weights.values())):
            return "a state that is not fp32"
        if width not in WIDTHS or tokens.views.v.shape[-1] != width:
            return f"head width {width}, not one of {', '.join(map(str, WIDTHS))}"
        return None

    def advance(
        self, given: MiniBatches, update: Tensors | None, phase: int | Tensor, donate_state: bool
    ) -> tuple[Tensor, Tensors, Tensors | None]:
        self.check(given, update, phase)
        tokens, weights = given.tokens, given.weights
        batch, heads, count, width = tokens.views.k.shape
        # [B, n, H, d] in memory, as the layer joins its heads
        y = tokens.gates.eta.new_empty(batch, count, heads, width).transpose(1, 2)
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (tokens.views.q, tokens.views.k, tokens.views.v))
        scale, shift = (given.slow[name].contiguous() for name in ("norm_scale", "norm_bias"))
        tau = None if given.tau is None else given.tau.contiguous()
        phase = phase.contiguous() if isinstance(phase, Tensor) else phase
        donated = donate_state  # the update: the first token's is made here in any case
        with torch.cuda.device_of(k):  # Triton launches on the current device
            for index in range(count):
                place = phase + index if count > 1 else phase
                last = not isinstance(place, Tensor) and place == given.size - 1
                start = self._dense(weights)
                before = None if update is None else self._dense(update)
                new = None if not (last or isinstance(place, Tensor)) else start if donate_state else _like(start)
                opened = None if last else before if donated and before is not None else _like(start)
                o, *views, eta = (x[:, :, index] for x in (y, q, k, v, tokens.gates.eta))
                state = start, before, new, opened
                self.launch(o, views[0], views[1], views[2], eta, scale, shift, tau, place, given.size, *state)
                weights = weights if new is None else self._named(new)
                update, donated = None if opened is None else self._named(opened), True
        return y, weights, update

    def _dense(self, part: Tensors) -> Part:
        return tuple(x if x is None or x.is_contiguous() else x.contiguous() for x in map(part.get, self.weights))

    def _named(self, part: Sequence[Tensor | None]) -> Tensors:
        return {name: x for name, x in zip(self.weights, part, strict=True) if x is not None}


def _like(part: Part) -> Part:
    return tuple(None if x is None else torch.empty_like(x) for x in part)
