"""Launches of the Triton operations: which one is chosen, and what it takes of a card as Triton compiles it for an H100. No device is
needed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

import compiled_kernels
import triton

from metattt.kernels.triton.device import OPERANDS, SHARED_MEMORY, SIZES, WIDTHS
from metattt.kernels.ttt_linear import tuning as linear_tuning
from metattt.kernels.ttt_linear.on_gpu import TTTLinearOnGPU
from metattt.kernels.ttt_linear.tuning import Call
from metattt.kernels.ttt_mlp import backward, forward, tuning
from metattt.kernels.ttt_mlp.on_gpu import TTTMLPOnGPU
from metattt.kernels.ttt_mlp.tuning import Config, config

KNOWN = triton.__version__.startswith(("3.6.", "3.9."))  # nobody has seen what others make of the kernels
SHAPES = list(itertools.product(WIDTHS, SIZES))


@pytest.fixture(scope="module")
def compiling() -> Iterator[Callable[..., Any]]:
    """Calls a function in a process where kernels are compiled, not interpreted."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        with mock.patch.dict(os.environ):  # only while it starts: kernels that this process imports are interpreted
            os.environ.pop("TRITON_INTERPRET", None)
            process.submit(int).result()
        yield lambda function, *args: process.submit(function, *args).result()


