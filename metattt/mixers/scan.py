"""What Mamba and Longhorn share: their block, and the element-wise scan `h_t = a_t ∘ h_{t−1} + b_t`."""

from __future__ import annotations

import math
from abc import abstractmethod
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metattt.mixers.base import Mixer
from metattt.mixers.chunks import by_chunks
from metattt.modules import convolution, exact
from metattt.setting import setting
from metattt.state import Context, Tensors


class ScanBlock(Mixer):
    """A gated block of E = expand D channels that remember N numbers each, with decays and writes of the token.

    Decays and writes are made for one chunk at a time. Nothing is divided by a decay, and no logarithm is taken of one:
    decays of 0 and 1 are exact.

    Args:
        expand: channels of the recurrence over D.
        d_state: N, numbers a channel remembers, the width of keys.
        conv_width: taps of the convolution (tokens).
        dt_rank: R, rank of the projection to the steps; None is ⌈D/16⌉.
    """

    steps: str  #: name of the linear map from R numbers of a token to its step in every channel, before `positive`
    expand: int = setting(default=2)
    d_state: int = setting(default=16)
    conv_width: int = setting(default=4)
    dt_rank: int | None = setting(default=None)

    def create_modules(self) -> None:
        dim, d_state = self.dim, self.d_state
        width, rank = self.expand * dim, self.dt_rank or math.ceil(dim / 16)
        self.width, self.rank = width, rank
        self.in_proj = nn.Linear(dim, 2 * width, bias=False)
        self.conv1d = convolution(width, self.conv_width)
        self.x_proj = nn.Linear(width, rank + 2 * d_state, bias=False)
        self.create_recurrence()
        self.D = nn.Parameter(torch.ones(width))
        self.out_proj = nn.Linear(width, dim, bias=False)

    @abstractmethod
    def create_recurrence(self) -> None:
        """Creates the map `steps`, and the parameters of the decays."""

    @staticmethod
    def positive(step: Tensor) -> Tensor:
        """Makes a step above 0 of any number."""
        return F.softplus(step)

    @staticmethod
    @abstractmethod
    def gates(step: Tensor, v: Tensor, k: Tensor, *rates: Tensor) -> tuple[Tensor, Tensor]:
        """Decays a from 0 to 1 and writes b `[..., E, N]`, from steps and inputs `[..., E]` and keys `[..., N]`."""

    def rates(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """What `gates` takes besides, for all tokens."""
        return ()

    @property
    def carried(self) -> dict[str, tuple[int, ...]]:
        """The convolution's tail `[conv_width − 1, E]`, and h `[E, N]`."""
        return {"conv": (self.conv1d.weight.shape[-1] - 1, self.width), "memory": (self.width, self.d_state)}

    def mix(self, x: Tensor, memory: Tensors, ctx: Context) -> tuple[Tensor, Tensors]:
        """See `Mixer.mix`; the recurrence is computed in fp32 or wider."""
        v, z = self.in_proj(x).chunk(2, dim=-1)
        v, tail = self.conv1d(v, memory.get("conv"), ctx)
        v = F.silu(v)
        low, k, q = self.x_proj(v).split([self.rank, self.d_state, self.d_state], dim=-1)
        steps: Any = getattr(self, self.steps)
        hooks = steps._forward_hooks, steps._forward_pre_hooks, steps._backward_hooks, steps._backward_pre_hooks
        hooked = any(hooks) or "forward" in vars(steps)
        plain = type(steps) is nn.Linear and not hooked  # its bias is added in fp32; anything else is called
        step = F.linear(low, steps.weight) if plain else steps(low)
        accum_dtype = torch.promote_types(x.dtype, torch.float32)
        with exact(x.device.type):
            v, z, k, q, step = (one.to(accum_dtype) for one in (v, z, k, q, step))
            step = self.positive(step + steps.bias.to(accum_dtype) if plain else step)
            if ctx.valid is not None:
                step = step * ctx.valid.unsqueeze(-1)  # a = 1, and nothing is written
            h = memory["memory"].to(accum_dtype) if memory else v.new_zeros(len(x), self.width, self.d_state)
            starts = () if ctx.first is None else (ctx.first,)
            chunk, tokens = partial(self._chunk, len(starts)), (q, step, v, k, *starts)
            y, h = by_chunks(chunk, h, tokens, self.rates(accum_dtype), self.chunk_size, self.group_size)
            y = (y + self.D.to(accum_dtype) * v) * F.silu(z)
        return self.out_proj(y.to(x.dtype)), {"conv": tail, "memory": h}

    def _chunk(
        self, starts: int, memory: Tensor, q: Tensor, step: Tensor, v: Tensor, k: Tensor, *given: Tensor
    ) -> tuple[Tensor, Tensor]:
        """y `[B, c, E]` and h `[B, E, N]` after c tokens; `given` are the starts of documents `[B, c]`, 0 or 1 of them,
        and the rates."""
        a, b = self.gates(*(x.transpose(0, 1) for x in (step, v, k)), *given[starts:])
        for first in given[:starts]:
            a = a.masked_fill(first.T[..., None, None], 0)
        few = a.device.type != "cpu" or torch.compiler.is_compiling()
        h, memory = (doubling if few else one_by_one)(a, b, memory)
        y = (h @ q.transpose(0, 1).unsqueeze(-1)).squeeze(-1)
        return y.transpose(0, 1), memory


def one_by_one(a: Tensor, b: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """h `[c, B, D, N]` of c tokens and the last of it, one after the other: fewest operations, for a CPU."""
    states = []
    for decay, write in zip(a.unbind(0), b.unbind(0), strict=True):
        memory = torch.addcmul(write, decay, memory)
        states.append(memory)
    return torch.stack(states), memory


def doubling(a: Tensor, b: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """The same in ⌈log₂ c⌉ rounds over all tokens (Hillis and Steele's scan): few launches, for other devices.

    After round j, `(a_t, b_t)` is the map of the last 2^j tokens up to t.
    """
    b = torch.cat([torch.addcmul(b[:1], a[:1], memory.unsqueeze(0)), b[1:]])
    reach = 1
    while reach < len(a):
        b = torch.cat([b[:reach], torch.addcmul(b[reach:], a[reach:], b[:-reach])])
        a = torch.cat([a[:reach], a[reach:] * a[:-reach]])
        reach *= 2
    return b, b[-1].clone()  # a state must not hold on to a whole chunk
