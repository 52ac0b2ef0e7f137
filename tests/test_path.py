"""The way of a call through the code is short: how many files and functions of ours one forward pass meets."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import metattt

ROOT = str(Path(metattt.__file__).parent)


def met(form: str) -> tuple[Counter[str], int]:
    """Calls by file, and of all, in a forward pass of TTT-Linear over 64 tokens, with derivatives to come."""
    layer, x = metattt.build("layer=ttt_linear", "dim=64", "num_heads=4", f"layer.form={form}"), torch.randn(1, 64, 64)
    layer(x)  # what is found out once
    files: Counter[str] = Counter()

    def follow(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            files[frame.f_code.co_filename.removeprefix(ROOT)] += 1

    sys.setprofile(follow)
    try:
        layer(x)
    finally:
        sys.setprofile(None)
    return files, files.total()


@pytest.mark.parametrize(("form", "most_files", "most_calls"), [("fused", 15, 124), ("dual", 18, 442)])
def test_one_forward_pass(form: str, most_files: int, most_calls: int) -> None:
    files, calls = met(form)
    assert len(files) <= most_files, files
    assert calls <= most_calls, files
