"""How a launch is cut up: a plain function of the shapes and of how full they leave the device, so that nothing has to
be timed before the first call.

`TABLE` overrules the rules below, one entry a key, in a form that JSON holds: `TABLE.update(json.load(file))` takes
what a benchmark has written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Config(NamedTuple):
    """One launch shape.

    Attributes:
        tile: hidden units per tile. The running weights live in device memory, in practice in L2, and pass through the
            registers once per product with them and mini-batch.
        num_warps: warps per program; a program is one (sequence, head).
        num_stages: depth of the prefetch of tiles.
    """

    tile: int
    num_warps: int
    num_stages: int


SEGMENT = 16  # mini-batches between two copies of the weights that the forward pass keeps for the backward pass
PROGRAMS = 264  # that recompute segments at the same time, at most: two per multiprocessor of an H100 or H200

TABLE: dict[str, Sequence[Any]] = {}  #: `key` → fields of `Config`

#: (d, b), padded → most bytes of shared memory of a program of any kernel of the two passes with operands of fp32, as
#: compiled for compute capability 9.0 by the Triton that takes most of 3.6, 3.8 and 3.9; a smaller b has the figure of
#: a larger one where only that was compiled. `tests/kernels/test_triton_launches.py` compiles the largest accepted.
SHARED: dict[tuple[int, int], int] = {
    **{(32, b): 114_688 for b in (16, 32)},
    (32, 64): 294_912,
    (64, 16): 172_032,
    (64, 32): 188_416,
    (64, 64): 393_216,
    (128, 16): 153_600,
    (128, 32): 286_720,
    (128, 64): 589_824,
}


def padded(d: int, b: int) -> tuple[int, int]:
    """The sizes of tiles: a power of two for d, at least 16 for b."""
    return 1 << (d - 1).bit_length(), max(b, 16)


def shared_bytes(d: int, b: int) -> int:
    """Most bytes of shared memory that a program of the launches for this shape takes."""
    return SHARED[padded(d, b)]


def key(kernel: str, d: int, b: int) -> str:
    """Of `TABLE`: "forward", "backward" or "decode"."""
    return f"{kernel} d{d} b{b}"


def config(kernel: str, d: int, b: int) -> Config:
    """The launch of `kernel`: "forward", "backward" or "decode"."""
    known = TABLE.get(key(kernel, d, b))
    if known is not None:
        return Config(*known)
    if kernel == "decode":
        return Config(32 if d <= 64 else 16, 4, 1)
    return Config(64, 4 if b <= 16 else 8, 1)
