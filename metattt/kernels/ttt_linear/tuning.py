"""Launches, chosen from the shapes and from how full the card is: no autotuner, so nothing needs a driver and runs are
alike.

`TABLE` overrules the rules below, one entry a key, in a form that JSON holds: `TABLE.update(json.load(file))` takes
what a benchmark has written.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from metattt.kernels.triton.device import changed, multiprocessors, shared_memory

Form = Literal["walk", "chain"]
FORMS: tuple[Form, ...] = ("walk", "chain")


class Launch(NamedTuple):
    """How a kernel is compiled: warps per program, and a bound on registers per thread that trades spills for programs
    at once."""

    num_warps: int
    maxnreg: int | None = None


SEGMENT = 64  #: mini-batches between stored fast weights, which bound the drift of undone updates
CHAIN_SEGMENT = 16  #: likewise where a segment is the work of a program: fewer are more programs, and more to store
LEAST_SEGMENTS = 2  #: of a sequence, for a chain: what is done at once after one segment is not done sooner
FULL = 2  #: programs per multiprocessor from which on walks keep the card busy by themselves

#: how products of fp32 inputs are computed: `tf32x3` on the tensor cores, each as three TF32 products (an error of 1e-6
#: or so in place of 1e-7), or `ieee` on the ordinary units. 16-bit inputs are not concerned.
FP32_PRODUCTS = "tf32x3"

KERNELS = {
    "forward": {"walk": ("forward walk",), "chain": ("forward chain", "forward read")},
    "backward": {"walk": ("backward walk",), "chain": ("backward outputs", "backward chain", "backward inputs")},
}  #: launches of each pass in each form
#: bytes of shared memory of the largest launch, forward or backward, by (d, b) as padded and bytes of an operand: what
#: Triton 3.6 and 3.9 compile for compute capability 9.0 takes at most that (`tests/compiled_kernels.py shared`). Others
#: take at most `LITTLE`. (Walks of fp32 take less since the backward pass is in two steps, with d 128 and b 64 229,376:
#: that is not used before such a walk has been timed on a card.)
SHARED: dict[tuple[int, int, int], dict[Form, int]] = {
    (128, 64, 4): {"walk": 425_984, "chain": 294_912},
    (128, 32, 4): {"walk": 237_568, "chain": 204_800},
    (128, 16, 4): {"walk": 182_272, "chain": 182_272},
    (64, 64, 4): {"walk": 229_376, "chain": 131_072},
}
LITTLE = 131_072  #: bytes

TABLE: dict[str, Any] = {}  #: `key` → "walk" or "chain" of a pass, or [num_warps, maxnreg] of a kernel


def padded(width: int) -> int:
    """The tile size for `width` features or tokens: a power of two, and at least 16 for `tl.dot`."""
    return max(16, 1 << (width - 1).bit_length())


def key(what: str, width: int, size: int, itemsize: int, per_sm: int) -> str:
    """Of `TABLE`, for a pass ("forward", "backward") or a kernel.

    Args:
        what: as `KERNELS` names them, or "decode".
        width, size: d and b; tiles are padded, and so are keys.
        itemsize: bytes of an operand.
        per_sm: programs (sequences · heads) per multiprocessor, rounded down; 4 stands for more.
    """
    return f"{what} d{padded(width)} b{padded(size)} {8 * itemsize}-bit {per_sm}/SM"


def shared_bytes(width: int, size: int, itemsize: int, form: Form) -> int:
    """At most, of the launches of a form."""
    return SHARED.get((padded(width), padded(size), itemsize), {}).get(form, LITTLE)


class Call(NamedTuple):
    """What launches are chosen by.

    Attributes:
        width, size, itemsize: d, b, bytes of an operand.
        per_sm: sequences · heads per multiprocessor, rounded down; 4 stands for more.
        chunks: mini-batches of a sequence; of packed ones the mean.
        room: bytes of shared memory that a program may have.
    """

    width: int
    size: int
    itemsize: int
    per_sm: int
    chunks: int
    room: int

    @classmethod
    def of(cls, k: Tensor, size: int, sequences: int) -> "Call":
        """For k `[B, T, H, d]`."""
        batch, tokens, heads, width = k.shape
        per_sm = min(sequences * heads // multiprocessors(k.device), 4)
        chunks = batch * tokens // (size * max(sequences, 1))
        return cls(width, size, k.dtype.itemsize, per_sm, chunks, shared_memory(k.device))

    def key(self, what: str) -> str:
        return key(what, self.width, self.size, self.itemsize, self.per_sm)

    def form(self, direction: str, segment: int) -> Form:
        """Whether one program walks a whole (sequence, head), or only its recurrence; "forward" or "backward"."""
        if shared_bytes(self.width, self.size, self.itemsize, "walk") > self.room:
            return "chain"
        if self.chunks < LEAST_SEGMENTS * segment:
            return "walk"
        chosen: Form = TABLE.get(self.key(direction)) or ("chain" if self.per_sm < FULL else "walk")
        return chosen

    def segment(self) -> int:
        """Mini-batches between stored fast weights, whichever form each pass takes."""
        forms = [self.form(direction, CHAIN_SEGMENT) for direction in KERNELS]
        return CHAIN_SEGMENT if "chain" in forms else SEGMENT

    def launch(self, kernel: str) -> Launch:
        """One warp for every 16 rows of a transposed tile: four warps are a warpgroup and its 64 rows of `wgmma`. More
        would only copy."""
        known = TABLE.get(self.key(kernel))
        return Launch(padded(self.width) // 16) if known is None else Launch(*known)


def decode_launch(width: int) -> Launch:
    """For W and M `[width, width]`, all of whose loads are in flight at once."""
    known = TABLE.get(f"decode d{padded(width)}")
    return Launch(padded(width) // 16) if known is None else Launch(*known)


def variants(
    width: int, size: int, dtype: torch.dtype, per_sm: int | None = None
) -> Iterator[tuple[str, Callable[[], Callable[[], None]]]]:
    """Other launches for a benchmark to try: a name, and a function that makes the change and returns the one that
    undoes it.

    Args:
        per_sm: programs per multiprocessor that are timed, as in `key`; None: changes hold for every number.
    """
    counts = range(5) if per_sm is None else (per_sm,)
    warps = padded(width) // 16

    def entry(what: str, value: Any) -> Callable[[], Callable[[], None]]:
        return partial(changed, TABLE, {key(what, width, size, dtype.itemsize, count): value for count in counts})

    for direction, kernels in KERNELS.items():
        for form in FORMS:
            yield f"{direction}: {form}", entry(direction, form)
        for kernel in (name for form in FORMS for name in kernels[form]):
            for launch in (Launch(warps, 168), Launch(warps, 128), Launch(2 * warps)):
                name = f"{kernel}: {launch.num_warps} warps, registers {launch.maxnreg}"
                yield name, entry(kernel, list(launch))
    for length in (16, 256):
        yield f"segments of {length} mini-batches", partial(changed, globals(), {"SEGMENT": length})
    for length in (8, 32):
        yield f"segments of chains of {length} mini-batches", partial(changed, globals(), {"CHAIN_SEGMENT": length})
    if dtype == torch.float32:
        yield "products of fp32 as ieee", partial(changed, globals(), {"FP32_PRODUCTS": "ieee"})
