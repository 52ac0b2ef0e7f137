"""Calls of a function of a compiled library: its arguments as 8-byte numbers, its work divided among threads."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from metattt.native.threads import divide


def use_large_pages(library: ctypes.CDLL, *made: Tensor | None) -> None:
    """For new tensors: handing out the memory of a long sequence in small pages takes a fifth of the time of the
    forward pass."""
    for x in made:
        if x is not None:
            library.use_large_pages(ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(x.nbytes))


def run(
    function: Any,
    sizes: Sequence[int],
    views: Sequence[Tensor | None],
    arrays: Sequence[Tensor | int | None],
    units: int,
    shares: int,
) -> bool:
    """Calls a function of a library for all units of its work, and says whether it has failed for any. (ctypes gives up
    the lock of the interpreter.)

    Args:
        sizes, views, arrays: what the fields of the function's struct are made of, in order, 8 bytes each: numbers;
            tensors `[B, H, T]` or `[B, H, T, d]` of any strides; dense tensors, and numbers. None: a null pointer.
        units: the number of learners, of rows, or of what else can be computed by itself.
        shares: how many threads are worth it, at most; torch may allow fewer.
    """
    numbers, held = list(sizes), list[Tensor]()  # copies are held on to until the call ends
    for x in views:
        if x is None:
            numbers += 0, 0, 0, 0
        else:
            held.append(x if x.ndim == 3 or x.stride(3) == 1 else x.contiguous())
            numbers += held[-1].data_ptr(), *held[-1].stride()[:3]
    for array in arrays:
        if isinstance(array, Tensor):
            held.append(array.contiguous())
        numbers.append(held[-1].data_ptr() if isinstance(array, Tensor) else array or 0)
    packed, threads = struct.pack(f"={len(numbers)}q", *numbers), max(1, min(torch.get_num_threads(), units, shares))

    def some(first: int, last: int) -> int:
        found: int = function(packed, ctypes.c_int64(first), ctypes.c_int64(last))
        return found

    return any([some(0, units)] if threads == 1 else divide(some, units, threads))
