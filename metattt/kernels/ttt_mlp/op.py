"""TTT-MLP on the GPU: the operation over sequences and the step of decoding.

`f(x) = x + LN(gelu(x·w1 + b1)·w2 + b2)` learns from the tokens of a sequence while it reads them (arXiv 2407.04620,
Sec. 2.7), in mini-batches of b tokens. Both functions compute what `naive.py` says, by operators with shapes and
derivatives, so that `torch.compile(fullgraph=True)` passes through them. Derivatives of the backward pass do not exist:
asking for them is an error.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.kernels.operator import rows
from metattt.kernels.triton.functions import decode, over_sequences
from metattt.kernels.ttt_mlp.on_gpu import TTTMLPOnGPU

KERNEL = TTTMLPOnGPU()
WIDTHS = range(32, 129, 16)


class FinalState(NamedTuple):
    """The state after a sequence, fp32, for each of N sequences and H heads; the entries of biases are None without
    bias.

    `w1 [N, H, d, f]`, `b1 [N, H, f]`, `w2 [N, H, f, d]`, `b2 [N, H, d]`: weights committed after the last whole
    mini-batch. `update_*`, of the same shapes: −Σ_s η_s ∇ℓ_s over the tokens of the mini-batch that is still open;
    zeros if there are none.
    """

    w1: Tensor
    b1: Tensor | None
    w2: Tensor
    b2: Tensor | None
    update_w1: Tensor
    update_b1: Tensor | None
    update_w2: Tensor
    update_b2: Tensor | None


def ttt_mlp(
    q: Tensor, k: Tensor, v: Tensor, eta: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None,
    norm_scale: Tensor, norm_bias: Tensor, *, tau: Tensor | None = None, mini_batch_size: int = 16,
    initial_state: tuple[Any, ...] | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, FinalState | None]:  # fmt: skip
    """Reads T tokens of B sequences with weights that learn from them: as `ttt_linear`, whose other arguments it takes
    (products of fp32 views are three TF32 products of split operands; d is a multiple of 16).

    Args:
        w1, b1, w2, b2: `[H, d, 4d]`, `[H, 4d]`, `[H, 4d, d]`, `[H, d]`: weights with which every sequence starts. Both
            biases may be None.
        initial_state: `(w1, b1, w2, b2)`, each `[N, H, ...]`, with which each of N sequences starts, instead of the
            shared ones.
    """
    weights = (w1, b1, w2, b2) if initial_state is None else initial_state
    if len(weights) != 4:
        raise MetaTTTError(f"ttt_mlp: initial_state has {len(weights)} entries; expected (w1, b1, w2, b2).")
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    q, k, v = rows(q), rows(k), rows(v)
    names = KERNEL.weights if initial_state is None else [f"initial_state[{at}]" for at in range(4)]
    o, states = over_sequences(
        KERNEL, q, k, v, eta, dict(zip(names, weights, strict=True)), (norm_scale, norm_bias), tau, mini_batch_size,
        cu_seqlens, initial_state is not None, True, WIDTHS,
    )  # fmt: skip
    if not output_final_state:
        return o, None
    present = 2 if weights[1] is None else 4
    return o, FinalState(*KERNEL.part(states[:present]), *KERNEL.part(states[present : 2 * present]))


def ttt_mlp_decode(
    q: Tensor, k: Tensor, v: Tensor, eta: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None,
    update_w1: Tensor, update_b1: Tensor | None, update_w2: Tensor, update_b2: Tensor | None,
    norm_scale: Tensor, norm_bias: Tensor, *, tau: Tensor, phase: Tensor,
) -> Tensor:  # fmt: skip
    """Reads one token of each of B sequences, as `ttt_linear_decode` does: outputs `[B, H, d]`. The state, whose shapes
    `FinalState` tells, is changed in place; `tau` gives b."""
    weights = {"w1": w1, "b1": b1, "w2": w2, "b2": b2}
    update = {"update_w1": update_w1, "update_b1": update_b1, "update_w2": update_w2, "update_b2": update_b2}
    q, k, v = rows(q), rows(k), rows(v)
    return decode(KERNEL, q, k, v, eta, weights, update, (norm_scale, norm_bias), tau, phase, tau.shape[-1], WIDTHS)
