"""TTT-Linear's and TTT-MLP's inner operation alone, views and step sizes to predictions, with kernels and without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor

from metattt.inner.by_kernel import scan
from metattt.inner.loop import InnerLoop
from metattt.inner.plan import Plan
from metattt.inner.tokens import Block, Tokens
from metattt.layer import TTTLayer
from metattt.learners.linear import Linear
from metattt.learners.mlp import MLP
from metattt.optimizers.base import Gates
from metattt.optimizers.gradient_descent import GradientDescent
from metattt.tasks.base import Views
from metattt.tasks.reconstruction import Reconstruction

LEARNERS = {"linear": Linear, "mlp": MLP}


class Operation:
    """The same tensors for every way of computing them.

    Args:
        learner: of `LEARNERS`.
        batch, length, num_heads, head_dim, size: B, T (a multiple of b), H, d and b.
        device, dtype: of the views; weights and step sizes are fp32.
    """

    def __init__(
        self, learner: str, batch: int, length: int, num_heads: int, head_dim: int, size: int, device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        parts = (Reconstruction(), LEARNERS[learner](), GradientDescent(size, token_steps="shared"))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layer = TTTLayer(num_heads * head_dim, num_heads, *parts, form="auto").to(device)

        def tokens(scale: float = 1.0) -> Tensor:
            x = torch.randn(batch, length, num_heads, head_dim, generator=generator) * scale
            return x.transpose(1, 2).to(device, dtype).requires_grad_()  # in memory as the projections write them

        k, v, q = tokens(head_dim**-0.5), tokens(), tokens(head_dim**-0.5)
        scale = (1.0 if learner == "linear" else 0.1) / head_dim
        eta = torch.rand(batch, num_heads, length, generator=generator) * scale
        self.tokens = Tokens(Views(k, v, q), Gates(eta.to(device).requires_grad_()))
        self.cotangent = torch.randn(q.shape, generator=generator).to(device)
        self.blocks = [Block(size, 0, True, size)] * (length // size)

    @property
    def dual(self) -> Plan:
        """The generic form, without kernels."""
        return replace(self.layer.plan, kernels=[], strict=False)

    def double(self) -> Operation:
        """The same values in float64."""
        other = deepcopy(self)
        other.layer, other.cotangent = other.layer.double(), other.cotangent.double()
        other.tokens = self.tokens.map(lambda x: x.detach().double().requires_grad_())
        return other

    def run(self, plan: Plan) -> Tensor:
        """Predictions `[B, H, T, d]`. Without kernels everything is kept for the backward pass."""
        group = None if plan.kernels else 0
        loop = InnerLoop(self.layer.task, self.layer.learner, self.layer.optimizer, plan, group, self.tokens.views.k.dtype)
        batch, dtype = len(self.tokens.views.k), self.tokens.gates.eta.dtype
        return scan(loop, self.tokens, loop.start(batch, dtype), self.blocks, False, True)[0]

    @property
    def leaves(self) -> dict[str, Tensor]:
        """All views, step sizes, W0, norms and token steps."""
        parts = (("learner", self.layer.learner), ("optimizer", self.layer.optimizer))
        inner = {f"{name}.{key}": x for name, part in parts for key, x in part.named_parameters()}
        tokens = {"k": self.tokens.views.k, "v": self.tokens.views.v, "q": self.tokens.views.q, "eta": self.tokens.gates.eta}
        return tokens | {name: x for name, x in inner.items() if not name.startswith("optimizer.lr_")}  # θ_lr: unused

    def training(self, call: Callable[[], Tensor]) -> Sequence[Tensor]:
        """Outputs, and the gradients of all `leaves`, in order."""
        y = call()
        return [y.detach(), *torch.autograd.grad(y, list(self.leaves.values()), self.cotangent.to(y.dtype))]
