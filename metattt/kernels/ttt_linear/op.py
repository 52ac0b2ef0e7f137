"""`ttt_linear`: TTT-Linear in closed form as differentiable `torch.library` operators, which `torch.compile` traces
without a break."""

import torch
from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.kernels.triton.device import OPERANDS, SIZES, WIDTHS, shared_memory
from metattt.kernels.ttt_linear import backward, decode, forward, tuning
from metattt.kernels.ttt_linear.naive import LinearState


def ttt_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    w: Tensor,
    b: Tensor | None,
    norm_scale: Tensor,
    norm_bias: Tensor,
    *,
    tau: Tensor | None = None,
    mini_batch_size: int = 16,
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, LinearState | None]:
    """Predictions of f(x) = x + γ norm(xW + b) + β while W learns f(k) ≈ v, one gradient step per mini-batch.

    For the tokens t of a mini-batch, with G_s = ∂ ½‖f(k_s) − v_s‖² / ∂(k_s W + b) at the W, b before it:

        z_t = q_t W + b − τ_t Σ_{s≤t} η_s (q_t·k_s + 1) G_s,    o_t = q_t + γ norm(z_t) + β,
        W ← W − τ_{b−1} Σ_s η_s k_sᵀ G_s,                       b ← b − τ_{b−1} Σ_s η_s G_s,

    the last line after whole mini-batches. Without bias the `+ 1` and b are absent. Differentiable once in every tensor,
    cotangents of every part of the final state included.

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
    sequences = _check(q, k, v, eta, norm_scale, norm_bias, tau, mini_batch_size, cu_seqlens)
    heads, width = q.shape[2:]
    if initial_state is None:
        _expect("w", w, (heads, width, width))
    else:
        w, b = initial_state[0], None if b is None else initial_state[1]
        _expect("initial_state[0]", w, (sequences, heads, width, width))
    if b is not None:
        _expect("b" if initial_state is None else "initial_state[1]", b, w.shape[:-1])
    inputs = (q, k, v, eta, w, b, norm_scale, norm_bias, tau)
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    segment = tuning.Call.of(k, mini_batch_size, sequences).segment()
    out = forward.Forward(*ttt_linear_forward(*inputs, cu_seqlens, mini_batch_size, segment, save, output_final_state))
    return out.o, LinearState(out.w, out.b, out.update_w, out.update_b) if output_final_state else None


def ttt_linear_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    w: Tensor,
    b: Tensor | None,
    update_w: Tensor,
    update_b: Tensor | None,
    norm_scale: Tensor,
    norm_bias: Tensor,
    *,
    tau: Tensor | None,
    phase: Tensor,
    mini_batch_size: int | None = None,
) -> Tensor:
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
    if q.ndim != 3:
        raise MetaTTTError(f"ttt_linear_decode: q has shape {tuple(q.shape)}; expected [B, H, d].")
    batch, heads, width = q.shape
    if width not in WIDTHS:
        raise MetaTTTError(f"ttt_linear_decode: head width {width} is not one of {WIDTHS}: set layer.form=dual.")
    size = mini_batch_size if mini_batch_size is not None else 0 if tau is None else tau.shape[1]
    if size < 1:
        raise MetaTTTError("ttt_linear_decode: mini_batch_size and tau are both None: give one of them.")
    for name, x in (("q", q), ("k", k), ("v", v)):
        _expect(name, x, (batch, heads, width))
        _expect_unit_stride(name, x)
    _expect("eta", eta, (batch, heads))
    if (b is None) != (update_b is None):
        raise MetaTTTError(
            "ttt_linear_decode: one of b and update_b is None: give both, or neither for a learner without bias."
        )
    for name, state, shape in (
        ("w", w, (batch, heads, width, width)),
        ("update_w", update_w, (batch, heads, width, width)),
        ("b", b, (batch, heads, width)),
        ("update_b", update_b, (batch, heads, width)),
    ):
        if state is not None:
            _expect(name, state, shape)
            if not state.is_contiguous():
                raise MetaTTTError(
                    f"ttt_linear_decode: {name} has strides {state.stride()}; what is updated in place must be contiguous."
                )
    _expect("norm_scale", norm_scale, (heads, width))
    _expect("norm_bias", norm_bias, (heads, width))
    _expect("phase", phase, (batch,))
    if tau is not None:
        _expect("tau", tau, (heads if tau.shape[0] != 1 else 1, size))
    return ttt_linear_decode_inplace(q, k, v, eta, w, b, update_w, update_b, norm_scale, norm_bias, tau, phase, size)


def _expect_unit_stride(name: str, x: Tensor) -> None:
    if x.stride(-1) != 1:
        raise MetaTTTError(
            f"ttt_linear: {name} has strides {x.stride()}; the last must be 1: pass {name}.contiguous()."
        )


def _expect(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if x.shape != torch.Size(shape):
        raise MetaTTTError(f"ttt_linear: {name} has shape {tuple(x.shape)}; expected {tuple(shape)}.")


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    norm_scale: Tensor,
    norm_bias: Tensor,
    tau: Tensor | None,
    mini_batch_size: int,
    cu_seqlens: Tensor | None,
) -> int:
    """Number of sequences, once everything but the weights is as the kernels take it."""
    if q.ndim != 4:
        raise MetaTTTError(f"ttt_linear: q has shape {tuple(q.shape)}; expected [B, T, H, d].")
    batch, tokens, heads, width = q.shape
    if width not in WIDTHS:
        raise MetaTTTError(
            f"ttt_linear: head width {width} is not one of {WIDTHS}: choose dim / num_heads among them, or layer.form=dual."
        )
    if mini_batch_size not in SIZES:
        raise MetaTTTError(
            f"ttt_linear: mini-batches of {mini_batch_size} tokens are not among {SIZES}: "
            "set optimizer.mini_batch_size to one of them, or layer.form=dual."
        )
    if q.dtype not in OPERANDS or k.dtype != q.dtype or v.dtype != q.dtype:
        raise MetaTTTError(
            f"ttt_linear: q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; expected one type of {OPERANDS} for all."
        )
    needed = min(tuning.shared_bytes(width, mini_batch_size, q.dtype.itemsize, form) for form in tuning.FORMS)
    if needed > shared_memory(q.device):
        raise MetaTTTError(
            f"ttt_linear: d = {width} with mini-batches of {mini_batch_size} tokens in {q.dtype} takes {needed:,} bytes of shared "
            f"memory, the device has {shared_memory(q.device):,}: pass 16-bit q, k, v, or set optimizer.mini_batch_size=32."
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        _expect(name, x, (batch, tokens, heads, width))
        _expect_unit_stride(name, x)
    _expect("eta", eta, (batch, tokens, heads))
    if eta.dtype != torch.float32:
        raise MetaTTTError(f"ttt_linear: eta is {eta.dtype}; expected torch.float32: pass eta.float().")
    _expect("norm_scale", norm_scale, (heads, width))
    _expect("norm_bias", norm_bias, (heads, width))
    if tau is not None:
        _expect("tau", tau, (heads if tau.shape[0] != 1 else 1, mini_batch_size))
    if cu_seqlens is None:
        return batch
    if batch != 1 or cu_seqlens.ndim != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise MetaTTTError(
            f"ttt_linear: cu_seqlens {tuple(cu_seqlens.shape)} {cu_seqlens.dtype} with B = {batch}; "
            "expected [N + 1] of torch.int32 or int64 with the documents packed into B = 1."
        )
    return cu_seqlens.shape[0] - 1


def _dense(x: Tensor) -> Tensor:
    """With unit last stride, which a cotangent may lack (that of a sum is expanded)."""
    return x if x.stride(-1) == 1 else x.contiguous()


@torch.library.custom_op("metattt::ttt_linear_forward", mutates_args=())
def ttt_linear_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    w: Tensor,
    b: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    tau: Tensor | None,
    cu_seqlens: Tensor | None,
    size: int,
    segment: int,
    save: bool,
    final: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of `forward.Forward`; see `forward.launch_forward`. `segment`: mini-batches between anchors."""
    bias, steps = (None if x is None else x.contiguous() for x in (b, tau))
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    out = forward.allocate(q, k, sequences, size, segment, save, final)
    with torch.cuda.device_of(q):  # Triton launches on the current device
        forward.launch_forward(
            out,
            q,
            k,
            v,
            eta,
            w.contiguous(),
            bias,
            scale.contiguous(),
            shift.contiguous(),
            steps,
            cu_seqlens,
            size,
            segment,
        )
    return out


