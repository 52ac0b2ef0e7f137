"""What Triton makes of a launch, without a device: registers, stack and shared memory of every kernel, for sm_90.

```python
from compiled import compiled

found = compiled(lambda: forward.launch_forward(forward.allocate(...), q, k, v, ...))   # tensors on the meta device
```

Launches inside compile what they would run, and run nothing. Not under TRITON_INTERPRET=1, which makes kernels that are
interpreted: tests ask a process of their own.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from metattt.errors import MetaTTTError

SM_90 = 90
SHARED_LIMIT = 232_448  # bytes of shared memory that a program may have on sm_90


class Compiled(NamedTuple):
    """A kernel as it was compiled.

    Attributes:
        name: of the kernel.
        warps: per program.
        registers: per thread.
        stack: bytes per thread: what is spilled, and what is indexed.
        spilled: bytes that are stored to the stack and loaded from it.
        shared: bytes per program.
        serialized: whether ptxas has made products of a warpgroup wait for each other (its remarks C7510 to C7514).
    """

    name: str
    warps: int
    registers: int
    stack: int
    spilled: int
    shared: int
    serialized: bool


def compiled(launch: Callable[[], object], arch: int = SM_90) -> list[Compiled]:
    """The kernels that `launch` launches, in order, compiled for `arch` and not run.

    Raises:
        MetaTTTError: under TRITON_INTERPRET=1.
    """
    import triton
    from triton.runtime.jit import JITFunction

    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise MetaTTTError("TRITON_INTERPRET=1 makes kernels that are not compiled: unset it")
    found: list[Any] = []
    run, before = JITFunction.run, triton.runtime.driver._active

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        found.append(kernel)
        return kernel

    triton.runtime.driver.set_active(_NoDevice(arch))
    JITFunction.run = compile_only
    try:
        launch()
    finally:
        JITFunction.run = run
        triton.runtime.driver._active = before
    return [_examined(kernel, arch) for kernel in found]


class _NoDevice:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, arch: int):
        self.arch = arch

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def _examined(kernel: Any, arch: int) -> Compiled:
    """Assembles the kernel once more, as Triton did and with its options, which differ between versions, for what ptxas
    says of it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    backend = make_backend(GPUTarget("cuda", arch, 32))
    known = kernel.metadata._asdict()
    options = backend.parse_options({name: value for name, value in known.items() if name != "target"})
    told = io.StringIO()
    with triton.knobs.nvidia.scope(), contextlib.redirect_stdout(told):
        triton.knobs.nvidia.dump_ptxas_log = True
        backend.make_cubin(kernel.asm["ptx"], {}, options, arch)
    said = told.getvalue()

    def number(pattern: str) -> int:
        return sum(int(x) for x in re.findall(pattern, said))

    return Compiled(
        kernel.metadata.name,
        kernel.metadata.num_warps,
        number(r"Used (\d+) registers"),
        number(r"(\d+) bytes stack frame"),
        number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        kernel.metadata.shared,
        "are serialized" in said,
    )
