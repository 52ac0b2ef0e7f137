"""How a layer calls the Triton operations: what they take, and the way from `[B, H, T, d]` to their `[B, T, H, d]`."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from metattt.inner.tokens import MiniBatches, Scan
from metattt.kernels.base import Kernel
from metattt.kernels.triton.device import OPERANDS, SIZES, WIDTHS, shared_memory
from metattt.state import Tensors


class OnGPU(Kernel):
    """A Triton operation that is registered with `torch.library`, derivatives and shapes included."""

    device = "cuda"
    traceable = True

    @abstractmethod
    def operation(
        self, q: Tensor, k: Tensor, v: Tensor, eta: Tensor, given: MiniBatches
    ) -> tuple[Tensor, list[Tensor]]:
        """Predictions `[B, T, H, d]` for tokens of that layout, and the final weights in the order of
        `given.weights`."""

    def shared_bytes(self, width: int, size: int, dtype: torch.dtype) -> int:
        """Most bytes of shared memory that a program of the launches for these shapes takes, forward or backward.

        Compared with the device's limit in `reason_rejected`; 0 where no launch comes near one.

        Args:
            width: d, features of a head.
            size: b, tokens of a mini-batch.
            dtype: type of the operands of products.
        """
        return 0

    def reason_rejected(self, given: MiniBatches) -> str | None:
        tokens = given.tokens
        width = tokens.views.k.shape[-1]
        if any(gate is not None for gate in tokens.gates[1:]):
            return "gates other than the step size"
        if given.matmul_dtype not in OPERANDS or tokens.gates.eta.dtype != torch.float32:
            return f"operands of {str(given.matmul_dtype).removeprefix('torch.')}"
        if width not in WIDTHS or tokens.views.v.shape[-1] != width:
            return f"head width {width}, not one of {', '.join(map(str, WIDTHS))}"
        if given.size not in SIZES:
            return f"optimizer.mini_batch_size={given.size}, not one of {', '.join(map(str, SIZES))}"
        needed, room = self.shared_bytes(width, given.size, given.matmul_dtype), shared_memory(tokens.views.k.device)
        if needed > room:
            return (
                f"{needed:,} bytes of shared memory for head width {width}, optimizer.mini_batch_size={given.size} in "
                f"{str(given.matmul_dtype).removeprefix('torch.')}, where the device has {room:,}"
            )
        return None

    def scan(self, given: MiniBatches, reference: Scan) -> tuple[Tensor, Tensors]:
        q, k, v = (x.to(given.matmul_dtype).transpose(1, 2) for x in (given.tokens.views.q, given.tokens.views.k, given.tokens.views.v))
        y, weights = self.operation(q, k, v, given.tokens.gates.eta.transpose(1, 2), given)
        return y.transpose(1, 2).to(given.tokens.gates.eta.dtype), dict(zip(given.weights, weights, strict=True))
