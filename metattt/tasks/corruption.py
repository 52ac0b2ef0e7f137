"""Noise that depends only on (seed, sequence, position), so that splitting a sequence does not change it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_BITS = 0xFFFFFFFF


def _hash(x: Tensor) -> Tensor:
    """A 32-bit integer hash on int64 tensors (multiply-xorshift)."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & _BITS
    x = (x ^ (x >> 15)) * 0x846CA68B & _BITS
    return x ^ (x >> 16)


def uniform(seed: Tensor, positions: Tensor, num_heads: int, width: int, stream: int = 0) -> Tensor:
    """Numbers in (0, 1), `[B, H, T, width]`, from `seed` `[B]` and `positions` `[B, T]`. Streams are independent of
    each other."""
    per_token = _hash((seed.unsqueeze(1) & _BITS) ^ _hash((positions + (stream << 24)) & _BITS))
    channel = _hash(torch.arange(num_heads * width, device=positions.device)).view(1, num_heads, 1, width)
    return (_hash(per_token[:, None, :, None] ^ channel).double() + 0.5) / 2**32


def normal(seed: Tensor, positions: Tensor, num_heads: int, width: int) -> Tensor:
    """Standard normal numbers `[B, H, T, width]` (Box–Muller)."""
    radius = torch.sqrt(-2 * torch.log(uniform(seed, positions, num_heads, width, stream=1)))
    return radius * torch.cos(2 * math.pi * uniform(seed, positions, num_heads, width, stream=2))
