"""Registers, stack and shared memory of the Triton kernels, as compiled for sm_90; no GPU is needed.

    python tests/compiled_kernels.py >> results/gpu/compiled.md

A row is a kernel of a forward and a backward pass with biases, token steps and final states, or of a decoding step in place,
by head width, mini-batch, type, and form: `walk` (one program a sequence and head) or `chain` (the recurrence apart from
what is parallel).
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from compiled import SHARED_LIMIT, Compiled, compiled
from shared_memory_of_ttt_linear import launches

from metattt.kernels.ttt_linear import tuning
from metattt.kernels.ttt_mlp.tuning import config

SHAPES = {"ttt_linear": ((32, 16), (64, 16), (128, 16), (64, 64)), "ttt_mlp": ((32, 16), (64, 16), (128, 16))}
FORMS = ("walk", "chain")


def linear(d: int, b: int, form: str) -> list[Compiled]:
    chosen = tuning.Call.form
    tuning.Call.form = lambda call, direction, segment: form  # type: ignore[method-assign, assignment, return-value]
    try:
        return compiled(partial(launches, d, b, torch.bfloat16))
    finally:
        tuning.Call.form = chosen  # type: ignore[method-assign]


def both_passes(d: int, b: int, name: str, per_sm: int) -> list[Compiled]:
    """The kernels of a forward and a backward pass over 1,027 tokens of four heads, with biases and token steps."""
    from metattt.kernels.ttt_mlp.backward import backward
    from metattt.kernels.ttt_mlp.forward import empty_weights, forward, slots

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    dtype = getattr(torch, name)
    q = tensor(1, 1027, 4, d, dtype=dtype)
    weights = (tensor(4, d, 4 * d), tensor(4, 4 * d), tensor(4, 4 * d, d), tensor(4, d))
    tokens, norm = (q, q, q, tensor(1, 1027, 4), tensor(4, b)), (tensor(4, d), tensor(4, d))
    ahead, back = (config(kernel, d, b, dtype, per_sm) for kernel in ("forward", "backward"))
    final = empty_weights(weights, (1, 4))
    kept = empty_weights(weights, (slots(q, None, b, 16), 4))

    def launch() -> None:
        forward(*tokens, weights, *norm, None, b, 16, ahead)
        backward(*tokens, *norm, None, b, 16, final, kept, q, final, final, ahead, back)

    return compiled(launch)


def mlp(d: int, b: int, form: str) -> list[Compiled]:
    return both_passes(d, b, "bfloat16", 4 if form == "walk" else 0)


def decoding(name: str, d: int) -> list[Compiled]:
    """Every sequence at a place of its own, state in place."""

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    module: Any = __import__(f"metattt.kernels.{name}.decode", fromlist=["launch_token"])
    q, phase = tensor(8, 4, d, dtype=torch.bfloat16), tensor(8, dtype=torch.int64)
    weights: Any = (tensor(8, 4, d, d), tensor(8, 4, d))
    if name == "ttt_mlp":
        weights = (tensor(8, 4, d, 4 * d), tensor(8, 4, 4 * d), tensor(8, 4, 4 * d, d), tensor(8, 4, d))
    norm, tau = (tensor(4, d), tensor(4, d)), tensor(1, 16)
    views = (q, q, q, q, tensor(8, 4))
    return compiled(lambda: module.launch_token(*views, *norm, tau, phase, 16, weights, weights, weights, weights))


def main() -> None:
    print(f"\n## Triton {triton.__version__}\n")
    print("| operation | d | b | form | kernel | warps | registers | stack, B | spilled, B | shared, B | products serialised |")
    print("|---|---:|---:|---|---|---:|---:|---:|---:|---:|---|")
    makers: dict[str, Callable[[int, int, str], list[Compiled]]] = {"ttt_linear": linear, "ttt_mlp": mlp}
    for name, make in makers.items():
        rows = [((d, b, form), partial(make, d, b, form)) for d, b in SHAPES[name] for form in FORMS]
        rows += [((d, 16, "decoding"), partial(decoding, name, d)) for d in (64, 128)]
        for (d, b, form), found in rows:
            began = time.monotonic()
            for one in found():
                assert one.shared <= SHARED_LIMIT, one
                told = f"{one.warps} | {one.registers} | {one.stack} | {one.spilled} | {one.shared:,}"
                print(f"| {name} | {d} | {b} | {form} | {one.name} | {told} | {'yes' if one.serialized else 'no'} |", flush=True)
            print(f"{name} {d} {b} {form}: {time.monotonic() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main()
