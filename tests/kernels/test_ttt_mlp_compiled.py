"""TTT-MLP's kernels as Triton compiles them for an H100, and which launch is chosen: no device is needed."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from unittest import mock

import pytest
import torch
import triton
from compiled import SHARED_LIMIT
from compiled_kernels import both_passes

from metattt.kernels.triton.device import OPERANDS, SIZES, WIDTHS
from metattt.kernels.ttt_mlp.on_gpu import TTTMLPOnGPU
from metattt.kernels.ttt_mlp.tuning import TABLE, Config, config, key, shared_bytes, variants


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    """A process in which kernels are compiled, not interpreted."""
    with ProcessPoolExecutor(1, get_context("spawn")) as made:
        with mock.patch.dict(os.environ):  # only while it starts: kernels that this process imports are interpreted
            os.environ.pop("TRITON_INTERPRET", None)
            made.submit(int).result()
        yield made


def refused(d: int, b: int, dtype: torch.dtype) -> bool:
    return TTTMLPOnGPU().shared_bytes(d, b, dtype) > SHARED_LIMIT


def test_what_does_not_fit_is_refused() -> None:
    shapes = [(d, b) for d in WIDTHS for b in SIZES]
    assert not any(refused(d, b, dtype) for d, b in shapes for dtype in OPERANDS if dtype.itemsize == 2)
    fp32 = {shape for shape in shapes if refused(*shape, torch.float32)}
    assert fp32 == {(d, 64) for d in WIDTHS} | {(96, 32), (128, 32)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_the_largest_that_is_accepted_fits(name: str, process: ProcessPoolExecutor) -> None:
    dtype = getattr(torch, name)
    shapes = [(shared_bytes(d, b, dtype), d, b) for d in WIDTHS for b in SIZES if not refused(d, b, dtype)]
    most, d, b = max(shapes)
    found = process.submit(both_passes, d, b, name, 0).result()
    assert max(kernel.shared for kernel in found) <= most <= SHARED_LIMIT


@pytest.mark.slow
def test_side_by_side(process: ProcessPoolExecutor) -> None:
    """The kernels of the backward pass that wait for nothing spill nothing, the chains next to nothing (0 or 8 bytes with Triton
    3.6 and 3.9; nobody has seen what others do), and their products are not serialised."""
    most = 16 if triton.__version__.startswith(("3.6.", "3.9.")) else 256
    found = process.submit(both_passes, 64, 16, "bfloat16", 0).result()
    by_name = {kernel.name: kernel for kernel in found}
    assert set(by_name) == {"forward_kernel", "backward_kernel", "reading_kernel", "chain_kernel", "tokens_kernel"}
    assert max(kernel.shared for kernel in found) <= shared_bytes(64, 16, torch.bfloat16)
    assert by_name["reading_kernel"].stack == by_name["tokens_kernel"].stack == 0
    assert by_name["chain_kernel"].stack <= most and not by_name["chain_kernel"].serialized
    chain, read = found[:2]  # of the forward pass
    assert chain.stack <= most and not chain.serialized and not read.serialized


def test_the_walk_where_programs_fill_the_device() -> None:
    def split(kernel: str, per_sm: int, chunks: int | None = None) -> bool:
        return config(kernel, 64, 16, torch.bfloat16, per_sm, chunks).split

    assert [split("forward", per_sm) for per_sm in range(5)] == [True, False, False, False, False]
    assert [split("backward", per_sm) for per_sm in range(5)] == [True, True, False, False, False]
    assert not split("forward", 0, 31) and split("forward", 0, 32) and split("backward", 0, 1)
    assert not config("backward", 128, 16, torch.bfloat16).split  # cotangents of 1 MB do not fit registers


def test_the_table_overrules() -> None:
    given = [64, 4, 1, False]  # as JSON holds it
    with mock.patch.dict(TABLE, {key("forward", 64, 16, 2, 7): given}):
        assert list(config("forward", 64, 16, torch.bfloat16, 5)) == given  # four or more are one entry
        assert config("forward", 64, 16, torch.bfloat16, 3) != config("forward", 64, 16, torch.bfloat16, 4)


def test_variants_change_the_launch_and_undo_it() -> None:
    used = {kernel: config(kernel, 64, 16, torch.bfloat16, 1) for kernel in ("forward", "backward")}
    seen = set()
    for name, change in variants(64, 16, torch.bfloat16, per_sm=1):
        kernel = name.partition(":")[0]
        undo = change()
        seen.add((kernel, config(kernel, 64, 16, torch.bfloat16, 1).split))
        assert config(kernel, 64, 16, torch.bfloat16, 1) != used[kernel]
        undo()
        assert {kernel: config(kernel, 64, 16, torch.bfloat16, 1) for kernel in used} == used
    assert seen == {(kernel, split) for kernel in used for split in (False, True)}
    assert not any(": side" in name for name, _ in variants(128, 16, torch.bfloat16) if name.startswith("backward"))


@pytest.mark.parametrize("split", [False, True])
def test_packed_documents_are_not_read_by_the_host(split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the meta device have no values: a pass that waits for one fails, as it would in a CUDA graph."""
    from metattt.kernels.ttt_mlp import backward, forward

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
