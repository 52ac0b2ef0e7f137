"""What the launches of TTT-Linear take of a card, as Triton compiles them; no GPU is needed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from metattt.kernels.triton.device import SHARED_MEMORY
from metattt.kernels.triton.on_gpu import SIZES, WIDTHS
from metattt.kernels.ttt_linear import tuning
from metattt.kernels.ttt_linear.on_gpu import TTTLinearOnGPU

SCRIPT = Path(__file__).with_name("shared_memory_of_ttt_linear.py")


def allocated(*shapes: str) -> list[tuple[str, int, int]]:
    """Kernel, bytes of shared memory, and what `tuning` says of it, for "d,b,type,form"."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, SCRIPT, *shapes], env=environment, capture_output=True, text=True, check=True
    )
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("triton")]
    return [(words[-4], int(words[-2]), int(words[-1])) for words in lines]


def test_launches_take_no_more_shared_memory_than_said() -> None:
    """The largest of 16 bits, and one of fp32; `results/gpu/ttt_linear_shared_memory.txt` has others."""
    found = allocated("64,64,bfloat16,chain", "64,16,float32,walk", "64,16,float32,chain")
    assert [name for name, _, _ in found[-7:]] == [
        "forward.forward_kernel",
        "backward.backward_kernel",
        "forward_chain.chain_kernel",
        "forward_chain.read_kernel",
        "backward_chain.outputs_kernel",
        "backward_chain.chain_kernel",
        "backward_chain.inputs_kernel",
    ]
    assert all(0 < shared <= bound <= SHARED_MEMORY for _, shared, bound in found)


def test_what_is_accepted_is_launched_in_a_form_that_fits() -> None:
    refused = []
    for width in WIDTHS:
        for size in SIZES:
            for dtype in (torch.float32, torch.bfloat16):
                needed = TTTLinearOnGPU().shared_bytes(width, size, dtype)
                if needed > SHARED_MEMORY:
                    refused.append((width, size, dtype))
                    continue
                for heads, tokens in ((2, 8192), (2, size), (1000, 8192)):
                    k = torch.empty(1, tokens, heads, width, dtype=dtype, device="meta")
                    call = tuning.Call.of(k, size, 1)
                    for direction in tuning.KERNELS:
                        form = call.form(direction, call.segment())
                        assert tuning.shared_bytes(width, size, dtype.itemsize, form) <= SHARED_MEMORY
    assert refused == [(96, 64, torch.float32), (128, 64, torch.float32)]


def test_a_card_with_less_shared_memory_takes_the_smaller_form() -> None:
    call = tuning.Call(64, 64, 4, 4, 10_000, 166_912)
    assert call.form("backward", tuning.SEGMENT) == "chain"
    assert call._replace(room=SHARED_MEMORY).form("backward", tuning.SEGMENT) == "walk"
