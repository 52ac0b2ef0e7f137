"""`ttt_linear` and `ttt_linear_decode`: TTT-Linear in closed form by Triton, differentiable, and traced by
`torch.compile` without a break."""

from typing import NamedTuple

from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.kernels.triton.device import WIDTHS, shared_memory
from metattt.kernels.triton.functions import decode, over_sequences
from metattt.kernels.ttt_linear.on_gpu import TTTLinearOnGPU

KERNEL = TTTLinearOnGPU()


class LinearState(NamedTuple):
    """Fast weights of N sequences: the committed W_a, and the open sum M = -Σ η_s ∇ℓ_s of the tokens since (zero
    between mini-batches).

    Attributes:
        w: `[N, H, d, d]`, used as `x @ w`.
        b: `[N, H, d]`.
        update_w: `[N, H, d, d]`.
        update_b: `[N, H, d]`.
    """

    w: Tensor
    b: Tensor
    update_w: Tensor
    update_b: Tensor


def ttt_linear(
    q: Tensor, k: Tensor, v: Tensor, eta: Tensor, w: Tensor, b: Tensor | None, norm_scale: Tensor, norm_bias: Tensor, *,
    tau: Tensor | None = None, mini_batch_size: int = 16, initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, LinearState | None]:  # fmt: skip
    """Predictions of f(x) = x + γ norm(xW + b) + β while W learns f(k) ≈ v, one gradient step per mini-batch.

    For the tokens t of a mini-batch, with G_s = ∂ ½‖f(k_s) − v_s‖² / ∂(k_s W + b) at the W, b before it:

        z_t = q_t W + b − τ_t Σ_{s≤t} η_s (q_t·k_s + 1) G_s,    o_t = q_t + γ norm(z_t) + β,
        W ← W − τ_{b−1} Σ_s η_s k_sᵀ G_s,                       b ← b − τ_{b−1} Σ_s η_s G_s,

    the last line after whole mini-batches. Without bias the `+ 1` and b are absent. Differentiable once in every
    tensor, cotangents of every part of the final state included.

    Args:
        q, k, v: views `[B, T, H, d]`, bf16, fp16 or fp32 (all alike), any strides whose last is 1. d: 32, 64, 96 or
            128.
        eta: step sizes of the key tokens `[B, T, H]`, fp32, all factors included.
        w, b: W0 `[H, d, d]` and bias `[H, d]` at the start of every sequence; b None: no bias.
        norm_scale, norm_bias: γ, β `[H, d]`.
        tau: token steps `[1 or H, mini_batch_size]`; None: all 1.
        mini_batch_size: tokens per mini-batch: 8, 16, 32 or 64. T need not be a multiple of it.
        initial_state: w `[N, H, d, d]`, b `[N, H, d]` of each sequence in place of W0, at a mini-batch boundary. N: B,
            or the documents.
        output_final_state: also return the weights after the last whole mini-batch and the open sum of the tokens
            since.
        cu_seqlens: `[N + 1]` int32 or int64, bounds in tokens of documents packed into B = 1; each starts from its own
            initial weights.

    Returns:
        o `[B, T, H, d]` in the type of q; the final state in fp32, or None.

    Raises:
        MetaTTTError: a shape, type or stride that the kernels do not take, or fp32 tiles that a device has no room for.
    """
    needed = KERNEL.shared_bytes(q.shape[-1], mini_batch_size, q.dtype)
    if needed > shared_memory(q.device):
        raise MetaTTTError(
            f"ttt_linear: d = {q.shape[-1]} with mini-batches of {mini_batch_size} tokens in {q.dtype} takes "
            f"{needed:,} bytes of "
            f"shared memory, the device has {shared_memory(q.device):,}: pass 16-bit q, k, v, or set "
            "optimizer.mini_batch_size=32."
        )
    weights = {"w": w, "b": b}
    if initial_state is not None:
        weights = {"initial_state[0]": initial_state[0], "initial_state[1]": None if b is None else initial_state[1]}
    o, states = over_sequences(
        KERNEL, q, k, v, eta, weights, (norm_scale, norm_bias), tau, mini_batch_size, cu_seqlens,
        initial_state is not None,
        output_final_state, WIDTHS,
    )  # fmt: skip
    return o, LinearState(*states[:4]) if output_final_state else None


def ttt_linear_decode(
    q: Tensor, k: Tensor, v: Tensor, eta: Tensor, w: Tensor, b: Tensor | None, update_w: Tensor,
    update_b: Tensor | None,
    norm_scale: Tensor, norm_bias: Tensor, *, tau: Tensor | None, phase: Tensor, mini_batch_size: int | None = None,
) -> Tensor:  # fmt: skip
    """One token for each of B sequences, with the state of `ttt_linear`'s final state, which is updated IN PLACE. Not
    differentiable.

    Args:
        q, k, v: `[B, H, d]`, any floating type, last stride 1.
        eta: step sizes `[B, H]`.
        w, update_w: `[B, H, d, d]`, fp32 or bf16, contiguous. The update is that of the tokens of the open mini-batch
            before this one.
        b, update_b: `[B, H, d]` likewise; both None: no bias.
        norm_scale, norm_bias: γ, β `[H, d]`.
        tau: token steps `[1 or H, mini_batch_size]`; None: all 1.
        phase: place of this token in its mini-batch `[B]`, int32 or int64, 0 … mini_batch_size − 1, one for each
            sequence.
        mini_batch_size: tokens per mini-batch; None: that of tau.

    Returns:
        o `[B, H, d]` in the type of q.

    Raises:
        MetaTTTError: a shape, type or stride that the kernel does not take.
    """
    size = mini_batch_size if mini_batch_size is not None else 0 if tau is None else tau.shape[1]
    if size < 1:
        raise MetaTTTError("ttt_linear_decode: mini_batch_size and tau are both None: give one of them.")
    weights, update = {"w": w, "b": b}, {"update_w": update_w, "update_b": update_b}
    return decode(KERNEL, q, k, v, eta, weights, update, (norm_scale, norm_bias), tau, phase, size, WIDTHS)
