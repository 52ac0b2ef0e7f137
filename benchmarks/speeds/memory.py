"""Peak memory of the inner loop, forward and backward, when it is recomputed in groups of mini-batches and not."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from common import Check, Row, Say, require, some
from omegaconf import DictConfig
from report import Report
from torch import Tensor

from metattt.composition.compose import compose
from metattt.composition.instantiate import instantiate_layer
from metattt.errors import MetaTTTError
from metattt.inner.tokens import Tokens
from metattt.state import State
from metattt.testing.specimen import distance

WAYS = {  # overrides of the layer
    "off": ("layer.form=dual", "layer.group_size=0"),
    "on": ("layer.form=dual", "layer.group_size=null"),
    "on, form=auto": ("layer.form=auto", "layer.group_size=null"),
}


class Peak(NamedTuple):
    """What one way of one part took: MB at most, beyond what was there before the step, and seconds."""

    megabytes: float
    seconds: float


@dataclass
class Memory:
    """One step on one sequence on the CPU in fp32, on Linux, every measurement in a process of its own.

    What is measured is the inner loop of one layer, from views to predictions, forward and backward.

    Args:
        preset: size of the model.
        layers: its sequence layers, measured one kind after the other.
        length: T, tokens.
    """

    preset: str = "125m"
    layers: list[str] = some("ttt_linear", "ttt_mlp")
    length: int = 2048

    def run(self, say: Say) -> Report:
        if not Path("/proc/self/clear_refs").exists():
            raise MetaTTTError("peak memory is read from /proc, which this system does not have: it needs Linux")
        say("checking that all ways give the same gradients")
        checks = [self._check(layer, min(self.length, 256)) for layer in self.layers]
        rows = [row for layer in self.layers for row in self._rows(layer, say)]
        text = (
            f"Preset {self.preset}, one sequence of T = {self.length} tokens, fp32. Peak of the resident memory "
            "above what the process held before, in the forward and backward pass of one layer's inner loop. Time "
            "checkpointing off keeps the graph of every mini-batch, on recomputes it in groups of "
            "√(T/b), both with the general dual form; the last way is the default, which takes the closed form."
        )
        return Report("Memory of the inner loop", text, {"Peak memory": rows}, checks, asdict(self))

    def _rows(self, layer: str, say: Say) -> list[Row]:
        peaks: dict[str, Peak] = {}
        for way, overrides in WAYS.items():
            say(f"{layer}: time checkpointing {way}")
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                given = (self.preset, layer, self.length, overrides, torch.get_num_threads())
                peaks[way] = process.submit(_measure, *given).result()
        return [
            {"layer": layer, "part": "inner loop", "time checkpointing": way, "peak MB": peak.megabytes,
             "seconds": peak.seconds, "times less memory": peaks["off"].megabytes / peak.megabytes}
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


def _measure(preset: str, layer: str, length: int, overrides: Sequence[str], threads: int) -> Peak:
    """In a process of its own: the high-water mark of a process's memory cannot be lowered."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    module = instantiate_layer(_config(preset, layer, overrides))
    x = torch.randn(1, length, module.dim)
    start = State(torch.zeros(1, dtype=torch.long), 0, {}, {}, {}, {})
    call = module.call(x, start)
    with torch.no_grad():
        views, gates, *_ = module.tokens(x, start, call.ctx)
    tokens = Tokens(views, gates).map(lambda one: one.detach().requires_grad_())
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
    before, started = _resident("VmRSS"), time.perf_counter()
    module.inner.run(tokens, start, call)[0].square().sum().backward()
    return Peak(_resident("VmHWM") - before, time.perf_counter() - started)


def _resident(field: str) -> float:
    """Resident memory of this process (MB): `VmRSS` now, `VmHWM` the most there was."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024 / 1e6
