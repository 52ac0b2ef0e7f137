"""Times of one call, as every subject records them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from metattt.bench.timing import Timed, on_device, summary

Way = Callable[[], object]


def under(change: Callable[[], Callable[[], None]], way: Way) -> Way:
    """The same call with a change of the launch."""

    def call() -> object:
        undo = change()
        try:
            return way()
        finally:
            undo()

    return call


def timed_call(way: Way, rounds: int, device: str) -> dict[str, Any]:
    """Times of a call: the first of its process, which compiles, and those after it."""
    _reset_peak(device)
    started = time.perf_counter()
    result = way()
    finite = all(bool(x.isfinite().all()) for x in _tensors(result))  # waits for the device
    first = time.perf_counter() - started
    del result
    took = on_device({"call": way}, rounds, device)["call"]
    return {**in_milliseconds(took), "first call, s": first, "finite": finite, "peak, GB": _peak(device)}


def in_milliseconds(took: Timed) -> dict[str, Any]:
    return {
        **{f"ms, {key}": 1000 * value for key, value in summary(took.device)._asdict().items()},
        "host, ms": 1000 * statistics.median(took.host),
        "calls": len(took.device),
    }


def _tensors(result: object) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [x for x in result if isinstance(x, Tensor)] if isinstance(result, Sequence) else []


def _reset_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def _peak(device: str) -> float | None:
    return torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else None
