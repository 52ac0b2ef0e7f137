"""How a launch is cut up: a plain function of the shapes and of how full they leave the device, so that nothing has to
be timed before the first call.

`TABLE` overrules the rules below, one entry a key, in a form that JSON holds: `TABLE.update(json.load(file))` takes
what a benchmark has written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from metattt.kernels.triton.device import changed


class Config(NamedTuple):
    """One launch shape.

    Attributes:
        tile: hidden units per tile. All 4d: the weights stay in registers for the whole walk. Fewer: the running
            weights live in device memory, in practice in L2, and pass through the registers once per product with them
            and mini-batch.
        num_warps: warps per program; a program is one (sequence, head).
        num_stages: depth of the prefetch of tokens (or of tiles).
        split: whether what does not depend on the mini-batch before is left to kernels of its own, which run side by
            side for all segments, or one program per (sequence, head) does everything. The backward pass then keeps
            the cotangents of all hidden units in registers, whatever the tile.
    """

    tile: int
    num_warps: int
    num_stages: int
    split: bool = False


SEGMENT = 16  # mini-batches between two copies of the weights that the forward pass keeps for the backward pass
PROGRAMS = 264  # that recompute segments at the same time, at most: two per multiprocessor of an H100 or H200
#: From so many programs (sequences · heads) per multiprocessor on, one program per sequence and head does everything.
#: Forward: a multiprocessor holds one program, and with more of them than multiprocessors none is left idle to read.
#: Backward: the split pass computes less, but keeps about 2.5 times as many bytes for a group of segments.
FULL = {"forward": 1, "backward": 2}

TABLE: dict[str, Sequence[Any]] = {}  #: `key` → fields of `Config`

#: (d, b, bytes of an operand), d and b padded → most bytes of shared memory of a program of any kernel of the two
#: passes, as compiled for compute capability 9.0 by the Triton that takes most of 3.6, 3.8 and 3.9; a smaller b has the
#: figure of a larger one where only that was compiled. `tests/kernels/test_triton_launches.py` compiles the largest
#: that are accepted.
SHARED: dict[tuple[int, int, int], int] = {
    **{(32, b, 2): 118_784 for b in (16, 32, 64)},
    (64, 16, 2): 166_400,
    **{(64, b, 2): 147_456 for b in (32, 64)},
    **{(128, b, 2): 204_800 for b in (16, 32, 64)},
    **{(32, b, 4): 114_688 for b in (16, 32)},
    (32, 64, 4): 294_912,
    (64, 16, 4): 172_032,
    (64, 32, 4): 188_416,
    (64, 64, 4): 393_216,
    (128, 16, 4): 153_600,
    (128, 32, 4): 286_720,
    (128, 64, 4): 589_824,
}


def padded(d: int, b: int) -> tuple[int, int]:
    """The sizes of tiles: a power of two for d, at least 16 for b."""
    return 1 << (d - 1).bit_length(), max(b, 16)


def shared_bytes(d: int, b: int, dtype: torch.dtype) -> int:
    """Most bytes of shared memory that a program of the launches for this shape takes."""
    return SHARED[(*padded(d, b), dtype.itemsize)]


def key(kernel: str, d: int, b: int, itemsize: int, per_sm: int) -> str:
    """Of `TABLE`.

    Args:
        kernel: "forward", "backward" or "decode".
        itemsize: bytes of an operand; decode: of the state.
        per_sm: programs (sequences · heads) per multiprocessor, rounded down; 4 stands for more. Decode: 0.
    """
    return f"{kernel} d{d} b{b} {8 * itemsize}-bit {min(per_sm, 4)}/SM"


def config(kernel: str, d: int, b: int, dtype: torch.dtype, per_sm: int = 0, chunks: int | None = None) -> Config:
    """The launch of `kernel`: "forward", "backward" or "decode".

    The two matrices are 8d² fp32 values: 32 KB at d = 32, 128 KB at d = 64 (half of a register file), 288 KB at d = 96.
    The backward pass holds their cotangents instead. Whether they stay in registers is decided by what else must be
    there: tiles of 4d·b values. Eight warps spill least: with sixteen, what every warp holds of the d·b tiles takes a
    larger share of half as many registers.
    Prefetching is done by hand; `num_stages` above 1 adds buffers that the register allocation pays for.

    Args:
        per_sm: as `key` takes it.
        chunks: mini-batches of a sequence, of packed ones the mean; None: many. Outputs of fewer than two segments
            cannot be read side by side.
    """
    known = TABLE.get(key(kernel, d, b, dtype.itemsize, per_sm))
    if known is not None:
        return Config(*known)
    if kernel == "decode":
        return Config(32 if d <= 64 else 16, 4, 1)
    resident = dtype.itemsize == 2 and ((d == 32 and b <= 32) or (d == 64 and b <= 16))
    if not resident:
        return Config(64, 4 if b <= 16 else 8, 1)
    split = per_sm < FULL[kernel] and (kernel == "backward" or chunks is None or chunks >= 2 * SEGMENT)
    return Config(4 * d, 4 if d == 32 and kernel == "forward" else 8, 1, split)


def variants(
    width: int, size: int, dtype: torch.dtype, per_sm: int | None = None
) -> Iterator[tuple[str, Callable[[], Callable[[], None]]]]:
    """Other launches for a benchmark to try: a name, and a function that makes the change and returns the one that
    undoes it. None needs more shared memory than an H100 has.

    Args:
        per_sm: programs per multiprocessor that are timed, as `key` takes it; None: changes hold for every number.
    """
    counts = range(5) if per_sm is None else (per_sm,)
    for kernel in ("forward", "backward"):
        used = config(kernel, width, size, dtype, counts[0])
        tries = [
            used._replace(split=not used.split),
            used._replace(num_warps=2 * used.num_warps),
            Config(2 * width, 8, 1),
            Config(width, 4, 1),
        ]
        if kernel == "forward":  # two stages of the backward pass do not fit
            tries.append(used._replace(num_stages=2))
        if dtype.itemsize == 4 or width not in (32, 64):  # cotangents would not be in registers
            tries = [other for other in tries if not (kernel == "backward" and other.split)]
        for other in tries:
            if other != used:
                form = "side by side" if other.split else "one walk"
                name = f"{kernel}: {form}, tiles of {other.tile}, {other.num_warps} warps, {other.num_stages} stages"
                keys = [key(kernel, width, size, dtype.itemsize, count) for count in counts]
                yield name, partial(changed, TABLE, dict.fromkeys(keys, other))
