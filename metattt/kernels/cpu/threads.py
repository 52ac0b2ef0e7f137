"""Learners divided among threads: a library's function gives up the lock of the interpreter while it computes."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

_pool: list[ThreadPoolExecutor] = []


def divide(function: Callable[[int, int], int], learners: int, threads: int) -> list[int]:
    """`function(first, last)` for all learners: this thread and others take equal shares, `threads` of them."""
    ends = [learners * i // threads for i in range(threads + 1)]
    shares = list(pairwise(ends))
    others = [_threads().submit(function, *share) for share in shares[1:]]
    return [function(*shares[0]), *(other.result() for other in others)]


def _threads() -> ThreadPoolExecutor:
    if not _pool:
        _pool.append(ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="metattt"))
    return _pool[0]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.clear)  # its threads are not forked
