"""How a launch is cut up: a plain function of the shapes, so that nothing has to be timed before the first call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch


class Config(NamedTuple):
    """One launch shape.

    Attributes:
        tile: hidden units per tile. All 4d: the weights stay in registers for the whole walk. Fewer: the running
            weights live in device memory, in practice in L2, and pass through the registers once per product with them
            and mini-batch.
        num_warps: warps per program; a program is one (sequence, head).
        num_stages: depth of the prefetch of tokens (or of tiles).
    """

    tile: int
    num_warps: int
    num_stages: int


SEGMENT = 16  # mini-batches between two copies of the weights that the forward pass keeps for the backward pass
# programs that the recomputation of segments tries to have in flight (two per multiprocessor of an H100 or H200)
PROGRAMS = 264

# (kernel, d, b, bytes of an operand; decode: of the state) → Config, looked up before the rule: for measurements and
# for other cards.
OVERRIDES: dict[tuple[str, int, int, int], Config] = {}


def config(kernel: str, d: int, b: int, dtype: torch.dtype) -> Config:
    """The launch of `kernel`: "forward", "backward" or "decode".

    The two matrices are 8d² fp32 values: 32 KB at d = 32, 128 KB at d = 64 (half of a register file), 288 KB at d = 96.
    The backward pass holds their cotangents instead. Whether they stay in registers is decided by what else must be
    there: tiles of 4d·b values. Eight warps spill least: with sixteen, what every warp holds of the d·b tiles takes a
        larger share of half as many registers.
    Prefetching is done by hand; `num_stages` above 1 adds buffers that the register allocation pays for.
    """
    known = OVERRIDES.get((kernel, d, b, dtype.itemsize))
    if known is not None:
        return known
    if kernel == "decode":
        return Config(32 if d <= 64 else 16, 4, 1)
    resident = dtype.itemsize == 2 and ((d == 32 and b <= 32) or (d == 64 and b <= 16))
    if resident:
        return Config(4 * d, 4 if d == 32 and kernel == "forward" else 8, 1)
    return Config(64, 4 if b <= 16 else 8, 1)


def variants(width: int, size: int, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Callable[[], None]]]]:
    """Other launches for a benchmark to try: a name, and a function that makes the change and returns the one that
    undoes it."""
    for kernel in ("forward", "backward"):
        used = config(kernel, width, size, dtype)
        tries = (
            used._replace(num_stages=2),
            used._replace(num_warps=2 * used.num_warps),
            Config(2 * width, 8, 1),
            Config(width, 4, 1),
        )
        for other in tries:
            if other != used:
                name = f"{kernel}: tiles of {other.tile}, {other.num_warps} warps, {other.num_stages} stages"
                yield name, partial(_override, (kernel, width, size, dtype.itemsize), other)


def _override(key: tuple[str, int, int, int], other: Config) -> Callable[[], None]:
    before = OVERRIDES.get(key)
    OVERRIDES[key] = other

    def undo() -> None:
        OVERRIDES.pop(key)
        if before is not None:
            OVERRIDES[key] = before

    return undo
