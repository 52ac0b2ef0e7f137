"""How long processes wait that read parts of one sequence."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from common import Check, Row, Say, require, some
from local_processes import together
from report import Report
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import init_device_mesh

from metattt.composition.compose import build
from metattt.errors import MetaTTTError
from metattt.models.language_model import LanguageModel
from metattt.parallel.gradients import average_gradients
from metattt.parallel.line import Line, frame_of
from metattt.parallel.relay import handed_on
from metattt.parallel.scan import FIXED, scannable

VOCAB, DIM, TOKENS = 16, 16, 8  # of the model, and for every process: next to nothing is computed
HEAD, READ = 64, 64  # features of a head, and tokens read, where messages are weighed


@dataclass
class TimeParallel:
    """Steps of a model whose blocks take a fixed time: a wait, so that the processes do not compete for the cores.

    What is measured is the schedule and its messages, forward and backward, with the states of real tensors.

    Args:
        ranks: numbers of processes that read one sequence.
        sequences: numbers of sequences in flight.
        blocks: numbers of blocks of the model.
        milliseconds: a block's forward pass; its backward pass takes twice as long.
        state: numbers in the state of a block and sequence.
        rounds: steps, of which the shortest counts.
        layers: known layers whose messages are weighed.
        widths: D of these layers, with heads of 64 features.
    """

    ranks: list[int] = some(2, 4)
    sequences: list[int] = some(1, 2, 4, 8)
    blocks: list[int] = some(1, 6)
    milliseconds: float = 20.0
    state: int = 65536
    rounds: int = 3
    layers: list[str] = some("ttt_linear", "ttt_mlp", "delta_net", "mamba2", "linear_attention")
    widths: list[int] = some(768, 2048)

    def run(self, say: Say) -> Report:
        if any(width % HEAD for width in self.widths):
            raise MetaTTTError(f"widths={self.widths} is not allowed: multiples of {HEAD}, the width of a head")
        rows: list[Row] = []
        checks: list[Check] = []
        for ranks in self.ranks:
            say(f"{ranks} processes")
            settings = [(blocks, count) for blocks in self.blocks for count in self.sequences]
            jobs: list[Any] = [
                (measured, (blocks, count, self.milliseconds / 1000, self.state, self.rounds))
                for blocks, count in settings
            ]
            found = together(ranks, [(same_gradients, ()), *jobs], seconds=600)
            checks.append(require(f"{ranks} processes against one, gradients", max(found[0]), 1e-5))
            rows += [self._row(ranks, *setting, steps) for setting, steps in zip(settings, found[1:], strict=True)]
        text = (
            f"A block's forward pass is a wait of {self.milliseconds:.0f} ms, its backward pass twice that: what "
            f"counts is the schedule (gloo; {self.state * 4:,} bytes for a sequence and a block, as many back). "
            "Idle: the share of a step, forward and backward, that the processes spend on waiting for each other, on "
            f"average; the shortest of {self.rounds} steps. Handed on per model: (R − 1) / (R − 1 + S), for R "
            "processes and S sequences in flight; per block: (R − 1) / (R − 1 + S L), for L blocks. Bytes handed on: "
            "the state of a layer and the tail of its convolution between two mini-batches, fp32; as many go back."
        )
        say("messages")
        weighed: list[Row] = [
            {"layer": name} | {f"D = {width}": message_bytes(name, width) for width in self.widths}
            for name in self.layers
        ]
        tables = {"Idle share of a step": rows, "Bytes handed on for one block and one sequence": weighed}
        title = "What idles when a sequence is divided in time"
        return Report(title, text, tables, checks, asdict(self))

    def _row(self, ranks: int, blocks: int, count: int, steps: Sequence[Sequence[tuple[float, float]]]) -> Row:
        """`steps`: of every process, seconds of each step and how many of them it waited."""
        idle = []
        for of_processes in zip(*steps, strict=True):
            whole = max(seconds for seconds, _ in of_processes)
            busy = sum(seconds - waited for seconds, waited in of_processes) / ranks
            idle.append((whole, 1 - busy / whole))
        seconds, share = min(idle)
        return {
            "processes R": ranks, "blocks L": blocks, "sequences S": count, "step (ms)": 1000 * seconds, "idle": share,
            "formula, per model": (ranks - 1) / (ranks - 1 + count),
            "formula, per block": (ranks - 1) / (ranks - 1 + count * blocks),
        }  # fmt: skip


class Waiting(nn.Module):
    """A running sum in a state as large as it is told, which takes a fixed time."""

    def __init__(self, dim: int, seconds: float, size: int):
        super().__init__()
        self.weight, self.seconds, self.size = nn.Parameter(torch.ones(dim)), seconds, size

    def forward(
        self, x: Tensor, state: Tensor | None = None, mask: Tensor | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`x` `[B, T, D]` and a state `[B, size]` to the same."""
        if state is None:
            state = x.new_zeros(len(x), self.size)
        seen = x.mean(2).cumsum(1) + state[:, :1]
        y: Tensor = _Wait.apply(x * self.weight + seen.unsqueeze(2), self.seconds)
        return y, state + x.mean(2).sum(1, keepdim=True)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grad, None


