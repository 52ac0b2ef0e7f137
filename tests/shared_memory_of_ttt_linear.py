"""Shared memory of every launch of `ttt_linear`, as Triton allocates it for sm_90: no GPU, and no assembler, is needed.

    python tests/shared_memory_of_ttt_linear.py                       # all shapes: an hour of one core
    python tests/shared_memory_of_ttt_linear.py 64,16,bfloat16,chain  # d, b, type, form

prints a line for every kernel: bytes, warps, and the bytes that `tuning` says it takes at most.
"""

import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from compiled import SM_90, _NoDevice
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction

from metattt.kernels.triton.device import SIZES, WIDTHS
from metattt.kernels.ttt_linear import backward, forward, tuning


class Allocated(Exception):
    """Raised where the assembler would begin."""


def launches(width: int, size: int, dtype: torch.dtype) -> None:
    """Forward and backward with bias, token steps and a final state, on tensors without memory."""

    def made(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    q, eta = made(1, 2, 4096, width, dtype=dtype).transpose(1, 2), made(1, 2, 4096).transpose(1, 2)
    w, b, scale, tau, segment = made(2, width, width), made(2, width), made(2, width), made(1, size), 16
    state = made(1, 2, width, width), made(1, 2, width)
    out = forward.allocate(q, q, 1, size, segment, True, True)
    forward.launch_forward(out, q, q, q, eta, w, b, scale, scale, tau, None, size, segment)
    grads = backward.allocate(q, q, q, eta, 1, True, True, size)
    backward.launch_backward(
        grads, q, state * 2, q, q, q, eta, scale, scale, tau, None, out.weighted, out.anchors, size, segment
    )


def allocated(launch: Callable[[], None]) -> list[tuple[str, int, int]]:
    """Name, warps and bytes of shared memory of what `launch` launches."""
    found: list[tuple[str, int, int]] = []
    run, to_ptx = JITFunction.run, CUDABackend.make_ptx

    def stop(self: Any, module: Any, metadata: dict[str, Any], *_: Any) -> None:
        found.append(("", metadata["num_warps"], metadata["shared"]))
        raise Allocated

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        try:
            run(self, *args, grid=grid, warmup=True, **options)
        except Allocated:
            found[-1] = (f"{self.fn.__module__.rsplit('.', 1)[-1]}.{self.fn.__name__}", *found[-1][1:])

    triton.runtime.driver.set_active(_NoDevice(SM_90))
    triton.knobs.compilation.always_compile = True
    CUDABackend.make_ptx, JITFunction.run = stop, compile_only
    try:
        launch()
    finally:
        CUDABackend.make_ptx, JITFunction.run = to_ptx, run
    return found


def of_shape(width: int, size: int, dtype: str, form: tuning.Form) -> list[tuple[str, int, int]]:
    """As `allocated`, for both passes in a form."""
    chosen = tuning.Call.form
    tuning.Call.form = lambda call, direction, segment: form  # type: ignore[method-assign]
    try:
        return allocated(lambda: launches(width, size, getattr(torch, dtype)))
    finally:
        tuning.Call.form = chosen  # type: ignore[method-assign]


def main(wanted: list[str]) -> None:
    shapes = itertools.product(WIDTHS, SIZES, ("float32", "bfloat16"), tuning.FORMS)
    for each in wanted or [",".join(map(str, shape)) for shape in shapes]:
        width, size, dtype, form = each.split(",")
        bound = tuning.shared_bytes(int(width), int(size), getattr(torch, dtype).itemsize, form)  # type: ignore[arg-type]
        for name, warps, shared in of_shape(int(width), int(size), dtype, form):  # type: ignore[arg-type]
            said = f"triton {triton.__version__} d {width} b {size} {dtype} {form} {name} {warps} {shared} {bound}"
            print(said, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