@ttt_linear_forward.register_fake
def _(q, k, v, eta, w, b, scale, shift, tau, cu_seqlens, size, segment, save, final):  # type: ignore[no-untyped-def]
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return forward.allocate(q, k, sequences, size, segment, save, final)


@torch.library.custom_op("metattt::ttt_linear_backward", mutates_args=())
def ttt_linear_backward(
    d_o: Tensor,
    d_w: Tensor | None,
    d_b: Tensor | None,
    d_update_w: Tensor | None,
    d_update_b: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    scale: Tensor,
    shift: Tensor,
    tau: Tensor | None,
    cu_seqlens: Tensor | None,
    weighted: Tensor,
    anchors: Tensor,
    bias: bool,
    size: int,
    segment: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of `backward.Backward`; see `backward.launch_backward`."""
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    heads, width = q.shape[2:]
    state = None
    cotangents = (d_w, d_b, d_update_w, d_update_b)
    if any(x is not None for x in cotangents):
        shapes = ((sequences, heads, width, width), (sequences, heads, width)) * 2
        state = tuple(
            eta.new_zeros(s) if x is None else x.contiguous() for x, s in zip(cotangents, shapes, strict=True)
        )
    out = backward.allocate(q, k, v, eta, sequences, bias, tau is not None, size)
    steps = None if tau is None else tau.contiguous()
    with torch.cuda.device_of(q):
        backward.launch_backward(
            out,
            _dense(d_o),
            state,
            q,
            k,
            v,
            eta,
            scale.contiguous(),
            shift.contiguous(),
            steps,
            cu_seqlens,
            weighted,
            anchors,
            size,
            segment,
        )
    return out


@ttt_linear_backward.register_fake
def _(  # type: ignore[no-untyped-def]
    d_o, d_w, d_b, d_update_w, d_update_b, q, k, v, eta, scale, shift, tau, cu_seqlens, weighted, anchors, bias,
    size, segment,
):  # fmt: skip
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return backward.allocate(q, k, v, eta, sequences, bias, tau is not None, size)


def _setup(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple) -> None:
    q, k, v, eta, w, b, scale, shift, tau, cu_seqlens, size, segment, _, _ = inputs
    out = forward.Forward(*output)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(out.weighted, out.anchors)
    ctx.save_for_backward(q, k, v, eta, w, b, scale, shift, tau, cu_seqlens, out.weighted, out.anchors)
    ctx.size, ctx.segment = size, segment  # type: ignore[attr-defined]


def _derivative(ctx: torch.autograd.function.FunctionCtx, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, eta, w, b, scale, shift, tau, cu_seqlens, weighted, anchors = ctx.saved_tensors  # type: ignore[attr-defined]
    d_o, d_w, d_b, d_update_w, d_update_b = cotangents[:5]
    grads = backward.Backward(
        *ttt_linear_backward(
            torch.zeros_like(q) if d_o is None else d_o, d_w, d_b, d_update_w, d_update_b,
            q, k, v, eta, scale, shift, tau, cu_seqlens, weighted, anchors, b is not None, ctx.size, ctx.segment,  # type: ignore[attr-defined]
        )
    )  # fmt: skip
    shared = w.ndim == 3  # one W0 for all sequences
    d_tau = None
    if tau is not None:
        d_tau = grads.tau.sum((0, 1) if len(tau) == 1 else 0, dtype=torch.float32).view_as(tau).to(tau.dtype)
    return (
        grads.q,
        grads.k,
        grads.v,
        grads.eta,
        (grads.w.sum(0) if shared else grads.w).to(w.dtype),
        None if b is None else (grads.b.sum(0) if shared else grads.b).to(b.dtype),
        grads.scale.sum(0).to(scale.dtype),
        grads.shift.sum(0).to(shift.dtype),
        d_tau,
        None,
        None,
        None,
        None,
        None,
    )


ttt_linear_forward.register_autograd(_derivative, setup_context=_setup)


def _refuse(ctx: torch.autograd.function.FunctionCtx, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
    raise MetaTTTError(
        "ttt_linear has first derivatives only; for derivatives of its gradients (create_graph=True) set layer.form=dual."
    )


ttt_linear_backward.register_autograd(_refuse)


@torch.library.custom_op("metattt::ttt_linear_decode", mutates_args=("w", "b", "update_w", "update_b"))
def ttt_linear_decode_inplace(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    w: Tensor,
    b: Tensor | None,
    update_w: Tensor,
    update_b: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    tau: Tensor | None,
    phase: Tensor,
    size: int,
) -> Tensor:
    """See `decode.launch_decode`."""
    steps = None if tau is None else tau.contiguous()
    affine = scale.contiguous(), shift.contiguous()
    with torch.cuda.device_of(q):
        return decode.launch_decode(
            torch.empty_like(q), q, k, v, eta, w, b, update_w, update_b, *affine, steps, phase.contiguous(), size
        )


@ttt_linear_decode_inplace.register_fake
def _(q, k, v, eta, w, b, update_w, update_b, scale, shift, tau, phase, size):  # type: ignore[no-untyped-def]
    return torch.empty_like(q)
