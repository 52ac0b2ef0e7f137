"""What the launches of TTT-Linear take of a card, as Triton compiles them; no GPU is needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import triton
from compiled import Compiled

from metattt.kernels.triton.device import SHARED_MEMORY, SIZES, WIDTHS
from metattt.kernels.ttt_linear import tuning
from metattt.kernels.ttt_linear.on_gpu import TTTLinearOnGPU

SCRIPT = Path(__file__).parent.with_name("shared_memory_of_ttt_linear.py")


def told_by(*words: str | Path) -> list[str]:
    """Lines that Python prints in a process of its own, whose kernels are compiled and not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, *words]
    return subprocess.run(
        command, cwd=SCRIPT.parent, env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()


def allocated(*shapes: str) -> list[tuple[str, int, int]]:
    """Kernel, bytes of shared memory, and what `tuning` says of it, for "d,b,type,form"."""
    lines = [line.split() for line in told_by(SCRIPT, *shapes) if line.startswith("triton")]
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


@pytest.mark.skipif(not triton.__version__.startswith(("3.6.", "3.9.")), reason="known of Triton 3.6 and 3.9")
def test_no_kernel_of_the_usual_shape_has_a_stack() -> None:
    """d 64, b 16, bf16, both forms, forward and backward."""
    code = "import json, compiled_kernels as c; print(json.dumps([c.linear(64, 16, form) for form in c.FORMS]))"
    walk, chain = (list(map(Compiled._make, form)) for form in json.loads(told_by("-c", code)[-1]))
    assert [one.name for one in walk] == ["forward_kernel", "backward_kernel"] and len(chain) == 5
    assert [one for one in walk + chain if one.stack or one.spilled or one.serialized] == []


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
