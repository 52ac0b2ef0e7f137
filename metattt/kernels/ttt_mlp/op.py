"""TTT-MLP on the GPU: the operation over sequences and the step of decoding, as operators of torch.

`f(x) = x + LN(gelu(x·w1 + b1)·w2 + b2)` learns from the tokens of a sequence while it reads them (arXiv 2407.04620,
Sec. 2.7), in mini-batches of b tokens. Both functions compute what `naive.py` says; the operators have fake and
autograd implementations, so that `torch.compile(fullgraph=True)` passes through them. Derivatives of the backward pass
do not exist: asking for them is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.kernels.triton.device import OPERANDS, SIZES, multiprocessors
from metattt.kernels.ttt_mlp.backward import backward
from metattt.kernels.ttt_mlp.decode import decode
from metattt.kernels.ttt_mlp.forward import forward, forward_kernel, sequences, slots
from metattt.kernels.ttt_mlp.naive import FinalState, Weights
from metattt.kernels.ttt_mlp.tuning import SEGMENT, Config, config

WIDTHS = range(32, 129, 16)
INTERPRETED = not isinstance(forward_kernel, triton.JITFunction)  # TRITON_INTERPRET=1: the kernels run on the CPU


def ttt_mlp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    norm_scale: Tensor,
    norm_bias: Tensor,
    *,
    tau: Tensor | None = None,
    mini_batch_size: int = 16,
    initial_state: Weights | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, FinalState | None]:
    """Reads T tokens of B sequences with weights that learn from them.

    Args:
        q, k, v: `[B, T, H, d]`, bf16, fp16 or fp32 (the type of the operands of all products; those of fp32 are
            computed as three TF32 products of split operands); the last stride is 1, others are free.
        eta: `[B, T, H]`, fp32: step size of each token as a key, all factors included.
        w1, b1, w2, b2: `[H, d, 4d]`, `[H, 4d]`, `[H, 4d, d]`, `[H, d]`: weights with which every sequence starts. Both
            biases may be None.
        norm_scale, norm_bias: `[H, d]`.
        tau: `[H or 1, b]`, fp32: token steps, by the place of the reading token in its mini-batch. None: 1.
        mini_batch_size: b, tokens: 8, 16, 32 or 64.
        initial_state: `(w1, b1, w2, b2)`, each `[N, H, ...]`, with which each of N sequences starts, instead of the
            shared ones.
        output_final_state: whether to return the `FinalState`, too.
        cu_seqlens: `[N + 1]`, int: bounds of N documents in one packed row (B = 1), from 0 to T. Each starts anew.

    Raises:
        MetaTTTError: for shapes, types and sizes that the kernels do not take.
    """
    _check(q, k, v, eta, norm_scale, norm_bias, tau, mini_batch_size, cu_seqlens)
    count = sequences(q, cu_seqlens)
    weights = (w1, b1, w2, b2) if initial_state is None else initial_state
    _check_weights(
        weights,
        q,
        () if initial_state is None else (count,),
        "initial_state" if initial_state is not None else "weights",
    )
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    given = (q, k, v, eta, tau, *weights, norm_scale, norm_bias)
    keeps = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
    o, *state = _forward(*given, cu_seqlens, mini_batch_size, SEGMENT if keeps else 0)
    if not output_final_state:
        return o, None
    if b1 is None:
        state = [None if at % 2 else x for at, x in enumerate(state)]
    return o, FinalState(*state[:8])


def ttt_mlp_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    update_w1: Tensor,
    update_b1: Tensor | None,
    update_w2: Tensor,
    update_b2: Tensor | None,
    norm_scale: Tensor,
    norm_bias: Tensor,
    *,
    tau: Tensor,
    phase: Tensor,
) -> Tensor:
    """Reads one token of each of B sequences: outputs `[B, H, d]`. The state is changed in place; there are no
    gradients.

    Args:
        q, k, v: `[B, H, d]`.
        eta: `[B, H]`.
        w1, b1, w2, b2: committed weights, `[B, H, ...]`, fp32 or bf16, contiguous. The last token of a mini-batch adds
            the update.
        update_w1, ...: −Σ_s η_s ∇ℓ_s over the tokens of the open mini-batch, of the same shapes and types.
        norm_scale, norm_bias: `[H, d]`.
        tau: `[H or 1, b]`, fp32: token steps; gives b.
        phase: `[B]`, int: place of the token in its mini-batch, 0 to b − 1, for each sequence.
    """
    _check_token(q, k, v, eta, norm_scale, norm_bias, tau, phase)
    weights, update = (w1, b1, w2, b2), (update_w1, update_b1, update_w2, update_b2)
    for name, state in (("weights", weights), ("update", update)):
        _check_weights(state, q, q.shape[:1], name)
        for x in state:
            if x is not None and not x.is_contiguous():
                raise MetaTTTError(
                    f"{name}: {list(x.shape)} is not contiguous, and is changed in place: call .contiguous() first"
                )
    return _decode(q, k, v, eta, *weights, *update, norm_scale, norm_bias, tau, phase)


# The operators. An absent tensor among outputs is an empty one: operators cannot return None.


@torch.library.custom_op("metattt::ttt_mlp", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, eta: Tensor, tau: Tensor | None, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None,
    norm_scale: Tensor, norm_bias: Tensor, cu_seqlens: Tensor | None, b: int, segment: int,
) -> list[Tensor]:  # fmt: skip
    """Outputs, final weights (4), open update (4), and, unless `segment` is 0, the weights kept for the backward pass
    (4)."""
    weights = tuple(None if w is None else w.contiguous() for w in (w1, b1, w2, b2))
    q, k, v, cu_seqlens = *_rows(q, k, v), _bounds(cu_seqlens, q)
    tau, norm_scale, norm_bias = _small(tau, norm_scale, norm_bias)
    launch = _launch("forward", q, cu_seqlens, b)
    with _on(q):
        o, *states = forward(q, k, v, eta, tau, weights, norm_scale, norm_bias, cu_seqlens, b, segment, launch)
    return [
        o,
        *(
            q.new_empty(0, dtype=torch.float32) if x is None else x
            for state in states
            if state is not None
            for x in state
        ),
    ]


@_forward.register_fake
def _(q, k, v, eta, tau, w1, b1, w2, b2, norm_scale, norm_bias, cu_seqlens, b, segment):  # type: ignore[no-untyped-def]
    heads, d = q.shape[2:]
    shapes = ((d, 4 * d), (4 * d if b1 is not None else 0,), (4 * d, d), (d if b1 is not None else 0,))

    def state(count: int) -> list[Tensor]:
        return [q.new_empty((count, heads, *s) if s[0] else (0,), dtype=torch.float32) for s in shapes]

    count = sequences(q, cu_seqlens)
    kept = state(slots(q, cu_seqlens, b, segment)) if segment else []
    return [torch.empty_like(_rows(q)[0]), *state(count), *state(count), *kept]


@torch.library.custom_op("metattt::ttt_mlp_backward", mutates_args=())
def _backward(
    q: Tensor, k: Tensor, v: Tensor, eta: Tensor, tau: Tensor | None, norm_scale: Tensor, norm_bias: Tensor, cu_seqlens: Tensor | None,
    final: Sequence[Tensor], kept: Sequence[Tensor], do: Tensor | None, dstate: Sequence[Tensor | None], b: int, segment: int,
) -> list[Tensor]:  # fmt: skip
    """Cotangents of q, k, v, η, τ, w1, b1, w2, b2, norm scale and bias; from τ on `[N, H, ...]`, to be added up."""
    q, k, v, cu_seqlens = *_rows(q, k, v), _bounds(cu_seqlens, q)
    do = torch.zeros_like(q) if do is None else _rows(do)[0]
    tau, norm_scale, norm_bias = _small(tau, norm_scale, norm_bias)
    walk, back = (_launch(kernel, q, cu_seqlens, b) for kernel in ("forward", "backward"))
    dfinal, dupdate = (_present(part) for part in (dstate[:4], dstate[4:]))
    with _on(q):
        grads = backward(
            q, k, v, eta, tau, norm_scale, norm_bias, cu_seqlens, b, segment, _present(final), _present(kept), do, dfinal, dupdate,
            walk, back,
        )  # fmt: skip
    listed = [*grads[:5], *grads.weights, grads.scale, grads.bias]
    return [q.new_empty(0, dtype=torch.float32) if x is None else x for x in listed]


@_backward.register_fake
def _(q, k, v, eta, tau, norm_scale, norm_bias, cu_seqlens, final, kept, do, dstate, b, segment):  # type: ignore[no-untyped-def]
    count, heads, d = sequences(q, cu_seqlens), q.shape[2], q.shape[3]
    norm = [eta.new_empty(count, heads, d, dtype=torch.float32) for _ in range(2)]
    dtau = eta.new_empty((count, heads, b) if tau is not None else (0,), dtype=torch.float32)
    deta = eta.new_empty(eta.shape, dtype=torch.float32)
    return [*(torch.empty_like(x) for x in _rows(q, k, v)), deta, dtau, *(torch.empty_like(w) for w in final), *norm]


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, eta, tau, *weights, norm_scale, norm_bias, cu_seqlens, b, segment = inputs
    ctx.set_materialize_grads(False)
    ctx.sizes = b, segment
    ctx.given = [None if x is None else (x.dtype, x.shape) for x in (tau, *weights, norm_scale, norm_bias)]
    ctx.save_for_backward(q, k, v, eta, tau, norm_scale, norm_bias, cu_seqlens, *output[1:5], *output[9:13])


def _differentiate(ctx, grads):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors
    b, segment = ctx.sizes
    dq, dk, dv, deta, *others = _backward(
        *saved[:8], list(saved[8:12]), list(saved[12:16]), grads[0], list(grads[1:9]), b, segment
    )
    reduced = [None if given is None else _reduced(grad, *given) for grad, given in zip(others, ctx.given, strict=True)]
    return dq, dk, dv, deta.to(saved[3].dtype), *reduced, None, None, None


def _reduced(grad: Tensor, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """Sums a cotangent `[N, H, ...]` over what its argument shares."""
    if len(shape) < grad.dim():
        grad = grad.sum(0)
    if grad.shape[0] != shape[0]:  # token steps that all heads share
        grad = grad.sum(0, keepdim=True)
    return grad.to(dtype)


_forward.register_autograd(_differentiate, setup_context=_setup)


@torch.library.custom_op(
    "metattt::ttt_mlp_decode", mutates_args=("w1", "b1", "w2", "b2", "update_w1", "update_b1", "update_w2", "update_b2")
)
def _decode(
    q: Tensor, k: Tensor, v: Tensor, eta: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None,
    update_w1: Tensor, update_b1: Tensor | None, update_w2: Tensor, update_b2: Tensor | None,
    norm_scale: Tensor, norm_bias: Tensor, tau: Tensor, phase: Tensor,
) -> Tensor:  # fmt: skip
    weights, update = (w1, b1, w2, b2), (update_w1, update_b1, update_w2, update_b2)
    launch = config("decode", q.shape[-1], tau.shape[1], w1.dtype)
    tau, norm_scale, norm_bias = _small(tau, norm_scale, norm_bias)
    with _on(q):
        q, k, v = _rows(q, k, v)
        return decode(q, k, v, eta, weights, update, norm_scale, norm_bias, tau, phase.contiguous(), launch)


@_decode.register_fake
def _(q, k, v, eta, w1, b1, w2, b2, uw1, ub1, uw2, ub2, norm_scale, norm_bias, tau, phase):  # type: ignore[no-untyped-def]
    return torch.empty_like(_rows(q)[0])


def _launch(kernel: str, q: Tensor, cu_seqlens: Tensor | None, b: int) -> Config:
    batch, length, heads, d = q.shape
    count = sequences(q, cu_seqlens)
    chunks = batch * length // (b * max(count, 1))
    return config(kernel, d, b, q.dtype, count * heads // multiprocessors(q.device), chunks)


def _rows(*tensors: Tensor) -> list[Any]:
    """The tensors with unit last stride, copied only where it is another."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def _small(*tensors: Tensor | None) -> list[Any]:
    """Parameters that are copied rather than read through strides."""
    return [None if x is None else x.contiguous() for x in tensors]


