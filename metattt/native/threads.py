"""Learners divided among threads: a library's function gives up the lock of the interpreter while it computes."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import pairwise

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


def _threads() -> ThreadPoolExecutor:
    if not _pool:
        _pool.append(ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="metattt"))
    return _pool[0]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.clear)  # its threads are not forked
