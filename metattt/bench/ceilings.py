"""What the device at hand can do at most, measured in the process that measures the rest."""

from __future__ import annotations

from typing import NamedTuple

import torch

from metattt.bench.timing import measure


class Ceilings(NamedTuple):
    """Of one device, for one type of operands."""

    operations: float  #: multiplications and additions per second in a product of two large matrices
    bytes: float  #: read per second in a product of a large matrix and a vector

    def share(self, seconds: float, operations: float, read: float = 0.0) -> float:
        """The least time for this many operations and bytes, over the time that was taken: 1 is as fast as can be
        (roofline)."""
        return max(operations / self.operations, read / self.bytes) / seconds


def ceilings(device: torch.device, dtype: torch.dtype, size: int | None = None, repeats: int = 40) -> Ceilings:
    """Measures both, the best of some calls.

    Args:
        device: where.
        dtype: of the operands.
        size: rows and columns of the matrices of the product; None takes 1,024 on the CPU and 8,192 elsewhere. The
            matrix that is read has 8 times as many rows.
        repeats: calls.
    """
    size = size or (1024 if device.type == "cpu" else 8192)
    square = torch.randn(size, size, device=device).to(dtype)
    tall, vector = torch.randn(8 * size, size, device=device).to(dtype), torch.randn(size, device=device).to(dtype)
    product = min(measure(lambda: square @ square) for _ in range(repeats))
    reading = min(measure(lambda: tall @ vector) for _ in range(repeats))
    return Ceilings(2 * size**3 / product, tall.nbytes / reading)
