"""Checks sizes against the memory of this machine before tensors are made."""

from __future__ import annotations

import math
import os
from functools import cache
from pathlib import Path

import torch

from metattt.errors import MetaTTTError


def check_memory_limit(count: float, what: str, advice: str) -> None:
    """Raises an error for tensors that this machine cannot hold, before they are made.

    Args:
        count: a lower bound of their numbers, in float32.
        what: the owner of the tensors: the message begins with it.
        advice: the overrides that make it smaller.

    Raises:
        MetaTTTError: they take more than the machine's memory; never on another device than the CPU.
    """
    room, size = memory(), 4 * count
    if size > room and torch.get_default_device().type == "cpu":
        raise MetaTTTError(
            f"{what} would have {count:,.0f} numbers, {size / 1e9:,.1f} GB, and this machine has {room / 1e9:,.1f} "
            f"GB: {advice}"
        )


@cache
def memory() -> float:
    """Bytes of memory that this process may use; infinite if the system does not report it."""
    found = []
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", ()):
        found.append(float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")))
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(file).read_text().strip()
        except OSError:
            continue
        found += [float(text)] if text.isdigit() else []
    return min(found, default=math.inf)
