"""Random inputs of the operations on sequences, and what a call of them must move and compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Problem:
    """Random inputs of one operation: leaves by name, and cotangents."""

    def __init__(self, leaves: dict[str, Tensor], options: dict[str, Any], cotangent: Tensor):
        self.leaves, self.options, self.cotangent = leaves, options, cotangent

    def to(self, dtype: torch.dtype) -> Problem:
        leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in self.leaves.items()}
        return Problem(leaves, dict(self.options), self.cotangent.to(dtype))

    def call(self, operation: Callable[..., tuple[Tensor, Any]]) -> tuple[Tensor, Any]:
        inputs = {name: x for name, x in self.leaves.items() if name != "tau"}
        return operation(*inputs.values(), tau=self.leaves["tau"], **self.options)

    def gradients(self, operation: Callable[..., tuple[Tensor, Any]]) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Outputs and the gradient of every leaf, by name; and the final state, if `options` ask for it."""
        o, state = self.call(operation)
        found = torch.autograd.grad(o, list(self.leaves.values()), self.cotangent.to(o.dtype))
        final = [x.detach() for x in state or () if x is not None]
        return {"o": o.detach(), **dict(zip(self.leaves, found, strict=True))}, final

    def step(self, operation: Callable[..., tuple[Tensor, Any]], backward: bool) -> object:
        """What is timed."""
        with torch.set_grad_enabled(backward):
            o, _ = self.call(operation)
            return torch.autograd.grad(o, list(self.leaves.values()), self.cotangent) if backward else o


def make(
    operation: str,
    batch: int,
    length: int,
    heads: int,
    width: int,
    size: int,
    dtype: torch.dtype,
    device: str,
    seed: int = 0,
) -> Problem:
    """Views as projections write them, `[B, T, H, d]`, and weights away from their initial values."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        return (torch.randn(*shape, generator=generator, device=device) * scale + shift).requires_grad_()

    def views(scale: float) -> Tensor:
        return normal(batch, length, heads, width, scale=scale).detach().to(dtype).requires_grad_()

    rate = (1.0 if operation == "ttt_linear" else 0.1) / width
    leaves = {"q": views(0.5), "k": views(0.5), "v": views(0.5)}
    leaves["eta"] = (torch.rand(batch, length, heads, generator=generator, device=device) * rate).requires_grad_()
    hidden = 4 * width
    if operation == "ttt_linear":
        leaves |= {"w": normal(heads, width, width, scale=0.02), "b": normal(heads, width, scale=0.02)}
    else:
        leaves |= {"w1": normal(heads, width, hidden, scale=0.02), "b1": normal(heads, hidden, scale=0.02)}
        leaves |= {"w2": normal(heads, hidden, width, scale=0.02), "b2": normal(heads, width, scale=0.02)}
    leaves |= {"norm_scale": normal(heads, width, scale=0.1, shift=1.0), "norm_bias": normal(heads, width, scale=0.1)}
    leaves["tau"] = (1 / torch.arange(1, size + 1, device=device)).unsqueeze(0).requires_grad_()
    cotangent = torch.randn(batch, length, heads, width, generator=generator, device=device).to(dtype)
    return Problem(leaves, {"mini_batch_size": size}, cotangent)


def relative(found: Tensor, expected: Tensor) -> float:
    """Relative Frobenius error; not a number if anything is not finite."""
    return ((found.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def work(operation: str, tokens: int, heads: int, d: int, b: int, backward: bool, itemsize: int) -> tuple[float, float]:
    """The fewest bytes that must move in a call of one of our operations, every input read and every output and gradient
    written once, and the operations of its products, 2 per multiplication and addition."""
    views = tokens * heads * d * itemsize
    moved = views * (4 + (7 if backward else 0)) + tokens * heads * 4 * (1 + 2 * backward)
    f = 4 * d
    if operation == "ttt_linear":
        count = 3 * d * d + 2 * b * d + (9 * d * d + 6 * b * d if backward else 0)
    else:
        count = 7 * d * f + 2 * b * (d + f) + (21 * d * f + 6 * b * (d + f) if backward else 0)
    return float(moved), 2.0 * count * tokens * heads
