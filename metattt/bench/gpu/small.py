"""One small case of an operation, forward, backward and decoding: `python -m metattt.bench.gpu.small ttt_linear 9 64 16
bfloat16 cuda`, for tools that look at its kernels."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from metattt.bench.gpu.decoding import Decoding
from metattt.bench.gpu.operations import Operation
from metattt.bench.gpu.problems import DTYPES, make
from metattt.bench.gpu.processes import die_with_parent


def main(arguments: Sequence[str]) -> None:
    """
    Args:
        arguments: operation, T, d, b, type of the operands, device.
    """
    name, length, width, size, dtype, device = arguments
    sizes = (int(width), int(size), DTYPES[dtype], device)
    make(name, 1, int(length), 3, *sizes).step(Operation(name).function, True)
    Decoding(name, 5, 3, *sizes).step()
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    die_with_parent()
    main(sys.argv[1:])
