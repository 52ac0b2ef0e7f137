"""Launches of the Triton operations: which one is chosen, and what it takes of a card as Triton compiles it for an
H100. No device is needed."""

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
from metattt.kernels.ttt_mlp import tuning
from metattt.kernels.ttt_mlp.on_gpu import TTTMLPOnGPU
from metattt.kernels.ttt_mlp.tuning import config

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
    """The largest shape that is accepted; and a step of decoding."""
    most, d, b = max((tuning.shared_bytes(*shape), *shape) for shape in SHAPES if tuning.shared_bytes(*shape) <= SHARED_MEMORY)
    assert max(kernel.shared for kernel in compiling(compiled_kernels.mlp, d, b)) <= most
    for op in ("ttt_linear", "ttt_mlp"):
        assert all(0 < one.shared <= SHARED_MEMORY for one in compiling(compiled_kernels.decoding, op, 64))


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
