"""`metattt bench outer`: the price of the outer derivative, in time and in what is kept for the backward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from metattt.bench.base import Benchmark, check_counts, require
from metattt.bench.report import Check, Report, Row
from metattt.bench.saved import SavedBytes
from metattt.bench.timing import in_turn, ratios, summary
from metattt.composition.compose import build
from metattt.layer import TTTLayer
from metattt.registry import register
from metattt.testing.specimen import distance, randomize

CAUSAL = ("ttt_linear", "ttt_mlp")
CONVERGED = (
    "layer=custom", "learner=linear_map", "learner.bias=true", "task=reconstruction", "optimizer=momentum",
    "optimizer.mini_batch_size=1", "optimizer.anchor=batch", "optimizer.read=final", "optimizer.momentum=none",
    "optimizer.decay=constant", "optimizer.decay_init=0.97", "optimizer.decay_to_init=true", "optimizer.base_lr=0.002",
    "optimizer.lr=constant", "optimizer.lr_scale=none",
)  # fmt: skip
"""Ridge regression by gradient descent on all tokens: the fixed point that `implicit` differentiates."""


@register(group="benchmark", name="outer")
class Outer(Benchmark):
    """Forward and backward of one layer with each outer derivative, one sequence in fp32.

    Args:
        length: T, tokens.
        dim: model width D.
        num_heads: heads H.
        steps: inner steps of the layer that converges, with a sequence of `converged_length` tokens.
        converged_length: tokens of that layer.
        rounds: timed calls of each way, in turn.
    """

    def __init__(
        self,
        length: int = 512,
        dim: int = 64,
        num_heads: int = 4,
        steps: int = 300,
        converged_length: int = 64,
        rounds: int = 5,
    ):
        check_counts(
            length=length, dim=dim, num_heads=num_heads, steps=steps, converged_length=converged_length, rounds=rounds
        )
        self.length, self.dim, self.num_heads = length, dim, num_heads
        self.steps, self.converged_length, self.rounds = steps, converged_length, rounds

    def run(self, say: Callable[[str], None]) -> Report:
        checks: list[Check] = []
        rows: list[Row] = []
        for name in (*CAUSAL, "ridge"):
            given = (
                (*CONVERGED, f"optimizer.steps={self.steps}")
                if name == "ridge"
                else (f"layer={name}", "layer.form=dual")
            )
            modes = ("exact", "first_order", "implicit") if name == "ridge" else ("exact", "first_order")
            layers = {mode: self._layer(*given, f"layer.outer={mode}") for mode in modes}
            length = self.converged_length if name == "ridge" else self.length
            x = torch.randn(1, length, self.dim, generator=torch.Generator().manual_seed(1))
            with torch.no_grad():
                outputs = {mode: layer(x)[0] for mode, layer in layers.items()}
            checks += [
                require(f"{name}, outputs of {mode} and exact", distance(y, outputs["exact"]), 1e-5)
                for mode, y in outputs.items()
                if mode != "exact"
            ]
            ways: dict[str, Callable[[], object]] = {mode: _differentiated(layer, x) for mode, layer in layers.items()}
            ways["zeroth_order"] = _two_points(layers["exact"], x)
            say(f"{name}: {self.rounds} rounds of {', '.join(ways)}")
            seconds = in_turn(ways, self.rounds)
            kept = {}
            for way, function in ways.items():
                with SavedBytes() as saved:
                    function()
                kept[way] = saved.peak / 1e6
            for way, took in seconds.items():
                rows.append({
                    "layer": name, "outer": way, "ms": 1000 * summary(took).median,
                    "times exact": ratios(took, seconds["exact"]).median,
                    "MB kept": kept[way], "MB over exact": kept[way] / kept["exact"],
                })  # fmt: skip
        text = (
            f"One sequence, D = {self.dim}, {self.num_heads} heads, fp32, T = {self.length} tokens (ridge: {self.converged_length} tokens, "
            f"{self.steps} inner steps), medians of {self.rounds} rounds in turn in one process; the machine was shared with other work. "
            "All ways use the dual form and keep their graph (`layer.group_size=0`). MB kept is the most that autograd held for a "
            "backward pass at any moment, that of the inner gradients included. `zeroth_order` is one direction: two forward passes."
        )
        settings = {
            "length": self.length,
            "dim": self.dim,
            "num_heads": self.num_heads,
            "steps": self.steps,
            "rounds": self.rounds,
        }
        return Report("The price of the outer derivative", text, {"Forward and backward": rows}, checks, settings)

    def _layer(self, *overrides: str) -> TTTLayer:
        torch.manual_seed(0)
        layer = build(*overrides, f"dim={self.dim}", f"num_heads={self.num_heads}", "layer.group_size=0", "seed=0")
        randomize(layer)
        return layer


def _differentiated(layer: TTTLayer, x: Tensor) -> Callable[[], object]:
    def step() -> None:
        layer.zero_grad()
        layer(x)[0].square().mean().backward()

    return step


def _two_points(layer: TTTLayer, x: Tensor) -> Callable[[], object]:
    @torch.no_grad()
    def step() -> None:
        for _ in range(2):
            layer(x)[0].square().mean()

    return step
