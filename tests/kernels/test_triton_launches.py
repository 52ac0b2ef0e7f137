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

from metattt.kernels.triton.device import OPERANDS, SHARED_MEMORY, SIZES, WIDTHS
from metattt.kernels.ttt_linear import tuning as linear_tuning
from metattt.kernels.ttt_linear.on_gpu import TTTLinearOnGPU
from metattt.kernels.ttt_mlp import backward, forward, tuning
from metattt.kernels.ttt_mlp.on_gpu import TTTMLPOnGPU
from metattt.kernels.ttt_mlp.tuning import Config, config

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
    for d, b, dtype in ((64, 64, "bfloat16"), (64, 16, "float32")):
        found = compiling(compiled_kernels.linear, d, b, dtype)
        most = linear_tuning.shared_bytes(d, b, getattr(torch, dtype).itemsize)
        assert len(found) == 4 and all(0 < one.shared <= most <= SHARED_MEMORY for one in found)


@pytest.mark.slow
def test_ttt_mlp_takes_no_more_shared_memory_than_said(compiling: Callable[..., Any]) -> None:
    """The largest shape that is accepted."""
    most, d, b = max((tuning.shared_bytes(*shape), *shape) for shape in SHAPES if tuning.shared_bytes(*shape) <= SHARED_MEMORY)
    assert max(kernel.shared for kernel in compiling(compiled_kernels.mlp, d, b)) <= most


@pytest.mark.slow
@pytest.mark.parametrize("op", ["linear", "mlp"])
def test_products_read_where_addresses_say(op: str, compiling: Callable[..., Any]) -> None:
    """d 64, b 16: no operand of a product is looked for at an address that may be data. The assembler of Triton 3.6 made
    kernels of TTT-MLP that did in the first mini-batch, and an H100 stopped there."""
    found = compiling(getattr(compiled_kernels, op), 64, 16)
    assert sum(one.products for one in found) > 20
    assert {one.name: one.misled for one in found if one.misled} == {}


def test_what_does_not_fit_is_refused() -> None:
    refused = {
        type(kernel): {(*shape, dtype) for shape in SHAPES for dtype in OPERANDS if kernel.shared_bytes(*shape, dtype) > SHARED_MEMORY}
        for kernel in (TTTLinearOnGPU(), TTTMLPOnGPU())
    }
    large = {(d, 64) for d in WIDTHS} | {(96, 32), (128, 32)}
    assert refused[TTTMLPOnGPU] == {(*shape, dtype) for shape in large for dtype in OPERANDS}  # its products are of fp32
    assert refused[TTTLinearOnGPU] == {(d, 64, torch.float32) for d in (96, 128)}


def test_a_table_overrules_the_launch() -> None:
    """As JSON holds it."""
    with mock.patch.dict(tuning.TABLE, {tuning.key("forward", 64, 16): [32, 8, 2]}):
        assert list(config("forward", 64, 16)) == [32, 8, 2] != list(config("backward", 64, 16))
    with mock.patch.dict(linear_tuning.TABLE, {linear_tuning.key("chain", 64, 8, 2): [8, 128]}):
        assert linear_tuning.launch("chain", 64, 16, 2) == (8, 128) and linear_tuning.launch("chain", 64, 16, 4) == (4, None)


def test_packed_documents_are_not_read_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the meta device have no values: a pass that waits for one fails, as it would in a CUDA graph."""
    launched: list[str] = []

    class Launches:
        def __init__(self, name: str):
            self.name = name

        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return lambda *args, **options: launched.append(f"{self.name} {grid[0]}")

    for module in (forward, backward):
        for name in ("forward_kernel", "backward_kernel"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, Launches(name))
    d, b, documents, tokens = 32, 16, 3, 1000

    def tensor(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device="meta")

    q, bounds = tensor(1, tokens, 2, d), torch.empty(documents + 1, dtype=torch.int64, device="meta")
    weights = (tensor(2, d, 4 * d), tensor(2, 4 * d), tensor(2, 4 * d, d), tensor(2, d))
    given = (q, q, q, tensor(1, tokens, 2), tensor(2, b))
    norm, launch = (tensor(2, d), tensor(2, d)), Config(4 * d, 4, 1)
    _, final, update, kept = forward.forward(*given, weights, *norm, bounds, b, 16, launch)
    backward.backward(*given, *norm, bounds, b, 16, final, kept, q, final, update, launch, launch)
    places = tokens // (16 * b) + documents  # of segments, for any lengths
    assert f"forward_kernel {2 * places}" in launched and f"backward_kernel {2 * documents}" in launched
