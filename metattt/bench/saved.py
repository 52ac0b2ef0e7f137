"""Bytes that are kept for a backward pass: counted, not sampled, so that the figure is the same on every run."""

from __future__ import annotations

import weakref
from types import TracebackType

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class _Kept:
    """One saved tensor, without its place in the graph, which would keep the graph alive; it goes with the graph."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor.detach()


class SavedBytes:
    """Counts what autograd saves while it is entered: a storage once, however many saved tensors look at it.

    Attributes:
        now: bytes that are kept at this moment.
        peak: the most there were at any moment.
    """

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._uses: dict[int, int] = {}
        self._hooks = saved_tensors_hooks(self._pack, lambda kept: kept.tensor)

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def _pack(self, tensor: Tensor) -> _Kept:
        kept, storage = _Kept(tensor), tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if not self._uses.get(place):
            self.now += size
            self.peak = max(self.peak, self.now)
        self._uses[place] = self._uses.get(place, 0) + 1
        weakref.finalize(kept, self._gone, place, size)
        return kept

    def _gone(self, place: int, size: int) -> None:
        self._uses[place] -= 1
        if not self._uses[place]:
            del self._uses[place]
            self.now -= size