def _bounds(cu_seqlens: Tensor | None, q: Tensor) -> Tensor | None:
    return None if cu_seqlens is None else cu_seqlens.to(q.device).contiguous()


def _present(tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    return tuple(None if x is None or not x.numel() else x for x in tensors)


def _on(q: Tensor) -> AbstractContextManager:
    """Triton launches on the current device, whatever the tensors are on."""
    return torch.cuda.device(q.device) if q.is_cuda else nullcontext()


def _refuse(wrong: bool, message: str) -> None:
    if wrong:
        raise MetaTTTError(message)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    scale: Tensor,
    bias: Tensor,
    tau: Tensor | None,
    b: int,
    cu_seqlens: Tensor | None,
) -> None:
    _refuse(q.dim() != 4, f"q has the shape {list(q.shape)}: expected [B, T, H, d]")
    _check_common(q, k, v, eta, scale, bias)
    _refuse(b not in SIZES, f"mini_batch_size={b} is not among {SIZES}: choose one, or form=dual")
    if tau is not None:
        _check_tau(tau, q.shape[2], b)
    if cu_seqlens is not None:
        wrong = cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point()
        _refuse(wrong, f"cu_seqlens has the shape {list(cu_seqlens.shape)}, {cu_seqlens.dtype}: expected [N + 1], int")
        _refuse(
            q.shape[0] != 1, f"cu_seqlens with a batch of {q.shape[0]} rows: pack all documents into one row, B = 1"
        )