@pytest.mark.slow
def test_ttt_linear_takes_no_more_shared_memory_than_said(compiling: Callable[..., Any]) -> None:
    """The largest of 16 bits, and one of fp32; `results/gpu/ttt_linear_shared_memory.txt` has others."""
    for d, b, dtype, form in ((64, 64, "bfloat16", "chain"), (64, 16, "float32", "walk"), (64, 16, "float32", "chain")):
        found = compiling(compiled_kernels.linear, d, b, form, dtype)
        most = linear_tuning.shared_bytes(d, b, getattr(torch, dtype).itemsize, form)
        assert len(found) == (2 if form == "walk" else 5)
        assert all(0 < one.shared <= most <= SHARED_MEMORY for one in found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_ttt_mlp_takes_no_more_shared_memory_than_said(name: str, compiling: Callable[..., Any]) -> None:
    """The largest shape that is accepted."""
    dtype = getattr(torch, name)
    accepted = [shape for shape in SHAPES if tuning.shared_bytes(*shape, dtype) <= SHARED_MEMORY]
    most, d, b = max((tuning.shared_bytes(*shape, dtype), *shape) for shape in accepted)
    assert max(kernel.shared for kernel in compiling(compiled_kernels.both_passes, d, b, name, 0)) <= most


@pytest.mark.slow
@pytest.mark.skipif(not KNOWN, reason="known of Triton 3.6 and 3.9")
@pytest.mark.parametrize("form", ["walk", "chain"])
def test_no_kernel_of_ttt_linear_has_a_stack(form: str, compiling: Callable[..., Any]) -> None:
    """d 64, b 16, bf16, forward and backward."""
    found = compiling(compiled_kernels.linear, 64, 16, form)
    assert len(found) == (2 if form == "walk" else 5)
    assert [one for one in found if one.stack or one.spilled or one.serialized] == []


@pytest.mark.slow
def test_ttt_mlp_side_by_side(compiling: Callable[..., Any]) -> None:
    """The kernels of the backward pass that wait for nothing spill nothing, the chains next to nothing (0 or 8 bytes with Triton
    3.6 and 3.9), and their products are not serialised."""
    found = compiling(compiled_kernels.mlp, 64, 16, "chain")
    by_name = {kernel.name: kernel for kernel in found}
    assert set(by_name) == {"forward_kernel", "backward_kernel", "reading_kernel", "chain_kernel", "tokens_kernel"}
    assert max(kernel.shared for kernel in found) <= tuning.shared_bytes(64, 16, torch.bfloat16)
    assert by_name["reading_kernel"].stack == by_name["tokens_kernel"].stack == 0
    chain, read = found[:2]  # of the forward pass
    assert max(chain.stack, by_name["chain_kernel"].stack) <= (16 if KNOWN else 256)
    assert not any(kernel.serialized for kernel in (chain, read, by_name["chain_kernel"]))


def test_what_does_not_fit_is_refused() -> None:
    """Of the rest, every launch is in a form that fits."""
    refused = {
        type(kernel): {(*shape, dtype) for shape in SHAPES for dtype in OPERANDS if kernel.shared_bytes(*shape, dtype) > SHARED_MEMORY}
        for kernel in (TTTLinearOnGPU(), TTTMLPOnGPU())
    }
    large = {(d, 64) for d in WIDTHS} | {(96, 32), (128, 32)}
    assert refused[TTTMLPOnGPU] == {(*shape, torch.float32) for shape in large}
    assert refused[TTTLinearOnGPU] == {(96, 64, torch.float32), (128, 64, torch.float32)}
    for (d, b), dtype, (heads, tokens) in itertools.product(SHAPES, OPERANDS, ((2, 8192), (2, 64), (1000, 8192))):
        call = Call.of(torch.empty(1, tokens, heads, d, dtype=dtype, device="meta"), b, 1)
        for direction in linear_tuning.KERNELS if (d, b, dtype) not in refused[TTTLinearOnGPU] else ():
            form = call.form(direction, call.segment())
            assert linear_tuning.shared_bytes(d, b, dtype.itemsize, form) <= SHARED_MEMORY
    little = Call(64, 64, 4, 4, 10_000, 166_912)  # a card with less shared memory takes the smaller form
    assert [call.form("backward", 64) for call in (little, little._replace(room=SHARED_MEMORY))] == ["chain", "walk"]


def test_the_form_of_ttt_linear() -> None:
    """On 132 multiprocessors, as an H100 has: chains where programs do not fill them, and a sequence has two segments."""

    def forms(heads: int, tokens: int = 4096) -> list[str]:
        call = Call.of(torch.empty(1, tokens, heads, 64, dtype=torch.bfloat16, device="meta"), 16, 1)
        return [call.form(direction, linear_tuning.CHAIN_SEGMENT) for direction in ("forward", "backward")]

    assert forms(32) == forms(263) == ["chain", "chain"] and forms(264) == forms(1000) == ["walk", "walk"]
    assert forms(32, 511) == ["walk", "walk"] and forms(32, 512) == ["chain", "chain"]
    with mock.patch.dict(linear_tuning.TABLE, {linear_tuning.key("backward", 64, 16, 2, 0): "walk"}):
        assert forms(32) == ["chain", "walk"] and forms(132) == ["chain", "chain"]


def test_the_form_of_ttt_mlp() -> None:
    """The walk where programs fill the device, or its cotangents no registers."""

    def split(kernel: str, per_sm: int, chunks: int | None = None) -> bool:
        return config(kernel, 64, 16, torch.bfloat16, per_sm, chunks).split

    assert [split("forward", per_sm) for per_sm in range(5)] == [True, False, False, False, False]
    assert [split("backward", per_sm) for per_sm in range(5)] == [True, True, False, False, False]
    assert not split("forward", 0, 31) and split("forward", 0, 32) and split("backward", 0, 1)
    assert not config("backward", 128, 16, torch.bfloat16).split  # cotangents of 1 MB do not fit registers
    given = [64, 4, 1, False]  # as JSON holds it
    with mock.patch.dict(tuning.TABLE, {tuning.key("forward", 64, 16, 2, 7): given}):
        assert list(config("forward", 64, 16, torch.bfloat16, 5)) == given  # four or more are one entry
        assert config("forward", 64, 16, torch.bfloat16, 3) != config("forward", 64, 16, torch.bfloat16, 4)


@pytest.mark.parametrize("split", [False, True])
def test_packed_documents_are_not_read_by_the_host(split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the meta device have no values: a pass that waits for one fails, as it would in a CUDA graph."""
    launched: list[str] = []

    class Launches:
        def __init__(self, name: str):
            self.name = name

        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return lambda *args, **options: launched.append(f"{self.name} {grid[0]}")

    for module in (forward, backward):
        for name in ("forward_kernel", "backward_kernel", "reading_kernel", "chain_kernel", "tokens_kernel"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, Launches(name))
    d, b, documents, tokens = 32, 16, 3, 1000

    def tensor(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device="meta")

    q, bounds = tensor(1, tokens, 2, d), torch.empty(documents + 1, dtype=torch.int64, device="meta")
    weights = (tensor(2, d, 4 * d), tensor(2, 4 * d), tensor(2, 4 * d, d), tensor(2, d))
    given = (q, q, q, tensor(1, tokens, 2), tensor(2, b))
    norm, launch = (tensor(2, d), tensor(2, d)), Config(4 * d, 4, 1, split)
    _, final, update, kept = forward.forward(*given, weights, *norm, bounds, b, 16, launch)
    backward.backward(*given, *norm, bounds, b, 16, final, kept, q, final, update, launch, launch)
    places = tokens // (16 * b) + documents  # of segments, for any lengths
    assert f"forward_kernel {2 * places}" in launched
    assert (f"chain_kernel {2 * documents}" in launched) == split
