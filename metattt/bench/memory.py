"""`metattt bench memory`: peak memory of a training step with the inner loop recomputed in groups of mini-batches, and
without."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from omegaconf import DictConfig
from torch import Tensor

from metattt.bench.base import Benchmark, check_counts, require
from metattt.bench.report import Check, Report, Row
from metattt.catalog.known_layers import known_layers
from metattt.composition.compose import compose
from metattt.composition.instantiate import instantiate_layer, instantiate_model
from metattt.errors import MetaTTTError, check_choice, check_number
from metattt.inner.tokens import Tokens
from metattt.registry import register
from metattt.state import State
from metattt.testing.specimen import distance

WAYS = {  # overrides of the layer
    "off": ("layer.form=dual", "layer.group_size=0"),
    "on": ("layer.form=dual", "layer.group_size=null"),
    "on, form=auto": ("layer.form=auto", "layer.group_size=null"),
}
PARTS = ("inner loop", "training step")


class Peak(NamedTuple):
    """What one way of one part took: MB at most, beyond what was there before the step, and seconds."""

    megabytes: float
    seconds: float


@register(group="benchmark", name="memory")
class Memory(Benchmark):
    """One step on one sequence on the CPU in fp32, on Linux, every measurement in a process of its own.

    The *inner loop* is that of one layer, from views to predictions; the *training step* is that of the whole language
    model, with AdamW.

    Args:
        preset: size of the model.
        layers: its sequence layers, measured one kind after the other.
        length: T, tokens.
        whole_step: measure the whole training step too.
        at_least: how many times less memory the recomputed inner loop must take; 0 accepts anything.
    """

    def __init__(
        self,
        preset: str = "125m",
        layers: Sequence[str] = ("ttt_linear", "ttt_mlp"),
        length: int = 2048,
        whole_step: bool = True,
        at_least: float = 3.0,
    ):
        check_counts(length=length)
        check_number("benchmark.at_least", at_least, least=0)
        for name in layers:
            check_choice("benchmark.layers", name, known_layers())
        if not layers:
            raise MetaTTTError("benchmark.layers=[] is not allowed: give one or more")
        if not Path("/proc/self/clear_refs").exists():
            raise MetaTTTError("metattt bench memory reads the peak of a process's memory from /proc: it needs Linux")
        self.preset, self.layers, self.length, self.whole_step, self.at_least = (
            preset,
            list(layers),
            length,
            whole_step,
            at_least,
        )

    def run(self, say: Callable[[str], None]) -> Report:
        say("checking that all ways give the same gradients")
        checks = [self._check(layer, min(self.length, 256)) for layer in self.layers]
        parts = PARTS if self.whole_step else PARTS[:1]
        rows = [row for layer in self.layers for part in parts for row in self._rows(layer, part, say)]
        text = (
            f"Preset {self.preset}, one sequence of T = {self.length} tokens, fp32 on the CPU. Peak of the resident memory above what the "
            "process held before: for the inner loop, its forward and backward in one layer, from the views of the tokens to the "
            "predictions; for the training step, those of the whole model, with AdamW's first step. Time checkpointing off keeps the "
            "graph of every mini-batch (`layer.group_size=0`), on recomputes it in groups of √(T/b) (`layer.group_size=null`), both with "
            "the general dual form; the last way is the default, which takes the closed form of these layers where it can."
        )
        settings = {"preset": self.preset, "layers": self.layers, "length": self.length, "whole_step": self.whole_step}
        return Report("Memory of a training step", text, {"Peak memory": rows}, checks, settings)

    def _rows(self, layer: str, part: str, say: Callable[[str], None]) -> list[Row]:
        """The ways of one part.

        Raises:
            MetaTTTError: recomputing the inner loop saves too little.
        """
        peaks = {}
        for way, overrides in WAYS.items():
            say(f"{layer}, {part}: time checkpointing {way}")
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                arguments = (part, self.preset, layer, self.length, overrides, torch.get_num_threads())
                peaks[way] = process.submit(_measure, *arguments).result()
        ratio = peaks["off"].megabytes / peaks["on"].megabytes
        if part == "inner loop" and ratio < self.at_least:
            raise MetaTTTError(
                f"the inner loop of {layer} takes {ratio:.1f} times less memory with time checkpointing, not {self.at_least}"
            )
        return [
            {
                "layer": layer, "part": part, "time checkpointing": way, "peak MB": peak.megabytes, "seconds": peak.seconds,
                "times less memory": peaks["off"].megabytes / peak.megabytes,
            }
            for way, peak in peaks.items()
        ]  # fmt: skip

    def _check(self, name: str, length: int) -> Check:
        """Gradients of one layer with and without recomputation, in float64."""
        found: list[dict[str, Tensor]] = []
        for overrides in WAYS.values():
            torch.manual_seed(0)
            layer = instantiate_layer(_config(self.preset, name, overrides)).double()
            x = torch.randn(1, length, layer.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            layer(x)[0].square().sum().backward()
            found.append({key: p.grad for key, p in layer.named_parameters() if p.grad is not None})
        error = max(distance(found[0][key], other[key]) for other in found[1:] for key in found[0])
        return require(f"gradients of {name} in the three ways, T = {length}, float64", error, 1e-9)


def _config(preset: str, layer: str, overrides: Sequence[str]) -> DictConfig:
    return compose(f"preset={preset}", f"layer={layer}", "model=mamba_backbone", *overrides, job="language_model")


def _measure(part: str, preset: str, layer: str, length: int, overrides: Sequence[str], threads: int) -> Peak:
    """In a process of its own: the high-water mark of its memory cannot be lowered."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    config = _config(preset, layer, overrides)
    if part == "inner loop":
        module = instantiate_layer(config)
        x = torch.randn(1, length, module.dim)
        start = State(torch.zeros(1, dtype=torch.long), 0, {}, {}, {}, {})
        ctx, after = module.context(x, start)
        with torch.no_grad():
            views, gates, *_ = module.tokens(x, start, ctx)
        tokens = Tokens(views, gates).map(lambda one: one.detach().requires_grad_())

        def step() -> None:
            module.inner.run(tokens, start, after, ctx, None).y.square().sum().backward()
    else:
        model = instantiate_model(config)
        optimizer = torch.optim.AdamW(model.parameters())
        ids = torch.randint(model.vocab_size, (1, length + 1))

        def step() -> None:
            (model.cross_entropy(ids[:, :-1], ids[:, 1:])[0] / length).backward()
            optimizer.step()

    before, started = forget_peak(), time.perf_counter()
    step()
    return Peak(resident("VmHWM") - before, time.perf_counter() - started)


def forget_peak() -> float:
    """Resident memory now, from which the high-water mark starts again (MB)."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def resident(field: str) -> float:
    """Resident memory of this process (MB): `VmRSS` now, `VmHWM` the most there was."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024 / 1e6
