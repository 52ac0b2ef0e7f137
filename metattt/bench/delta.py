"""`metattt bench delta`: the delta rule solved for all tokens of a chunk at once, against loops over tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from metattt.bench.base import Benchmark, check_counts, require
from metattt.bench.report import Check, Report, Row
from metattt.bench.timing import in_turn, ratios, summary
from metattt.composition.compose import build
from metattt.errors import MetaTTTError, check_number
from metattt.layer import TTTLayer
from metattt.output import GATES
from metattt.registry import register
from metattt.state import Context, State
from metattt.testing.specimen import Run, compare, cotangent, gradients

LAYERS = ("delta_net", "gated_delta_net")


@register(group="benchmark", name="delta")
class Delta(Benchmark):
    """Forward and backward of DeltaNet and Gated DeltaNet, one sequence in fp32, in three ways that give the same
    result.

    Args:
        length: T, tokens.
        dim: model width D; with one head, the width d of its state.
        num_heads: heads H.
        rounds: timed calls of each way, in turn.
        at_least: how many times faster than the token loop the solved form must be (median); 0 accepts anything.
    """

    def __init__(self, length: int = 2048, dim: int = 64, num_heads: int = 1, rounds: int = 5, at_least: float = 10.0):
        check_counts(length=length, dim=dim, num_heads=num_heads, rounds=rounds)
        check_number("benchmark.at_least", at_least, least=0)
        self.length, self.dim, self.num_heads, self.rounds, self.at_least = length, dim, num_heads, rounds, at_least

    def run(self, say: Callable[[str], None]) -> Report:
        checks: list[Check] = []
        rows: list[Row] = []
        for name in LAYERS:
            ways = self._ways(name, torch.float32)
            x = self._tokens(self.length, torch.float32)
            say(f"{name}: checking")
            checks += self._check(name, min(self.length, 256), torch.float64, 1e-9)
            checks += self._check(name, self.length, torch.float32, 1e-4)
            say(f"{name}: timing {self.rounds} rounds")
            seconds = in_turn(
                {way: partial(_run, function, layer, x) for way, (layer, function) in ways.items()}, self.rounds
            )
            solved = seconds["solved"]
            for way, took in seconds.items():
                ratio = ratios(took, solved)
                milliseconds = summary([1000 * second for second in took])
                row: Row = {"layer": name, "way": way}
                row |= {f"ms, {key}": value for key, value in milliseconds._asdict().items()}
                row |= {f"times solved, {key}": value for key, value in ratio._asdict().items()}
                rows.append(row)
            speedup = ratios(seconds["form=primal"], solved)
            if speedup.median < self.at_least:
                raise MetaTTTError(
                    f"{name}: the solved form is {speedup.median:.1f} times faster than the loop, not {self.at_least}"
                )
        text = (
            f"Forward and backward of one layer, T = {self.length} tokens, D = {self.dim}, {self.num_heads} head(s), one sequence, fp32, "
            f"{self.rounds} rounds in turn in one process. All ways keep their graph: nothing is recomputed (`layer.group_size=0`).\n\n"
            "- solved: a unit lower-triangular system per chunk gives the errors of all its tokens (arXiv 2406.06484).\n"
            "- form=primal: the layer's oracle, a loop over tokens that makes every gradient by differentiation.\n"
            "- plain loop: `S_t = S_{t−1} − β_t k_tᵀ(k_t S_{t−1} − v_t)` in five lines of PyTorch."
        )
        settings = {"length": self.length, "dim": self.dim, "num_heads": self.num_heads, "rounds": self.rounds}
        return Report("The delta rule: solved against loops over tokens", text, {"Time": rows}, checks, settings)

    def _ways(self, name: str, dtype: torch.dtype) -> dict[str, tuple[TTTLayer, Callable[[TTTLayer, Tensor], Tensor]]]:
        """The layer, and how it is called, of each way; the parameters are the same."""
        sizes = (f"layer={name}", f"dim={self.dim}", f"num_heads={self.num_heads}", "layer.group_size=0", "seed=0")
        solved, primal = (build(*sizes, f"layer.form={form}").to(dtype) for form in ("dual", "primal"))
        with torch.no_grad():
            for layer in (solved, primal):  # away from the small initial values, which hide mistakes
                generator = torch.Generator().manual_seed(1)
                for parameter in layer.parameters():
                    if parameter.requires_grad:
                        noise = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
                        parameter.add_(noise.to(dtype))
        return {"solved": (solved, _outputs), "form=primal": (primal, _outputs), "plain loop": (solved, plain_loop)}

    def _tokens(self, length: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(1, length, self.dim, generator=torch.Generator().manual_seed(2)).to(dtype)

    def _check(self, name: str, length: int, dtype: torch.dtype, bound: float) -> list[Check]:
        """Outputs and all gradients of the other ways against the solved form."""
        x = self._tokens(length, dtype)
        found = {way: _run(function, layer, x) for way, (layer, function) in self._ways(name, dtype).items()}
        kind = str(dtype).removeprefix("torch.")
        return [
            require(
                f"{name}, {way} and solved, outputs and gradients at T = {length}, {kind}",
                compare(found["solved"], result),
                bound,
            )
            for way, result in found.items()
            if way != "solved"
        ]


def plain_loop(layer: TTTLayer, x: Tensor) -> Tensor:
    """The layer's outputs by the recurrence of the papers, token by token."""
    positions = torch.arange(x.shape[1]).expand(x.shape[0], -1)
    ctx = Context(positions, None, None, 1)
    start = State(torch.zeros(len(x), dtype=torch.long), 0, {}, {}, {}, {})
    (k, v, q, *_), gates, *_ = layer.tokens(x, start, ctx)
    state = x.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1])
    decay = [None] * x.shape[1] if gates.alpha is None else gates.alpha[..., None, None].unbind(2)
    rows = []
    for k_t, v_t, q_t, beta, alpha in zip(
        k.unbind(2), v.unbind(2), q.unbind(2), gates.eta.unbind(2), decay, strict=True
    ):
        state = state if alpha is None else alpha * state
        error = (k_t.unsqueeze(-2) @ state).squeeze(-2) - v_t
        state = state - k_t.unsqueeze(-1) * (beta.unsqueeze(-1) * error).unsqueeze(-2)
        rows.append((q_t.unsqueeze(-2) @ state).squeeze(-2))
    y = torch.stack(rows, 2).transpose(1, 2).flatten(2)
    y = y if layer.norm is None else layer.norm(y)
    return layer.out(y if layer.gate is None else y * GATES[layer.gate_function](layer.gate(x)))


def _outputs(layer: TTTLayer, x: Tensor) -> Tensor:
    y: Tensor = layer(x)[0]
    return y


def _run(function: Callable[[TTTLayer, Tensor], Tensor], layer: TTTLayer, x: Tensor) -> Run:
    """Outputs, and gradients of the tokens and of every parameter."""
    x = x.detach().requires_grad_()
    y = function(layer, x)
    return Run(y.detach(), None, gradients(layer, x, (y * cotangent(y)).sum()))  # type: ignore[arg-type]
