"""Learners divided among threads: a library's function gives up the lock of the interpreter while it computes."""

from __future__ import annotations

import ctypes
import os
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

_pool: list[ThreadPoolExecutor] = []


def divide(function: Callable[[int, int], int], learners: int, threads: int) -> list[int]:
    """`function(first, last)` for all learners in equal shares: this thread and others take one after the other, and
    this one all of them where no thread can begin, as while the interpreter exits."""
    ends = [learners * i // threads for i in range(threads + 1)]
    left, found, others = deque(pairwise(ends)), list[int](), list[Future[None]]()

    def work() -> None:  # whoever begins late, when the memory may be gone, finds nothing left
        with suppress(IndexError):
            while True:
                found.append(function(*left.popleft()))

    try:
        with suppress(RuntimeError):
            for _ in range(threads - 1):
                others.append(_threads().submit(work))
        work()
        for other in others:
            other.result()
    except BaseException:  # Ctrl-C: the caller gives up memory that the others still write into
        left.clear()
        wait(others)
        raise
    while len(found) < threads:  # one that was queued although its thread did not begin, and then taken by another
        time.sleep(1e-4)
    return found


def run(
    function: Any,
    sizes: Sequence[int],
    views: Sequence[Tensor | None],
    arrays: Sequence[Tensor | int | None],
    learners: int,
    shares: int,
) -> bool:
    """Calls a function of a library for all learners, and says whether it has failed for any. (ctypes gives up the lock
    of the interpreter.)

    Args:
        sizes, views, arrays: what the fields of the function's struct are made of, in order, 8 bytes each: numbers;
            tensors of any strides, of which the first three are told; dense tensors, and numbers. None: a null pointer.
        shares: how many threads are worth it, at most; torch may allow fewer.
    """
    numbers, held = list(sizes), list[Tensor]()  # copies are held on to until the call ends
    for x in views:
        if x is None:
            numbers += 0, 0, 0, 0
        else:
            held.append(x if x.ndim < 4 or x.stride(3) == 1 else x.contiguous())
            numbers += held[-1].data_ptr(), *(*held[-1].stride(), 0, 0)[:3]
    for array in arrays:
        if isinstance(array, Tensor):
            held.append(array.contiguous())
        numbers.append(held[-1].data_ptr() if isinstance(array, Tensor) else array or 0)
    packed, threads = struct.pack(f"={len(numbers)}q", *numbers), max(1, min(torch.get_num_threads(), learners, shares))

    def some(first: int, last: int) -> int:
        found: int = function(packed, ctypes.c_int64(first), ctypes.c_int64(last))
        return found

    return any([some(0, learners)] if threads == 1 else divide(some, learners, threads))


def _threads() -> ThreadPoolExecutor:
    if not _pool:
        _pool.append(ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="metattt"))
    return _pool[0]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.clear)  # its threads are not forked
