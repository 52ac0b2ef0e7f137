"""Wall time of functions that are called in turn, so that a busy machine slows all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch


class Summary(NamedTuple):
    """Smallest, middle and largest of several measurements."""

    least: float
    median: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.least:.3g} to {self.most:.3g})"


def summary(values: Sequence[float]) -> Summary:
    return Summary(min(values), statistics.median(values), max(values))


def in_turn(functions: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 1) -> dict[str, list[float]]:
    """Seconds of every call, by name: each round calls every function once, in the given order.

    Args:
        functions: what to time.
        rounds: measured calls of each.
        warmup: calls of each before that.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(warmup + rounds):
        for name, function in functions.items():
            took = measure(function)
            if number >= warmup:
                seconds[name].append(took)
    return seconds


def measure(function: Callable[[], object]) -> float:
    """Seconds of one call; work on a GPU is waited for."""
    _wait()
    started = time.perf_counter()
    function()
    _wait()
    return time.perf_counter() - started


def ratios(slower: Sequence[float], faster: Sequence[float]) -> Summary:
    """How many times longer the one took than the other, round by round."""
    return summary([a / b for a, b in zip(slower, faster, strict=True)])


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
