"""The Triton kernels as they are compiled for sm_90: shared memory, and where their products read; no GPU is needed.

Not under TRITON_INTERPRET=1, which makes kernels that are interpreted: tests ask a process of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from assembly import misled

from metattt.kernels.ttt_linear import backward, forward
from metattt.kernels.ttt_mlp.tuning import config

SM_90 = 90


# -- compiling without a device ----------------------------------------------------------------------------------------


class Compiled(NamedTuple):
    """A kernel as it was compiled.

    Attributes:
        shared: bytes per program.
        products: those whose operands descriptors name, and `misled` those of them that may be named by data (`assembly`).
    """

    name: str
    shared: int
    products: int
    misled: int


class _NoDevice:
    """As much of a Triton driver as compiling asks for."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", SM_90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def compiled(launch: Callable[[], object]) -> list[Compiled]:
    """The kernels that `launch` launches, in order, compiled and not run."""
    from triton.runtime.jit import JITFunction

    found: list[Any] = []
    run, before = JITFunction.run, triton.runtime.driver._active

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        found.append(kernel)
        return kernel

    triton.runtime.driver.set_active(_NoDevice())
    JITFunction.run = compile_only
    try:
        launch()
    finally:
        JITFunction.run = run
        triton.runtime.driver._active = before
    return [_examined(kernel) for kernel in found]


def _examined(kernel: Any) -> Compiled:
    """Assembles the kernel once more, as Triton did and with its options, which differ between versions."""
    from triton.compiler.compiler import make_backend

    backend = make_backend(_NoDevice().get_current_target())
    known = kernel.metadata._asdict()
    options = backend.parse_options({name: value for name, value in known.items() if name != "target"})
    cubin = backend.make_cubin(kernel.asm["ptx"], {}, options, SM_90)
    return Compiled(kernel.metadata.name, kernel.metadata.shared, *misled(cubin))


# -- launches on tensors without memory --------------------------------------------------------------------------------


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def linear(d: int, b: int, name: str = "bfloat16") -> list[Compiled]:
    """Both passes of TTT-Linear over 4,096 tokens of two heads."""
    q, eta = tensor(1, 2, 4096, d, dtype=getattr(torch, name)).transpose(1, 2), tensor(1, 2, 4096).transpose(1, 2)
    w, bias, scale, tau, segment = tensor(2, d, d), tensor(2, d), tensor(2, d), tensor(1, b), 16
    state = tensor(1, 2, d, d), tensor(1, 2, d)

    def launch() -> None:
        out = forward.allocate(q, q, 1, b, segment, True, True)
        forward.launch_forward(out, q, q, q, eta, w, bias, scale, scale, tau, None, b, segment)
        grads = backward.allocate(q, q, q, eta, 1, True, True, b)
        norm, kept = (eta, scale, scale, tau, None), (out.weighted, out.anchors)
        backward.launch_backward(grads, q, state * 2, q, q, q, *norm, *kept, b, segment)

    return compiled(launch)


def mlp(d: int, b: int) -> list[Compiled]:
    """Both passes of TTT-MLP over 1,027 tokens of four heads."""
    from metattt.kernels.ttt_mlp.backward import backward
    from metattt.kernels.ttt_mlp.forward import empty_weights, forward, slots

    q = tensor(1, 1027, 4, d)
    weights = (tensor(4, d, 4 * d), tensor(4, 4 * d), tensor(4, 4 * d, d), tensor(4, d))
    tokens, norm = (q, q, q, tensor(1, 1027, 4), tensor(4, b)), (tensor(4, d), tensor(4, d))
    ahead, back = (config(kernel, d, b) for kernel in ("forward", "backward"))
    final, kept = empty_weights(weights, (1, 4)), empty_weights(weights, (slots(q, None, b, 16), 4))

    def launch() -> None:
        forward(*tokens, weights, *norm, None, b, 16, ahead)
        backward(*tokens, *norm, None, b, 16, final, kept, q, final, final, ahead, back)

    return compiled(launch)
