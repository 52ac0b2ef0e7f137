"""Launches, chosen from the shapes: no autotuner, so nothing needs a driver and runs are alike.

`TABLE` overrules the rules below, one entry a key, in a form that JSON holds: `TABLE.update(json.load(file))` takes
what a benchmark has written.
"""

from typing import Any, NamedTuple


class Launch(NamedTuple):
    """How a kernel is compiled: warps per program, and a bound on registers per thread that trades spills for programs
    at once."""

    num_warps: int
    maxnreg: int | None = None


SEGMENT = 16  #: mini-batches of a program of the backward pass, between stored fast weights: bounds the drift of undone
#: updates; fewer are more programs, and more to store

#: how products of fp32 inputs are computed: `tf32x3` on the tensor cores, each as three TF32 products (an error of 1e-6
#: or so in place of 1e-7), or `ieee` on the ordinary units. 16-bit inputs are not concerned.
FP32_PRODUCTS = "tf32x3"

KERNELS = ("forward", "outputs", "chain", "inputs")
#: bytes of shared memory of the largest launch by (d, b) as padded and bytes of an operand: what Triton 3.6 and 3.9
#: compile for compute capability 9.0 takes at most that (`results/gpu/ttt_linear_shared_memory.txt`). Others take at
#: most `LITTLE`.
SHARED: dict[tuple[int, int, int], int] = {
    (128, 64, 4): 294_912,
    (128, 32, 4): 204_800,
    (128, 16, 4): 182_272,
}
LITTLE = 131_072  #: bytes

#: `key` → [num_warps, maxnreg] of a kernel. What is here: with 4 warps, Triton 3.6 compiles a kernel for Hopper whose
#: results are not finite (results/gpu); others of these sizes were right there.
TABLE: dict[str, Any] = {"outputs d64 b32 16-bit": [8, None]}


def padded(width: int) -> int:
    """The tile size for `width` features or tokens: a power of two, and at least 16 for `tl.dot`."""
    return max(16, 1 << (width - 1).bit_length())


def key(kernel: str, width: int, size: int, itemsize: int) -> str:
    """Of `TABLE`, for one of `KERNELS`: d and b as padded, and bytes of an operand."""
    return f"{kernel} d{padded(width)} b{padded(size)} {8 * itemsize}-bit"


def shared_bytes(width: int, size: int, itemsize: int) -> int:
    """At most, of all launches."""
    return SHARED.get((padded(width), padded(size), itemsize), LITTLE)


def launch(kernel: str, width: int, size: int, itemsize: int) -> Launch:
    """One warp for every 16 rows of a transposed tile: four warps are a warpgroup and its 64 rows of `wgmma`. More
    would only copy."""
    known = TABLE.get(key(kernel, width, size, itemsize))
    return Launch(padded(width) // 16) if known is None else Launch(*known)


def decode_launch(width: int) -> Launch:
    """For W and M `[width, width]`, all of whose loads are in flight at once."""
    known = TABLE.get(f"decode d{padded(width)}")
    return Launch(padded(width) // 16) if known is None else Launch(*known)
