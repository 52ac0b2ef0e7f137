"""Bytes that are kept for a backward pass: counted, not sampled, so that the figure is the same on every run."""

from __future__ import annotations

import weakref
from collections import Counter
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class _Kept:
    """One saved tensor, without its place in the graph, which would keep the graph alive; it goes with the graph."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor.detach()


class SavedBytes(AbstractContextManager["SavedBytes"]):
    """Counts what autograd saves while it is entered: a storage once, however many saved tensors look at it.

    Attributes:
        now: bytes that are kept at this moment.
        peak: the most there were at any moment.
    """

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._uses: Counter[int] = Counter()
        self._hooks = saved_tensors_hooks(self._pack, lambda kept: kept.tensor)

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, tensor: Tensor) -> _Kept:
        kept = _Kept(tensor)
        place, size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        self.now += 0 if self._uses[place] else size
        self.peak = max(self.peak, self.now)
        self._uses[place] += 1
        weakref.finalize(kept, self._gone, place, size)
        return kept

    def _gone(self, place: int, size: int) -> None:
        self._uses[place] -= 1
        self.now -= 0 if self._uses[place] else size
