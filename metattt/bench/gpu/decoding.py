"""Random states and tokens of the decoding steps, and their result in another way."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from metattt.bench.gpu.problems import relative


class Decoding:
    """One token for each of several sequences at different places of their mini-batches; the state is updated in
    place."""

    def __init__(self, operation: str, batch: int, heads: int, width: int, size: int, dtype: torch.dtype, device: str):
        generator = torch.Generator(device).manual_seed(0)
        self.operation, self.size = operation, size

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device) * scale

        self.q, self.k, self.v = (normal(batch, heads, width, scale=0.5).to(dtype) for _ in range(3))
        self.eta = torch.rand(batch, heads, generator=generator, device=device) / width
        hidden = width if operation == "ttt_linear" else 4 * width
        shapes: list[tuple[int, ...]] = [(width, hidden), (hidden,)]
        shapes += [] if operation == "ttt_linear" else [(hidden, width), (width,)]
        self.weights = [normal(batch, heads, *shape, scale=0.02) for shape in shapes]
        self.updates = [normal(batch, heads, *shape, scale=0.02) for shape in shapes]
        self.norm = [normal(heads, width, scale=0.1) + 1, normal(heads, width, scale=0.1)]
        self.tau = (1 / torch.arange(1, size + 1, device=device)).unsqueeze(0)
        self.phase = torch.arange(batch, device=device) % size

    @property
    def state_bytes(self) -> int:
        return sum(x.nbytes for x in (*self.weights, *self.updates))

    @property
    def bytes_moved(self) -> float:
        """W is read, the update read and written, and W written where a mini-batch ends; one token's views besides."""
        share = (self.phase == self.size - 1).float().mean().item()
        weights = sum(x.nbytes for x in self.weights)
        return weights * (3 + share) + sum(x.nbytes for x in (self.q, self.k, self.v, self.q, self.eta))

    def step(self) -> Tensor:
        module = importlib.import_module(f"metattt.kernels.{self.operation}.op")
        decode = getattr(module, f"{self.operation}_decode")
        state = [*self.weights, *self.updates]
        o: Tensor = decode(self.q, self.k, self.v, self.eta, *state, *self.norm, tau=self.tau, phase=self.phase)
        return o

    def error(self) -> float:
        """Outputs and state after one step against the equations in float64."""
        weights, updates = ([x.double() for x in state] for state in (self.weights, self.updates))
        expected, after, moved = reference_decode(
            self.operation, self.q.double(), self.k.double(), self.v.double(), self.eta.double(), weights, updates,
            [x.double() for x in self.norm], self.tau.double(), self.phase,
        )  # fmt: skip
        o = self.step()
        pairs = [(o, expected), *zip(self.weights, after, strict=True), *zip(self.updates, moved, strict=True)]
        return max(relative(found, right) for found, right in pairs)


def reference_decode(
    operation: str, q: Tensor, k: Tensor, v: Tensor, eta: Tensor, weights: list[Tensor], updates: list[Tensor], norm: list[Tensor],
    tau: Tensor, phase: Tensor,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:  # fmt: skip
    """One token by differentiating the loss: outputs, weights and updates."""
    scale, shift = norm

    def predict(x: Tensor, w: Sequence[Tensor]) -> Tensor:
        z = x
        for i in range(0, len(w), 2):
            z = torch.einsum("bhi,bhij->bhj", z, w[i]) + w[i + 1]
            z = F.gelu(z, approximate="tanh") if i + 2 < len(w) else z
        return x + scale * F.layer_norm(z, z.shape[-1:], eps=1e-6) + shift

    with torch.enable_grad():
        leaves = [w.detach().requires_grad_() for w in weights]
        gradients = torch.autograd.grad(0.5 * (predict(k, leaves) - v).square().sum(), leaves)

    def spread_(x: Tensor, like: Tensor) -> Tensor:
        return x.view(*x.shape, *(1,) * (like.ndim - x.ndim))

    moved = [m - spread_(eta, g) * g for m, g in zip(updates, gradients, strict=True)]
    steps = tau[0][phase]
    at = [w + spread_(steps, w) * m for w, m in zip(weights, moved, strict=True)]
    ends = phase == tau.shape[1] - 1
    after = [torch.where(spread_(ends, w), new, w) for new, w in zip(at, weights, strict=True)]
    return predict(q, at), after, [torch.where(spread_(ends, m), 0, m) for m in moved]
