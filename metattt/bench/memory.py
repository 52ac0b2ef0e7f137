"""`metattt bench memory`: peak memory of a training step with the inner loop recomputed in groups of mini-batches, and without."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor

from metattt.bench.base import Benchmark, require
from metattt.bench.report import Check, Report, Row
from metattt.compose import compose, instantiate_layer, instantiate_model
from metattt.errors import MetaTTTError
from metattt.inner.packing import pack
from metattt.inner.stream import stream
from metattt.optimizers.base import Gates
from metattt.registry import register
from metattt.state import State
from metattt.tasks.base import Views
from metattt.testing.specimen import distance

WAYS = {"off": "0", "on": "null"}  # layer.group_size
PARTS = ("inner loop", "training step")


class Peak(NamedTuple):
    """What one way of one part took: MB at most, beyond what was there before the step, and seconds."""

    megabytes: float
    seconds: float


@register(group="benchmark", name="memory")
class Memory(Benchmark):
    """One step on one sequence on the CPU in fp32, on Linux, every measurement in a process of its own.

    The *inner loop* is that of one layer, from views to predictions; the *training step* is that of the whole language model, with AdamW.

    Args:
        preset: size of the model.
        layer: its sequence layers.
        length: T, tokens.
        whole_step: measure the whole training step too.
        at_least: how many times less memory the recomputed inner loop must take; 0 accepts anything.
    """

    def __init__(self, preset: str = "125m", layer: str = "ttt_linear", length: int = 2048, whole_step: bool = True, at_least: float = 3.0):
        if length < 1:
            raise MetaTTTError(f"benchmark.length={length} is not allowed: it must be at least 1")
        if not Path("/proc/self/clear_refs").exists():
            raise MetaTTTError("metattt bench memory reads the peak of a process's memory from /proc: it needs Linux")
        self.preset, self.layer, self.length, self.whole_step, self.at_least = preset, layer, length, whole_step, at_least

    def run(self, say: Callable[[str], None]) -> Report:
        say("checking that both ways give the same gradients")
        checks = self._check(min(self.length, 256))
        rows: list[Row] = []
        for part in PARTS if self.whole_step else PARTS[:1]:
            peaks = {}
            for way, group_size in WAYS.items():
                say(f"{part}: time checkpointing {way}")
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                    arguments = (part, self.preset, self.layer, self.length, group_size, torch.get_num_threads())
                    peaks[way] = process.submit(_measure, *arguments).result()
                rows.append(
                    {
                        "part": part, "time checkpointing": way, "peak MB": peaks[way].megabytes, "seconds": peaks[way].seconds,
                        "times less memory": peaks["off"].megabytes / peaks[way].megabytes,
                    }
                )  # fmt: skip
            ratio = peaks["off"].megabytes / peaks["on"].megabytes
            if part == "inner loop" and ratio < self.at_least:
                raise MetaTTTError(f"the inner loop takes {ratio:.1f} times less memory with time checkpointing, not {self.at_least}")
        text = (
            f"Preset {self.preset}, layer {self.layer}, one sequence of T = {self.length} tokens, fp32 on the CPU. Peak of the resident "
            "memory above what the process held before: for the inner loop, its forward and backward in one layer, from the views of the "
            "tokens to the predictions; for the training step, those of the whole model, with AdamW's first step. Time checkpointing off "
            "keeps the graph of every mini-batch (`layer.group_size=0`), on recomputes it in groups of √(T/b) (`layer.group_size=null`)."
        )
        settings = {"preset": self.preset, "layer": self.layer, "length": self.length, "whole_step": self.whole_step}
        return Report("Memory of a training step", text, {"Peak memory": rows}, checks, settings)

    def _check(self, length: int) -> list[Check]:
        """Gradients of one layer with and without recomputation, in float64."""
        found: list[dict[str, Tensor]] = []
        for group_size in WAYS.values():
            torch.manual_seed(0)
            layer = instantiate_layer(_config(self.preset, self.layer, group_size)).double()
            x = torch.randn(1, length, layer.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            layer(x)[0].square().sum().backward()
            found.append({name: p.grad for name, p in layer.named_parameters() if p.grad is not None})
        error = max(distance(found[0][name], found[1][name]) for name in found[0])
        return [require(f"gradients of {self.layer} with and without recomputation, T = {length}, float64", error, 1e-9)]


def _config(preset: str, layer: str, group_size: str) -> DictConfig:
    return compose(f"preset={preset}", f"layer={layer}", "model=mamba_backbone", f"layer.group_size={group_size}", job="language_model")


def _measure(part: str, preset: str, layer: str, length: int, group_size: str, threads: int) -> Peak:
    """In a process of its own: the high-water mark of its memory cannot be lowered."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    config = _config(preset, layer, group_size)
    if part == "inner loop":
        module = instantiate_layer(config)
        x = torch.randn(1, length, module.dim)
        start = State(torch.zeros(1, dtype=torch.long), 0, {}, {}, {}, {})
        packed = pack(x, None, None, start.pos, module.optimizer.mini_batch_size)
        with torch.no_grad():
            views = module.task.views(packed.x, {}, packed.context)[0]
            gates = module.optimizer.gates(packed.x, {}, packed.context)[0]
        views = Views(*(view.detach().requires_grad_() for view in views))
        gates = Gates(*(None if gate is None else gate.detach().requires_grad_() for gate in gates))  # type: ignore[arg-type]

        def step() -> None:
            stream(module.inner, views, gates, start, packed.pos, packed.context).y.square().sum().backward()
    else:
        model = instantiate_model(config)
        optimizer = torch.optim.AdamW(model.parameters())
        ids = torch.randint(model.vocab_size, (1, length + 1))

        def step() -> None:
            F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimizer.step()

    before, started = _forget_peak(), time.perf_counter()
    step()
    return Peak(_resident("VmHWM") - before, time.perf_counter() - started)


def _forget_peak() -> float:
    """Resident memory now, from which the high-water mark starts again (MB)."""
    Path("/proc/self/clear_refs").write_text("5")
    return _resident("VmRSS")


def _resident(field: str) -> float:
    """Resident memory of this process (MB): `VmRSS` now, `VmHWM` the most there was."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024 / 1e6
