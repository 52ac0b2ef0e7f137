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


class Timed(NamedTuple):
    """Seconds of the calls of one function: on the device, and of the host until it had given the device its work."""

    device: list[float]
    host: list[float]


FLUSH = 2**29
"""Bytes that are written before a timed call: ten times the L2 of an H100, and as long to write as the host needs to
begin the call."""


def on_device(
    functions: Mapping[str, Callable[[], object]], rounds: int, device: str, warmup: int = 2
) -> dict[str, Timed]:
    """As `in_turn`, between two events on the device and with nothing in its L2 at the start.

    Args:
        functions: what to time.
        rounds: measured calls of each.
        device: `cuda`; on `cpu` wall time stands for both.
        warmup: calls of each before that.
    """
    if device != "cuda":
        return {name: Timed(took, took) for name, took in in_turn(functions, rounds, warmup).items()}
    for _ in range(warmup):
        for function in functions.values():
            function()
    torch.cuda.synchronize()
    flush = torch.empty(FLUSH, dtype=torch.int8, device=device)
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in functions}
    host: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            flush.zero_()
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            started = time.perf_counter()
            function()
            host[name].append(time.perf_counter() - started)
            last.record()
            events[name].append((first, last))
        torch.cuda.synchronize()  # once a round: the host must not run so far ahead that memory is not given back
    return {name: Timed([a.elapsed_time(b) / 1000 for a, b in pairs], host[name]) for name, pairs in events.items()}


def as_graph(function: Callable[[], object]) -> Callable[[], None]:
    """The work that a call gives the device, as a graph that is replayed without the host's part of it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay
