"""The Triton kernels as compiled for sm_90; no GPU is needed.

    python tests/compiled_kernels.py shared                       # of ttt_linear, all shapes: hours of one core
    python tests/compiled_kernels.py shared 64,16,bfloat16        # d, b, type

prints for every kernel of a forward and a backward pass its warps, its bytes of shared memory, and the bytes that
`tuning` says it takes at most.

Not under TRITON_INTERPRET=1, which makes kernels that are interpreted: tests ask a process of their own.
"""

from __future__ import annotations

import itertools
import os
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from metattt.errors import MetaTTTError
from metattt.kernels.triton.device import SIZES, WIDTHS
from metattt.kernels.ttt_linear import backward, forward, tuning
from metattt.kernels.ttt_mlp.tuning import config

SM_90 = GPUTarget("cuda", 90, 32)


# -- compiling without a device ----------------------------------------------------------------------------------------


class Compiled(NamedTuple):
    """A kernel as it was compiled: its warps, and bytes of shared memory per program."""

    name: str
    warps: int
    shared: int


def compiled(launch: Callable[[], object]) -> list[Compiled]:
    """The kernels that `launch` launches, in order, compiled and not run.

    Raises:
        MetaTTTError: under TRITON_INTERPRET=1.
    """
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise MetaTTTError("TRITON_INTERPRET=1 makes kernels that are not compiled: unset it")
    found: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        found.append(run(self, *args, grid=grid, warmup=True, **options))
        return found[-1]

    # as much of a driver as compiling asks for
    driver = SimpleNamespace(get_current_target=lambda: SM_90, get_current_device=int, get_current_stream=lambda *_: 0)
    with patch.object(triton.runtime.driver, "_active", driver), patch.object(JITFunction, "run", compile_only):
        launch()
    return [Compiled(one.metadata.name, one.metadata.num_warps, one.metadata.shared) for one in found]


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


def decoding(name: str, d: int) -> list[Compiled]:
    """Every sequence at a place of its own, state in place."""
    module: Any = __import__(f"metattt.kernels.{name}.decode", fromlist=["launch_token"])
    q, phase = tensor(8, 4, d, dtype=torch.bfloat16), tensor(8, dtype=torch.int64)
    weights: Any = (tensor(8, 4, d, d), tensor(8, 4, d))
    if name == "ttt_mlp":
        weights = (tensor(8, 4, d, 4 * d), tensor(8, 4, 4 * d), tensor(8, 4, 4 * d, d), tensor(8, 4, d))
    norm, tau = (tensor(4, d), tensor(4, d)), tensor(1, 16)
    views = (q, q, q, q, tensor(8, 4))
    return compiled(lambda: module.launch_token(*views, *norm, tau, phase, 16, weights, weights, weights, weights))


# -- what is printed ---------------------------------------------------------------------------------------------------


def print_shared(wanted: list[str]) -> None:
    shapes = itertools.product(WIDTHS, SIZES, ("float32", "bfloat16"))
    for each in wanted or [",".join(map(str, shape)) for shape in shapes]:
        width, size, name = each.split(",")
        d, b = int(width), int(size)
        bound = tuning.shared_bytes(d, b, getattr(torch, name).itemsize)
        for one in linear(d, b, name):
            print(f"triton {triton.__version__} d {d} b {b} {name} {one.name} {one.warps} {one.shared} {bound}", flush=True)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    print_shared(sys.argv[2:])
