"""Small torch modules and functions that parts of every kind share."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from metattt.state import Context
from metattt.torch_private import FakeTensor, fake_mode, for_torch, interpreter_stack, outside_transforms

NORMALIZE_EPS = 1e-12  # of `F.normalize`
SMALLEST_STEP = 1e-4  # of the initial Δ of state space models


def projection(dim: int, width: int, bias: bool) -> nn.Linear:
    """A linear map with weights N(0, 0.02²) and zero bias, as in the published models."""
    linear = nn.Linear(dim, width, bias=bias)
    nn.init.normal_(linear.weight, std=0.02)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear


def draw_xavier(*modules: nn.Module | None) -> None:
    """Initialises the weights of all linear maps in modules as Glorot and Bengio do."""
    for linear in nn.ModuleList(filter(None, modules)).modules():
        if isinstance(linear, nn.Linear):
            nn.init.xavier_uniform_(linear.weight)


def standardize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Zero mean and unit (biased) variance over the last axis.

    Composed from elementary operations: the native LayerNorm has wrong derivatives from the third order on.
    """
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)


def rms_norm(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """`norm(x)`, computed in the type of its scale, to which autocast does not bring a narrower `x`."""
    return norm(x.to(norm.weight.dtype)).to(x.dtype)


def expand_like(factor: Tensor, like: Tensor) -> Tensor:
    """`[B]` or `[B, H]` with trailing axes, to broadcast against `[B, H, *shape]`."""
    return factor[(...,) + (None,) * (like.ndim - factor.ndim)]


def rounds(device: str) -> bool:
    """Whether autocast is on for a type of device."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def product_type(x: Tensor) -> torch.dtype:
    """Type to which operands of products with `x` are rounded: that of autocast, where it is on."""
    device = x.device.type  # (not `rounds`: torch 2.11 cannot trace that)
    on = x.dtype == torch.float32 and device != "meta" and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on else x.dtype


def exact(device: str) -> AbstractContextManager[object]:
    """A context without autocast. (One that is off already costs as much as an operation on a token, so nothing is
    entered then.)"""
    if torch.compiler.is_compiling():  # asked first: torch 2.11 cannot trace what follows
        return torch.autocast(device, enabled=False)
    is_on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if is_on else nullcontext()


def made_once(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Caches the result of a function of plain values, computed outside of inference mode and of all `torch.func`
    transforms so that later calls can be differentiated."""

    @cache
    def kept(*values: Any) -> Tensor:
        with torch.inference_mode(False), outside_transforms():
            return function(*values)

    return kept


def affine(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`θ x + c` in fp32 or wider: `[..., T, D]`, `[..., n, D]` and `[n]` (None: c = 0) to `[..., T, n]`."""
    accum_dtype = torch.promote_types(x.dtype, torch.float32)
    with exact(x.device.type):
        y = x.to(accum_dtype) @ weight.to(accum_dtype).mT
        return y if bias is None else y + bias.to(accum_dtype)


class CausalConv(nn.Module):
    """`y_t = b + Σ_j w_j x_{t−width+1+j}` per channel, zeros before the start of a document.

    Args:
        dim: channels D.
        width: taps (tokens).
        bias: b; without it b = 0.
    """

    def __init__(self, dim: int, width: int = 4, bias: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, 1, width))
        self.bias = nn.Parameter(torch.zeros(dim)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Truncated LeCun normal, zero bias, as in the published TTT models."""
        std = 1 / math.sqrt(self.weight.shape[-1])
        nn.init.trunc_normal_(self.weight, std=std, a=-2 * std, b=2 * std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, tail: Tensor | None, ctx: Context) -> tuple[Tensor, Tensor]:
        """`x` `[B, T, D]` and the last `width − 1` inputs `tail` `[B, width−1, D]` (None = zeros) to `y` and the new
        tail."""
        padded = self.pad(x, tail)
        return self.convolve(padded, ctx), document_tail(padded, self.weight.shape[-1] - 1, ctx)

    def pad(self, x: Tensor, tail: Tensor | None) -> Tensor:
        """`x` after its tail, `[B, width − 1 + T, D]`: for convolutions of the same width that read the same tokens."""
        if tail is None:
            tail = x.new_zeros(x.shape[0], self.weight.shape[-1] - 1, x.shape[2])
        return torch.cat([tail.to(x.dtype), x], dim=1)

    def convolve(self, padded: Tensor, ctx: Context) -> Tensor:
        """y `[B, T, D]` from what `pad` returns."""
        width, weight = self.weight.shape[-1], self.weight
        plain = not torch.compiler.is_compiling()
        if ctx.first is None and plain:
            if padded.device.type != "cpu":
                return F.conv1d(padded.mT, weight, self.bias, groups=padded.shape[2]).mT
            wide = padded.dtype == weight.dtype in (torch.float32, torch.float64)
            wide = wide and not torch.is_autocast_enabled("cpu")
            if wide and padded.shape[1] == width:
                # one token: a convolution costs five times as much
                y = (padded * weight[:, 0].T).sum(1, keepdim=True)
                return y if self.bias is None else y + self.bias
            if wide and torch.is_grad_enabled() and forward_ad._current_level < 0 and interpreter_stack() is None:
                return _Depthwise.apply(padded, weight, self.bias)
            # As an image of height 1 with its channels last, which is how it lies in memory: nothing is transposed.
            image = padded.mT.unsqueeze(2)
            return F.conv2d(image, weight.unsqueeze(2), self.bias, groups=padded.shape[2]).squeeze(2).mT
        same = None
        if ctx.first is not None:  # documents do not see each other
            document = F.pad(ctx.first.cumsum(1), (width - 1, 0)).unfold(1, width, 1)
            same = (document == document[..., -1:]).unsqueeze(-1)
            if plain and padded.device.type == "cpu":
                row, token = (~same[:, :, 0, 0]).nonzero(as_tuple=True)  # what sees two documents is computed once more
                taps = token.unsqueeze(1) + torch.arange(width, device=token.device)
                seen = padded[row.unsqueeze(1), taps].where(same[row, token], 0)
                alone = ctx._replace(first=None)
                y = self.convolve(padded, alone)
                return y.index_put((row, token), self.convolve(seen, alone).squeeze(1))
        # Tap by tap. Inductor makes one loop of it, for all lengths; it compiles the derivative of a convolution for
        # every length again.
        padded = padded.to(product_type(padded))
        length = padded.shape[1] - width + 1
        y = padded.new_zeros(()) if self.bias is None else self.bias.to(padded.dtype)
        for tap in range(width):
            seen = padded[:, tap : tap + length]
            seen = seen if same is None else seen.where(same[:, :, tap], 0)
            y = y + seen * weight[:, 0, tap].to(padded.dtype)
        return y

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, width={self.weight.shape[-1]}"


class _Depthwise(torch.autograd.Function):
    """The convolution on a CPU, with a derivative of two convolutions: torch's own takes six times as long."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(padded, weight)
        ctx.set_materialize_grads(False)
        return F.conv2d(padded.mT.unsqueeze(2), weight.unsqueeze(2), bias, groups=len(weight)).squeeze(2).mT

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return None, None, None
        padded, weight = ctx.saved_tensors
        width = weight.shape[-1]
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        dx = dweight = None
        if needs_x:
            image, taps = dy.mT.unsqueeze(2), weight.flip(-1).unsqueeze(2)
            dx = F.conv2d(image, taps, padding=(0, width - 1), groups=len(weight)).squeeze(2).mT
        if needs_weight:
            dweight = _products(padded, dy, width).T.unsqueeze(1)
        return dx, dweight, dy.sum((0, 1)) if needs_bias else None


def _products(padded: Tensor, dy: Tensor, width: int) -> Tensor:
    """`Σ_t x_{t+tap} dy_t`, `[width, D]`, of `padded` `[B, width − 1 + T, D]` and `dy` `[B, T, D]`.

    Some tokens at a time, for all taps: what lies in the cache is read as often as there are taps, memory once.
    """
    batch, length, dim = dy.shape
    if for_torch(dy):
        return torch.stack([(padded[:, tap : tap + length] * dy).sum((0, 1)) for tap in range(width)])
    padded = padded.contiguous()
    stride = padded.stride(1)
    seen = padded.as_strided((batch, width, length, dim), (padded.stride(0), stride, stride, 1))
    held = padded.new_zeros(width, min(32, length), dim)
    for row, tokens in zip(seen, dy, strict=True):
        for x, y in zip(row.split(32, 1), tokens.split(32), strict=True):
            held[:, : len(y)].addcmul_(x, y)
    return held.sum(1)


def length(x: Tensor, dim: int | tuple[int, ...] = -1, least: float = 0.0) -> Tensor:
    """`max(‖x‖, least)` over axes that are kept. Of zeros (padding), the second derivative of torch's norm is NaN."""
    small = torch.linalg.vector_norm(x.detach(), dim=dim, keepdim=True) <= least
    return torch.linalg.vector_norm(x.masked_fill(small, 1), dim=dim, keepdim=True).masked_fill(small, least)


class _Scaled(torch.autograd.Function):
    """`x / max(‖x‖, ε)`; with `eps`, `x / √(mean(x²) + eps)`. The derivative takes a third of torch's passes over
    memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float | None) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        if eps is None:
            length.clamp_min_(NORMALIZE_EPS)
        else:
            length.square_().div_(x.shape[-1]).add_(eps).sqrt_()
        ctx.save_for_backward(x, length)
        ctx.set_materialize_grads(False)
        ctx.eps = eps
        return x / length

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, None]:
        if dy is None:
            return None, None
        x, size = ctx.saved_tensors
        if torch.is_grad_enabled():
            y = x / length(x, least=NORMALIZE_EPS) if ctx.eps is None else F.rms_norm(x, x.shape[-1:], eps=ctx.eps)
            return torch.autograd.grad(y, x, dy, create_graph=True)[0], None
        share = (size > NORMALIZE_EPS) if ctx.eps is None else 1 / x.shape[-1]
        along = torch.linalg.vecdot(x, dy).unsqueeze(-1) * share / size.square()
        return torch.addcmul(dy, x, along, value=-1).div_(size), None


def normalize(x: Tensor, eps: float | None = None) -> Tensor:
    """`F.normalize(x, dim=-1)`; with `eps`, `F.rms_norm` over the last axis."""
    plain = torch.is_grad_enabled() and x.dtype in (torch.float32, torch.float64) and x.device.type != "meta"
    plain = plain and not torch.compiler.is_compiling() and not torch.is_autocast_enabled(x.device.type)
    if plain and forward_ad._current_level < 0 and interpreter_stack() is None:
        return _Scaled.apply(x, eps)
    least = max(NORMALIZE_EPS, torch.finfo(x.dtype).tiny)  # in fp16 torch's ε is 0: zeros, as of padding, would be NaN
    if eps is None and torch.is_grad_enabled():
        return x / length(x, least=least)
    return F.normalize(x, dim=-1, eps=least) if eps is None else F.rms_norm(x, x.shape[-1:], eps=eps)


class RMSNorm(nn.RMSNorm):
    """torch's over the last axis, whose derivative has a kernel on a GPU, and takes many passes over memory on a
    CPU."""

    def forward(self, x: Tensor) -> Tensor:
        passes = torch.is_grad_enabled() and x.device.type == "cpu" and x.dtype == self.weight.dtype
        return normalize(x, self.eps) * self.weight if passes else super().forward(x)


def convolution(dim: int, width: int, bias: bool = True) -> CausalConv:
    """A convolution with weights and bias U(−1/√width, 1/√width), as torch's own begin: in state space models, and
    without bias for q, k and v in the published delta rules."""
    conv, bound = CausalConv(dim, width, bias), 1 / math.sqrt(width)
    for parameter in conv.parameters():
        nn.init.uniform_(parameter, -bound, bound)
    return conv


def step_bias(count: int, least: float, most: float) -> Tensor:
    """Biases `[count]` with softplus(bias) log-uniform in `least` to `most` (arXiv 2312.00752, Sec. 3.6)."""
    low, high = math.log(least), math.log(most)
    step = (low + torch.rand(count) * (high - low)).exp().clamp(min=SMALLEST_STEP)
    return step + (-torch.expm1(-step)).log()


def document_tail(padded: Tensor, size: int, ctx: Context) -> Tensor:
    """The last `size` real rows of `padded` `[B, size + T, D]` that are of the last document, zeros for others; the
    first `size` rows are the previous tail."""
    if ctx.first is not None:
        document = F.pad(ctx.first.cumsum(1), (size, 0))
        last = document.gather(1, (ctx.lengths + size - 1).clamp(min=0).unsqueeze(1))
        padded = padded * (document == last).unsqueeze(-1)
    if ctx.valid is None:
        tail = padded[:, padded.shape[1] - size :]
        return tail if padded.shape[1] <= 4 * size else tail.clone()  # a state must not hold on to a long sequence
    rows = ctx.lengths.unsqueeze(1) + torch.arange(size, device=padded.device)
    return padded.gather(1, rows.unsqueeze(-1).expand(-1, -1, padded.shape[2]))


def rotary_table(positions: Tensor, width: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[B, 1, T, width/2]` of the rotary encoding (RoFormer, Eq. 15), computed in fp32 or wider."""
    accum_dtype = torch.promote_types(dtype, torch.float32)
    plain = type(positions) is Tensor and positions.device.type == "cpu" and not torch.compiler.is_compiling()
    frequency = (_known_frequencies if plain else _frequencies)(width, theta, positions.device, accum_dtype)
    angle = positions[:, None, :, None].to(accum_dtype) * frequency
    return angle.cos(), angle.sin()


def _frequencies(width: int, theta: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    return theta ** (-torch.arange(0, width, 2, device=device, dtype=dtype) / width)


_known_frequencies = made_once(_frequencies)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (2i, 2i+1) of `x` `[B, H, T, d]`; features keep their order."""
    if torch.compiler.is_compiling():  # which makes one loop of it
        even, odd = x.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x.dtype)
    turns, transformed = torch.complex(cos, sin), forward_ad._current_level >= 0 or interpreter_stack() is not None
    return _turned(x, turns) if transformed or not torch.is_grad_enabled() else _Rotate.apply(x, turns)


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    """One product of complex numbers: the same result in a sixth of the time."""
    pairs = x.to(turns.real.dtype).view(*x.shape[:-1], x.shape[-1] // 2, 2)  # (no unflatten in a batch of cotangents)
    try:
        numbers = torch.view_as_complex(pairs)
    except RuntimeError:  # pairs at odd places in memory
        numbers = torch.view_as_complex(pairs.contiguous())
    return torch.view_as_real(numbers * turns).reshape(x.shape).to(x.dtype)


class _Rotate(torch.autograd.Function):
    """`_turned`, whose own derivative would copy what is turned back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, turns: Tensor) -> Tensor:
        ctx.save_for_backward(turns)
        ctx.set_materialize_grads(False)
        return _turned(x, turns)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, None]:
        (turns,) = ctx.saved_tensors
        return (None if dy is None else _Rotate.apply(dy, turns.conj().resolve_conj())), None


def transformed() -> bool:
    """Whether a transform is running: vmap, grad or jvp of `torch.func`, a level of `torch.autograd.forward_ad`, or a
    mode in which tensors have no numbers."""
    return forward_ad._current_level >= 0 or interpreter_stack() is not None or fake_mode() is not None


def stands_for_others(x: Tensor) -> bool:
    """Whether the numbers of `x` are elsewhere: in tensors that it wraps (DTensor), or nowhere (FakeTensor)."""
    return isinstance(x, FakeTensor) or hasattr(x, "__tensor_flatten__")


RECORDING: ContextVar[int] = ContextVar("recording", default=0)
"""The number of tokens for which the operations of one are being recorded (`metattt.generation.recorder`), else 0: no
value may be read back from a tensor then, and a kernel must be an operator of torch."""
TRACED = 512  #: tokens for which inner gradients are traced as well: that takes the time of 50 to 170


def needs_probes() -> bool:
    """Whether gradients inside the forward pass must be taken by `torch.func`.

    `torch.func.vjp` does not run under saved-tensor hooks (any non-reentrant checkpoint, also a user's own), and
    `torch.autograd.grad` does not run under compile, inside functorch transforms or in inference mode. So each is used
    where the other fails.
    """
    return torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or transformed()


def for_probes() -> AbstractContextManager[object]:
    """A context around `torch.func.vjp` and its result: in inference mode, the derivatives of torch 2.11 are zeros."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return nullcontext()
    outside = ExitStack()
    outside.enter_context(torch.inference_mode(False))
    outside.enter_context(torch.no_grad())
    return outside
