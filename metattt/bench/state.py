"""`metattt bench state`: what the known layers carry, and what a token costs them, after more and more tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from metattt.bench.base import Benchmark, check_counts, require
from metattt.bench.report import Check, Panel, Report, Row
from metattt.bench.timing import in_turn
from metattt.catalog.known_layers import known_layers
from metattt.composition.compose import build
from metattt.errors import MetaTTTError, check_choice, check_integer
from metattt.layer import TTTLayer
from metattt.registry import register
from metattt.state import State
from metattt.testing.specimen import distance


class Point(NamedTuple):
    """One layer after `tokens` tokens: bytes of its state, and milliseconds a token, in a long call and alone."""

    tokens: int
    state: int
    call: float
    decode: float | None


@register(group="benchmark", name="state")
class StateAndCost(Benchmark):
    """Reads one sequence in calls of `call` tokens and measures where it has read `lengths` tokens.

    Args:
        layers: names; an empty list takes all known layers.
        lengths: T, rising; multiples of `call`.
        call: tokens a call.
        dim, num_heads: of the layers.
        max_state: bytes; a layer whose state is larger is not taken further.
        rounds: timed calls of every length, in turn, of which the shortest counts.
    """

    def __init__(
        self,
        layers: list[str] | None = None,
        lengths: Sequence[int] = (1024, 2048, 4096, 8192, 16384),
        call: int = 1024,
        dim: int = 64,
        num_heads: int = 1,
        max_state: int = 2**28,
        rounds: int = 5,
    ):
        check_counts(lengths=lengths, call=call, dim=dim, num_heads=num_heads, rounds=rounds)
        check_integer("benchmark.max_state", max_state)
        for name in layers or ():
            check_choice("benchmark.layers", name, known_layers())
        if (
            any(length % call for length in lengths)
            or any(a >= b for a, b in pairwise(lengths))
        ):
            raise MetaTTTError(
                f"benchmark.lengths={list(lengths)} is not allowed: rising multiples of benchmark.call={call}"
            )
        self.layers, self.lengths, self.call = list(layers or known_layers()), list(lengths), call
        self.dim, self.num_heads, self.max_state, self.rounds = dim, num_heads, max_state, rounds

    def run(self, say: Callable[[str], None]) -> Report:
        points: dict[str, list[Point]] = {}
        checks: list[Check] = []
        with torch.no_grad():
            for name in self.layers:
                say(name)
                layer = build(f"layer={name}", f"dim={self.dim}", f"num_heads={self.num_heads}", "seed=0")
                try:
                    checks.append(self._check(name, layer))
                except NoState:
                    points[name] = self._whole(layer)
                else:
                    points[name] = self._grow(layer)
        text = (
            f"One layer, D = {self.dim}, {self.num_heads} head(s), one sequence, fp32, no gradients. The sequence is read in calls of "
            f"{self.call} tokens. State: what the layer carries after T tokens and one more. Time per token in a call: of the call that "
            f"ends at T. The shortest of {self.rounds} rounds, in each of which every length has its turn. Layers without "
            "a state between calls read all T tokens at once. A dash: the state "
            f"would be larger than {self.max_state / 2**20:.0f} MiB, or there is no state to decode from."
        )
        tables = {
            "State (bytes)": self._table(points, lambda point: point.state),
            "Time per token in a call (ms)": self._table(points, lambda point: point.call),
            "Time of one token after T (ms)": self._table(points, lambda point: point.decode),
        }
        settings = {
            "lengths": self.lengths,
            "call": self.call,
            "dim": self.dim,
            "num_heads": self.num_heads,
            "rounds": self.rounds,
        }
        panels = [
            self._panel("State", "bytes", points, lambda point: point.state),
            self._panel("Decoding one token", "ms", points, lambda point: point.decode),
            self._panel("A token in a call", "ms", points, lambda point: point.call),
        ]
        return Report("State and cost of the known layers", text, tables, checks, settings, panels)

    def _check(self, name: str, layer: TTTLayer) -> Check:
        """One call against two that hand the state on."""
        x = self._tokens(96)
        whole, state = layer(x)
        try:
            first, state = layer(x[:, :70])
            second, _ = layer(x[:, 70:], state)
        except MetaTTTError as refused:
            raise NoState from refused
        if getattr(layer, "optimizer", None) is not None and layer.optimizer.read == "final":  # a call answers all its queries at its end
            raise NoState
        return require(f"{name}, one call and two, outputs", distance(torch.cat([first, second], 1), whole), 1e-4)

    def _grow(self, layer: TTTLayer) -> list[Point]:
        sizes: dict[int, int] = {}
        calls: dict[str, Callable[[], object]] = {}
        state: State | None = None
        token = self._tokens(1)
        for end in range(self.call, self.lengths[-1] + 1, self.call):
            x, before = self._tokens(self.call, seed=end), state
            state = layer(x, before)[1]
            if end in self.lengths:
                sizes[end] = layer(token, state)[1].nbytes
                calls |= {f"call {end}": partial(layer, x, before), f"decode {end}": partial(layer, token, state)}
            if state.nbytes > self.max_state:
                break
        least = self._least(calls)
        return [
            Point(end, size, least[f"call {end}"] / self.call, least[f"decode {end}"]) for end, size in sizes.items()
        ]

    def _whole(self, layer: TTTLayer) -> list[Point]:
        """For layers that read all tokens at once."""
        fitting = [
            length for length in self.lengths if self.num_heads * length**2 * 4 <= 16 * self.max_state
        ]  # attention's scores
        least = self._least({str(length): partial(layer, self._tokens(length)) for length in fitting})
        return [
            Point(length, layer(self._tokens(length))[1].nbytes, least[str(length)] / length, None)
            for length in fitting
        ]

    def _least(self, calls: dict[str, Callable[[], object]]) -> dict[str, float]:
        """Milliseconds of the shortest call: others were disturbed."""
        return {name: 1000 * min(seconds) for name, seconds in in_turn(calls, self.rounds).items()}

    def _tokens(self, count: int, seed: int = 0) -> Tensor:
        return torch.randn(1, count, self.dim, generator=torch.Generator().manual_seed(seed))

    def _table(self, points: dict[str, list[Point]], value: Callable[[Point], float | None]) -> list[Row]:
        rows = []
        for name, found in points.items():
            by_length = {point.tokens: value(point) for point in found}
            rows.append({"layer": name} | {f"T = {length}": by_length.get(length) for length in self.lengths})
        return rows

    def _panel(
        self, title: str, unit: str, points: dict[str, list[Point]], value: Callable[[Point], float | None]
    ) -> Panel:
        curves = {}
        for name, found in points.items():
            pairs = [(point.tokens, y) for point in found if (y := value(point)) is not None]
            curves[name] = ([x for x, _ in pairs], [y for _, y in pairs])
        return Panel(title, "tokens read", unit, curves)


class NoState(Exception):
    """Every call of the layer is a set of tokens of its own."""