def _check_token(
    q: Tensor, k: Tensor, v: Tensor, eta: Tensor, scale: Tensor, bias: Tensor, tau: Tensor, phase: Tensor
) -> None:
    _refuse(q.dim() != 3, f"q has the shape {list(q.shape)}: expected [B, H, d]")
    _check_common(q, k, v, eta, scale, bias)
    _check_tau(tau, q.shape[1], tau.shape[-1])
    wrong = phase.shape != q.shape[:1] or phase.is_floating_point()
    _refuse(wrong, f"phase has the shape {list(phase.shape)}, {phase.dtype}: expected [{q.shape[0]}], int")


def _check_common(q: Tensor, k: Tensor, v: Tensor, eta: Tensor, scale: Tensor, bias: Tensor) -> None:
    for name, x in (("k", k), ("v", v)):
        same = x.shape == q.shape and x.dtype == q.dtype
        _refuse(not same, f"{name} is {list(x.shape)}, {x.dtype}; q is {list(q.shape)}, {q.dtype}: expected the same")
    _refuse(q.dtype not in OPERANDS, f"q has the type {q.dtype}: expected bfloat16, float16 or float32")
    _refuse(
        q.shape[-1] not in WIDTHS,
        f"head width d={q.shape[-1]} is not a multiple of 16 from 32 to 128: choose another, or form=dual",
    )
    _refuse(eta.shape != q.shape[:-1], f"eta has the shape {list(eta.shape)}: expected {list(q.shape[:-1])}")
    for name, x in (("norm_scale", scale), ("norm_bias", bias)):
        _refuse(
            x.shape != q.shape[-2:], f"{name} has the shape {list(x.shape)}: expected [H, d] = {list(q.shape[-2:])}"
        )
    _refuse(not (q.is_cuda or INTERPRETED), f"q is on {q.device}: the kernels run on cuda; elsewhere choose form=dual")


def _check_tau(tau: Tensor, heads: int, b: int) -> None:
    wrong = tau.dim() != 2 or tau.shape[0] not in (1, heads) or tau.shape[1] != b or tau.dtype != torch.float32
    _refuse(wrong, f"tau has the shape {list(tau.shape)}, {tau.dtype}: expected [1 or {heads}, {b}], float32")


def _check_weights(weights: Weights, q: Tensor, leading: Sequence[int], name: str) -> None:
    _refuse(len(weights) != 4, f"{name} has {len(weights)} entries: expected (w1, b1, w2, b2)")
    _refuse(
        (weights[1] is None) != (weights[3] is None), f"{name}: one of b1 and b2 is None: give both biases, or neither"
    )
    heads, d = q.shape[-2:]
    for part, w, shape in zip(("w1", "b1", "w2", "b2"), weights, ((d, 4 * d), (4 * d,), (4 * d, d), (d,)), strict=True):
        expected = (*leading, heads, *shape)
        _refuse(w is not None and w.shape != expected, f"{part} of {name} has the shape {list(w.shape) if w is not None else None}: "
                f"expected {list(expected)}")  # fmt: skip