@torch.no_grad()
def message_bytes(layer: str, dim: int) -> int:
    """Bytes that one block hands on for one sequence."""
    made = build(f"layer={layer}", f"dim={dim}", f"num_heads={dim // HEAD}")
    model = LanguageModel(VOCAB, dim, 1, lambda: made, ffn_dim=16)
    _, state = model.features(torch.zeros(1, READ, dtype=torch.long))
    handed = state.layers[0]
    if scannable(made, dim):  # W0 stays behind
        handed = handed._replace(weights={slot: named for slot, named in handed.weights.items() if slot not in FIXED})
    return sum(slot.nbytes for slot in frame_of((handed, state.tails[0]))[1])


def make(blocks: int, seconds: float, state: int) -> LanguageModel:
    """The model, the same in every process."""
    torch.manual_seed(0)
    return LanguageModel(VOCAB, DIM, blocks, lambda: Waiting(DIM, seconds, state), pre_conv=False)


def step(model: LanguageModel, line: Line, count: int) -> None:
    """Forward and backward of `count` sequences, without the sum of gradients over processes."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB, (count, TOKENS * line.size + 1), generator=generator)
    read, labels = line.own(ids[:, :-1]), line.own(ids[:, 1:])
    losses = []
    for own, following in zip(read.split(1), labels.split(1), strict=True):
        with handed_on(model, line):
            losses.append(model.cross_entropy(own, following)[0])
    torch.stack(losses).sum().backward()


def measured(blocks: int, count: int, seconds: float, state: int, rounds: int) -> list[tuple[float, float]]:
    """In one of the processes: seconds of every step, and seconds of it that were waited."""
    line = Line(init_device_mesh("cpu", (dist.get_world_size(),)))
    model, found = make(blocks, seconds, state), []
    step(model, line, 1)
    for _ in range(rounds):
        dist.barrier()
        started, waited = time.perf_counter(), line.waited
        step(model, line, count)
        found.append((time.perf_counter() - started, line.waited - waited))
        line.finish()
    return found


def same_gradients() -> float:
    """In one of the processes: the largest relative error of a gradient against one process."""
    line = Line(init_device_mesh("cpu", (dist.get_world_size(),)))
    model, alone = make(2, 0.0, 4), make(2, 0.0, 4)
    step(model, line, 3)
    line.finish()
    average_gradients(model.parameters(), line.group)
    ids = torch.randint(VOCAB, (3, TOKENS * line.size + 1), generator=torch.Generator().manual_seed(1))
    (alone.cross_entropy(ids[:, :-1], ids[:, 1:])[0] / line.size).backward()
    errors = []
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        errors.append(((one.grad - other.grad).norm() / other.grad.norm()).item())
    return max(errors)
