"""Launch parameters of the kernels, chosen from the shapes alone: no autotuner, so nothing needs a driver and runs are
alike.

A benchmark may add entries to the tables; keys are head width and mini-batch as the tiles hold them, padded to powers
of two.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch


class Launch(NamedTuple):
    """How a kernel is compiled: warps per program, and a bound on registers per thread that trades spills for programs
    at once."""

    num_warps: int
    maxnreg: int | None = None


SEGMENT = 64  #: mini-batches between stored fast weights, which bound the drift of the backward pass's reconstruction

#: how products of fp32 inputs are computed: `ieee` on the ordinary units, or `tf32x3` on the tensor cores, each as
#: three TF32 products
#: (an error of 1e-6 or so in place of 1e-7). 16-bit inputs are not concerned.
FP32_PRODUCTS = "tf32x3"

FORWARD: dict[tuple[int, int], Launch] = {}  #: by (width, mini-batch)
BACKWARD: dict[tuple[int, int], Launch] = {}  #: likewise
DECODE: dict[int, Launch] = {}  #: by width


def padded(width: int) -> int:
    """The tile size for `width` features or tokens: a power of two, and at least 16 for `tl.dot`."""
    return max(16, 1 << (width - 1).bit_length())


def _by_rows(width: int) -> Launch:
    """One warp for every 16 rows of a transposed tile: four warps are a warpgroup and its 64 rows of `wgmma`. More
    would only copy."""
    return Launch(width // 16)


def forward_launch(width: int, columns: int) -> Launch:
    """For the state `[width, width]` and tiles `[width, columns]`."""
    return FORWARD.get((width, columns)) or _by_rows(width)


def backward_launch(width: int, columns: int) -> Launch:
    """As `forward_launch`, with two states and some twenty tiles."""
    return BACKWARD.get((width, columns)) or _by_rows(width)


def decode_launch(width: int) -> Launch:
    """For W and M `[width, width]`, all of whose loads are in flight at once."""
    return DECODE.get(width) or _by_rows(width)


def variants(width: int, size: int, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Callable[[], None]]]]:
    """Other launch parameters for a benchmark to try: a name, and a function that makes the change and returns the one
    that undoes it."""
    key = (padded(width), padded(size))
    warps = _by_rows(key[0]).num_warps
    for name, table in (("forward", FORWARD), ("backward", BACKWARD)):
        for launch in (Launch(warps, 168), Launch(warps, 128), Launch(2 * warps)):
            yield (
                f"{name}: {launch.num_warps} warps, registers {launch.maxnreg}",
                partial(_set, table, key, launch),
            )
    for length in (16, 256):
        yield f"segments of {length} mini-batches", partial(_set, globals(), "SEGMENT", length)
    if dtype == torch.float32:
        yield "products of fp32 as ieee", partial(_set, globals(), "FP32_PRODUCTS", "ieee")


def _set(table: dict[Any, Any], key: Any, value: Any) -> Callable[[], None]:
    had, before = key in table, table.get(key)
    table[key] = value

    def undo() -> None:
        if had:
            table[key] = before
        else:
            del table[key]

    return undo
