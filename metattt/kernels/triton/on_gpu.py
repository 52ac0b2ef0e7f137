"""The Triton operations as a layer calls them: whole mini-batches, and tokens of an open one while it decodes.

Decoding is one launch a token. Nothing is read back from the device, no shape depends on a value, and where the caller
gives the state up, every part of it stays at its address: a call can be captured in a CUDA graph if its `phase` is a
tensor.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from metattt.inner.tokens import MiniBatches
from metattt.kernels.operator import Operation, Pass, dense, flat, rows
from metattt.kernels.triton.agreement import disagreement
from metattt.kernels.triton.device import OPERANDS, SIZES, WIDTHS, shared_memory
from metattt.state import Tensors

Part = tuple[Any, ...]
"""Weights, or what is summed up for them, in the order of `Kernel.weights`: tensors; None where there is no bias."""


class OnGPU(Operation):
    """A Triton operation."""

    device = "cuda"
    documents = "row"
    traceable = True
    tuning: Any  #: the operation's launches
    operands: torch.dtype | None = None  #: of products, whatever the views have; None: what the call says

    @abstractmethod
    def decoder(self, width: int, size: int, weights: Part) -> tuple[Any, dict[str, Any]]:
        """The kernel that `launch` runs, and what it is compiled for besides what `launch` tells it."""

    def launch(
        self, o: Tensor, q: Tensor, k: Tensor, v: Tensor, eta: Tensor, scale: Tensor, shift: Tensor, tau: Tensor | None,
        phase: int | Tensor, size: int, weights: Part, update: Part | None, new_weights: Part | None,
        new_update: Part | None,
    ) -> None:  # fmt: skip
        """Runs the operation's kernel for one token of every sequence.

        Args:
            o: where the outputs `[B, H, d]` go; last stride 1, as those of q, k and v.
            q, k, v, eta: views `[B, H, d]` and step sizes `[B, H]`.
            scale, shift, tau: γ, β `[H, d]` and token steps `[1 or H, size]` (None: all 1), contiguous.
            phase: place of the token in its mini-batch of `size` tokens; `[B]`, contiguous, where sequences differ.
            weights, update: the state before the token, contiguous; update None: zero.
            new_weights: where committed weights go; may be `weights`. None: the token completes no mini-batch.
            new_update: where M goes; may be `update`. None: the token completes every mini-batch.
        """
        batch, heads, width = q.shape
        nothing: Part = (None,) * len(self.weights)
        places = (phase, 0) if isinstance(phase, Tensor) else (None, phase)
        copies = new_weights is None or new_weights[0] is not weights[0]
        kernel, options = self.decoder(width, size, weights)
        kernel[(batch * heads,)](
            q, k, v, eta, scale, shift, tau, *places, o,
            *weights, *(update or nothing), *(new_weights or nothing), *(new_update or nothing),
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *eta.stride()[:2],
            0 if tau is None or len(tau) == 1 else tau.stride(0), *o.stride()[:2],
            H=heads, D=width, BIAS=weights[1] is not None, COPIES=copies, **options,
        )  # fmt: skip

    def shared_bytes(self, width: int, size: int, dtype: torch.dtype) -> int:
        """Most bytes of shared memory that a program of the launches for these shapes takes, forward or backward.

        Compared with the device's limit in `reason_rejected`; 0 where no launch comes near one.

        Args:
            width: d, features of a head.
            size: b, tokens of a mini-batch.
            dtype: type of the operands of products.
        """
        return 0

    def group_size(self, call: Pass) -> int:
        size: int = self.tuning.SEGMENT
        return size

    def _misfit(self, given: MiniBatches) -> str | None:
        """Why no launch of the operation takes these gates or widths."""
        views, gates = given.tokens.views, given.tokens.gates
        if any(gate is not None for gate in gates[1:]):
            return "gates other than the step size"
        if (width := views.k.shape[-1]) not in WIDTHS or views.v.shape[-1] != width:
            return f"head width {width}, not one of {', '.join(map(str, WIDTHS))}"
        return None

    # -- whole mini-batches --------------------------------------------------------------------------------------------

    def reason_rejected(self, given: MiniBatches) -> str | None:
        tokens = given.tokens
        width = tokens.views.k.shape[-1]
        if misfit := self._misfit(given):
            return misfit
        if given.matmul_dtype not in OPERANDS or tokens.gates.eta.dtype != torch.float32:
            return f"operands of {str(given.matmul_dtype).removeprefix('torch.')}"
        if given.size not in SIZES:
            return f"optimizer.mini_batch_size={given.size}, not one of {', '.join(map(str, SIZES))}"
        dtype = self.operands or given.matmul_dtype
        needed, room = self.shared_bytes(width, given.size, dtype), shared_memory(tokens.views.k.device)
        if needed > room:
            return (
                f"{needed:,} bytes of shared memory for head width {width}, optimizer.mini_batch_size={given.size} in "
                f"{str(dtype).removeprefix('torch.')}, where the device has {room:,}"
            )
        if not tokens.views.k.is_cuda:
            return None
        name, k, dtype = self.name.partition(".")[0], tokens.views.k, given.matmul_dtype
        biased, tau, trains = len(given.weights) == len(self.weights), given.tau is not None, torch.is_grad_enabled()
        return disagreement(name, k.device, dtype, width, given.size, k.shape[1], biased, tau, trains)

    def passed(self, given: MiniBatches, final: bool = True, documents: Tensor | None = None) -> Pass:
        dtype = self.operands or given.matmul_dtype
        k, v, q = (x.to(dtype) for x in given.tokens.views[:3])
        return super().passed(given._replace(tokens=given.tokens.with_views(k=k, v=v, q=q)), final, documents)

    def part(self, tensors: Sequence[Tensor | None]) -> Part:
        """Tensors that `flat` ends with, or likewise, as a `Part`."""
        biased = len(tensors) == len(self.weights)
        return tuple(dense(x) for x in (tensors if biased else (y for x in tensors for y in (x, None))))

    # -- tokens of an open mini-batch ----------------------------------------------------------------------------------

    def reason_not_decoded(self, given: MiniBatches) -> str | None:
        tokens = given.tokens
        if any(x.dtype not in OPERANDS for x in (tokens.views.k, tokens.views.v, tokens.views.q)):
            return f"views of {str(tokens.views.k.dtype).removeprefix('torch.')}"
        if any(x.dtype != torch.float32 for x in (tokens.gates.eta, *given.weights.values())):
            return "a state that is not fp32"
        return self._misfit(given)

    def one_token(
        self, q: Tensor, k: Tensor, v: Tensor, eta: Tensor, weights: Sequence[Tensor], update: Sequence[Tensor],
        scale: Tensor, shift: Tensor, tau: Tensor | None, phase: Tensor, size: int,
    ) -> Tensor:  # fmt: skip
        y, state = torch.empty_like(q, memory_format=torch.contiguous_format), (self.part(weights), self.part(update))
        norm = dense(scale), dense(shift), dense(tau)
        with torch.cuda.device_of(q):  # Triton launches on the current device
            self.launch(y, rows(q), rows(k), rows(v), eta, *norm, phase.contiguous(), size, *state, *state)
        return y

    def advance(
        self, given: MiniBatches, update: Tensors | None, phase: int | Tensor, donate_state: bool
    ) -> tuple[Tensor, Tensors, Tensors | None]:
        self.check(given, update, phase)
        tokens, weights, names = given.tokens, self.part(list(given.weights.values())), list(given.weights)
        batch, heads, count, width = tokens.views.k.shape
        # [B, n, H, d] in memory, as the layer joins its heads
        y = tokens.gates.eta.new_empty(batch, count, heads, width).transpose(1, 2)
        q, k, v = (rows(x) for x in (tokens.views.q, tokens.views.k, tokens.views.v))
        scale, shift, tau = (dense(x) for x in (given.slow["norm_scale"], given.slow["norm_bias"], given.tau))
        phase = phase.contiguous() if isinstance(phase, Tensor) else phase
        before = None if update is None else self.part([update[name] for name in names])
        donated = donate_state  # the update: the first token's is made here in any case
        with torch.cuda.device_of(k):  # Triton launches on the current device
            for index in range(count):
                place = phase + index if count > 1 else phase
                last = not isinstance(place, Tensor) and place == given.size - 1
                # W_a is written over only in steps that are recorded: other states of the mini-batch hold it, too
                own = donate_state and isinstance(place, Tensor)
                new = None if not (last or isinstance(place, Tensor)) else weights if own else _like(weights)
                opened = None if last else before if donated and before is not None else _like(weights)
                o, *views, eta = (x[:, :, index] for x in (y, q, k, v, tokens.gates.eta))
                state = weights, before, new, opened
                self.launch(o, views[0], views[1], views[2], eta, scale, shift, tau, place, given.size, *state)
                weights, before, donated = weights if new is None else new, opened, True
        after = None if before is None else dict(zip(names, _present(before), strict=True))
        return y, dict(zip(names, _present(weights), strict=True)), after


# -- between the layout of layers and that of launches, `[B, T, H, d]` -------------------------------------------------


def launched(given: MiniBatches) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and η as launches take them."""
    k, v, q = (rows(x.transpose(1, 2)) for x in given.tokens.views[:3])
    return q, k, v, given.tokens.gates.eta.transpose(1, 2)


def parameters(given: MiniBatches) -> tuple[Any, Any, Any]:
    """γ, β and τ as launches take them."""
    return dense(given.slow["norm_scale"]), dense(given.slow["norm_bias"]), dense(given.tau)


def gradients(given: MiniBatches, views: Sequence[Tensor], others: Sequence[Tensor | None]) -> list[Tensor]:
    """Cotangents in the order of `flat`, summed over what arguments share, in their types.

    Args:
        views: of k, v, q, and of η, as launches write them.
        others: of the tensors after those; `[N, H, ...]` where each sequence has its own.
    """
    found = [*(x.transpose(1, 2) for x in views), *(x for x in others if x is not None)]
    return [_reduced(x, like) for x, like in zip(found, flat(given), strict=True)]


def _reduced(x: Tensor, like: Tensor) -> Tensor:
    if x.ndim > like.ndim:
        x = x.sum(0)
    if x.shape != like.shape:
        x = x.sum(0, keepdim=True)
    return x.to(like.dtype)


def _like(part: Part) -> Part:
    return tuple(None if x is None else torch.empty_like(x) for x in part)


def _present(part: Part) -> list[Tensor]:
    return [x for x in part if x is not None]
