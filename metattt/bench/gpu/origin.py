"""Where results are from: the card, the libraries, and the sources that they depend on."""

from __future__ import annotations

import hashlib
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

from metattt.errors import MetaTTTError

PACKAGE = Path(__file__).resolve().parents[2]
MEASURED_BY = ("calls", "decoding", "operations", "others", "problems", "small", "tools")
MEASURING = ("bench/peers.py", "bench/timing.py", *(f"bench/gpu/{name}.py" for name in MEASURED_BY))
"""Beside the kernels, the sources that a result depends on."""


def card_name(device: str) -> str:
    """The name of the card, or `interpreter`."""
    if device == "cpu":
        return "interpreter"
    try:
        return torch.cuda.get_device_name()
    except RuntimeError as error:
        raise MetaTTTError(f"the CUDA device does not answer: {str(error).splitlines()[0]}") from error


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.") or "card"


def facts(device: str) -> dict[str, Any]:
    """What the results depend on, and what else says where they are from."""
    import triton

    return {
        "code": digest(), "card": card_name(device), "torch": torch.__version__, "triton": triton.__version__,
        "commit": _said("git", "-C", str(PACKAGE), "rev-parse", "--short", "HEAD"), "cuda": torch.version.cuda,
        "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if device == "cuda" else None,
    }  # fmt: skip


def digest() -> str:
    """Of the sources that results depend on: the kernels, and what measures them."""
    total = hashlib.sha256()
    for file in sorted([*(PACKAGE / "kernels").rglob("*.py"), *(PACKAGE / name for name in MEASURING)]):
        total.update(f"{file.relative_to(PACKAGE)}\0".encode() + file.read_bytes() + b"\0")
    return total.hexdigest()[:12]


def _said(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):  # not installed, no repository, or it does not answer
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None
