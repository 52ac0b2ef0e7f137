"""`metattt bench inner`: the inner operation alone on the CPU, closed form against the generic dual form and the
published style."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from metattt.bench.base import MOST, Benchmark, check_counts, require
from metattt.bench.memory import forget_peak, resident
from metattt.bench.published_style import published_style
from metattt.bench.report import Check, Panel, Report, Row
from metattt.bench.timing import in_turn, measure, ratios, summary
from metattt.errors import MetaTTTError, check_choice, check_integer
from metattt.inner.loop import InnerLoop
from metattt.inner.plan import Kernel, Plan
from metattt.inner.tokens import Block, MiniBatches, Tokens
from metattt.layer import TTTLayer
from metattt.learners.linear import Linear
from metattt.learners.mlp import MLP
from metattt.optimizers.base import Gates
from metattt.optimizers.gradient_descent import GradientDescent
from metattt.registry import register
from metattt.tasks.base import Views
from metattt.tasks.reconstruction import Reconstruction
from metattt.testing.specimen import distance

MAX_THREADS = 1024
LEARNERS = {"linear": Linear, "mlp": MLP}
WAYS = ("fused", "dual", "published style")
Pass = Callable[[], Sequence[Tensor]]


@register(group="benchmark", name="inner")
class Inner(Benchmark):
    """Views and step sizes to predictions, for one sequence in fp32, forward and backward and forward alone.

    Args:
        learners: of `linear` and `mlp`.
        length: T, tokens.
        num_heads, head_dim: heads H and their width d.
        mini_batch_size: b, tokens.
        threads: every number is measured on its own.
        rounds: timed calls of each way, in turn.
        memory_length: T at which peak memory is measured; 0 leaves it out.
    """

    def __init__(
        self,
        learners: Sequence[str] = ("linear", "mlp"),
        length: int = 2048,
        num_heads: int = 12,
        head_dim: int = 64,
        mini_batch_size: int = 16,
        threads: Sequence[int] = (1, 2),
        rounds: int = 7,
        memory_length: int = 16384,
    ):
        for name in learners:
            check_choice("benchmark.learners", name, LEARNERS)
        check_counts(length=length, num_heads=num_heads, head_dim=head_dim, mini_batch_size=mini_batch_size)
        check_counts(rounds=rounds, threads=threads)
        check_integer("benchmark.memory_length", memory_length, 0, MOST)
        if not learners or max(threads) > MAX_THREADS:
            given = f"benchmark.learners={list(learners)} threads={list(threads)}"
            raise MetaTTTError(f"{given}: one learner or more, and at most {MAX_THREADS} threads")
        for key, value in (("length", length), ("memory_length", memory_length)):
            if value % mini_batch_size:
                raise MetaTTTError(
                    f"benchmark.{key}={value} is no multiple of benchmark.mini_batch_size={mini_batch_size}"
                )
        self.learners, self.length, self.num_heads, self.head_dim = list(learners), length, num_heads, head_dim
        self.mini_batch_size, self.threads, self.rounds, self.memory_length = (
            mini_batch_size,
            list(threads),
            rounds,
            memory_length,
        )

    def run(self, say: Callable[[str], None]) -> Report:
        checks: list[Check] = []
        times: list[Row] = []
        ceilings: list[Row] = []
        for learner in self.learners:
            say(f"{learner}: checking")
            problem = Problem(learner, self.length, self.num_heads, self.head_dim, self.mini_batch_size)
            checks += problem.check()
            for threads in self.threads:
                with _threads(threads):
                    say(f"{learner}: timing on {threads} thread{'s' * (threads > 1)}")
                    for title, ways in (("training", problem.training()), ("inference", problem.inference())):
                        seconds = in_turn(ways, self.rounds)
                        times += self._rows(learner, title, threads, seconds)
                        ceilings.append(self._ceiling(learner, title, threads, problem, min(seconds["fused"])))
        lengths: list[Row] = []
        for learner in self.learners:
            say(f"{learner}: timing by length")
            lengths += self._by_length(learner)
        tables = {"Time": times, "Context length": lengths, "Operations": ceilings}
        if self.memory_length:
            tables["Peak memory"] = [self._memory(learner, say) for learner in self.learners]
        text = (
            f"B = 1, H = {self.num_heads}, T = {self.length}, d = {self.head_dim}, b = {self.mini_batch_size}, fp32, {self.rounds} rounds "
            "in turn in one process. Training is forward and backward with the gradients of all views, step sizes, W0 and norms.\n\n"
            "- fused: the layer's closed form (`layer.form=fused`), which recomputes the forward pass in its backward pass.\n"
            "- dual: the generic dual form, not compiled, that stores everything (`layer.form=dual layer.group_size=0`).\n"
            "- published style: the dual form of arXiv 2407.04620 written out, inputs sliced and outputs written in a Python loop, "
            "autograd through all of it (`metattt/bench/published_style.py`).\n\n"
            "Operations are those of the products in the fused form (2 per multiplication and addition, what it recomputes included), the "
            "ceiling is a product of two 1024 x 1024 matrices in the same process. Peak memory is what a training pass takes above its "
            "inputs' process, allowed is 1.3 (inputs + outputs + gradients) + the weights of every group."
        )
        settings = {key: value for key, value in vars(self).items() if not key.startswith("_")}
        return Report("The inner operation", text, tables, checks, settings, self._panels(lengths))

    def _by_length(self, learner: str) -> list[Row]:
        """Training at shorter sequences and the whole one, on as many threads as come first."""
        rows: list[Row] = []
        lengths = [self.length // n for n in (8, 4, 2, 1) if self.length % (n * self.mini_batch_size) == 0]
        for length in lengths:
            problem = Problem(learner, length, self.num_heads, self.head_dim, self.mini_batch_size)
            with _threads(self.threads[0]):
                seconds = in_turn(problem.training(), min(3, self.rounds))
            for way, took in seconds.items():
                each = summary([1e6 * s / length for s in took])._asdict()
                rows.append(
                    {"learner": learner, "T": length, "way": way}
                    | {f"µs per token, {key}": x for key, x in each.items()}
                )
        return rows

    def _panels(self, rows: Sequence[Row]) -> list[Panel]:
        panels = []
        for learner in self.learners:
            curves: dict[str, tuple[list[float], list[float]]] = {}
            for row in rows:
                if row["learner"] == learner:
                    x, y = curves.setdefault(row["way"], ([], []))
                    x.append(row["T"])
                    y.append(row["µs per token, median"])
            panels.append(Panel(f"{learner}: forward and backward", "T", "µs per token", curves))
        return panels

    def _rows(self, learner: str, title: str, threads: int, seconds: dict[str, list[float]]) -> Iterator[Row]:
        for way, took in seconds.items():
            ratio = ratios(took, seconds["fused"])
            row: Row = {"learner": learner, "pass": title, "threads": threads, "way": way}
            row |= {f"ms, {key}": value for key, value in summary([1000 * s for s in took])._asdict().items()}
            yield row | {f"times fused, {key}": value for key, value in ratio._asdict().items()}

    def _ceiling(self, learner: str, title: str, threads: int, problem: Problem, best: float) -> Row:
        a = torch.randn(1024, 1024)
        ceiling = 2 * 1024**3 / min(measure(lambda: a @ a) for _ in range(20)) / 1e9
        operations = problem.operations(training=title == "training")
        rate = operations / best / 1e9
        return {
            "learner": learner, "pass": title, "threads": threads, "kernel": problem.kernel.name, "GFLOP": operations / 1e9,
            "GFLOP/s": rate, "ceiling, GFLOP/s": ceiling, "share": rate / ceiling,
        }  # fmt: skip

    def _memory(self, learner: str, say: Callable[[str], None]) -> Row:
        if not Path("/proc/self/clear_refs").exists():
            raise MetaTTTError(
                "peak memory is read from /proc, which this system does not have: set benchmark.memory_length=0"
            )
        say(f"{learner}: peak memory at T = {self.memory_length}")
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            sizes = (learner, self.memory_length, self.num_heads, self.head_dim, self.mini_batch_size)
            found = process.submit(_peak, *sizes, self.threads[0]).result()
        return {
            "learner": learner, "T": self.memory_length, "tensors, MB": found.tensors, "weights of groups, MB": found.group_weights,
            "peak, MB": found.peak, "allowed, MB": found.allowed, "share": found.peak / found.allowed,
        }  # fmt: skip


class Memory(NamedTuple):
    """MB (10⁶ bytes)."""

    tensors: float  # inputs, outputs and gradients
    group_weights: float
    peak: float  # of all, the inputs too

    @property
    def allowed(self) -> float:
        return 1.3 * self.tensors + self.group_weights


class Problem:
    """The same tensors for every way."""

    def __init__(self, learner: str, length: int, num_heads: int, head_dim: int, size: int):
        generator = torch.Generator().manual_seed(0)
        torch.manual_seed(0)
        self.learner, self.size = learner, size
        parts = (Reconstruction(), LEARNERS[learner](), GradientDescent(size, token_steps="shared"))
        self.layer = TTTLayer(num_heads * head_dim, num_heads, *parts, form="fused")
        self.dual = replace(self.layer.plan, kernels=[])

        def tokens(scale: float = 1.0) -> Tensor:
            x = torch.randn(1, length, num_heads, head_dim, generator=generator) * scale
            return x.transpose(1, 2).requires_grad_()  # in memory as the projections write them

        k, v, q = tokens(head_dim**-0.5), tokens(), tokens(head_dim**-0.5)
        eta = torch.rand(1, num_heads, length, generator=generator) * ((1.0 if learner == "linear" else 0.1) / head_dim)
        self.tokens = Tokens(Views(k, v, q), Gates(eta.requires_grad_()))
        self.cotangent = torch.randn(q.shape, generator=generator)
        inner = [*self.layer.learner.parameters(), *self.layer.optimizer.parameters()]
        self.leaves = [x for x in (*self.tokens.tensors, *inner) if x is not None and x.requires_grad]
        count = length // size
        self.blocks = [Block(size, 0, True, size)] * count
        self.kernel: Kernel = next(
            x for x in self.layer.plan.kernels if x.device == "cpu" and x.reason_rejected(self.given()) is None
        )

    def given(self) -> MiniBatches:
        rule, learner = self.layer.optimizer, self.layer.learner
        weights = self.layer.inner.start(1, torch.float32)["commit"]
        return MiniBatches(
            self.tokens, weights, dict(learner.slow), rule.token_steps(), rule.mini_batch_size, torch.float32, None
        )

    def _loop(self, plan: Plan) -> Tensor:
        group_size = None if plan.kernels else 0  # the dual form keeps everything, as the published style does
        loop = InnerLoop(self.layer.task, self.layer.learner, self.layer.optimizer, plan, group_size)
        after = torch.zeros(1, dtype=torch.long)
        return loop.columns(self.tokens, loop.start(1, torch.float32), self.blocks, None, after, True)[0]

    def _published(self) -> Tensor:
        weights, slow = self.layer.inner.start(1, torch.float32)["commit"], self.layer.learner.slow
        tau = self.layer.optimizer.token_steps()
        assert tau is not None
        k, v, q, eta = *self.tokens.views[:3], self.tokens.gates.eta
        return published_style(q, k, v, eta, tau, weights, slow["norm_scale"], slow["norm_bias"])[0]

    def _ways(self) -> dict[str, Callable[[], Tensor]]:
        return dict(
            zip(
                WAYS,
                (partial(self._loop, self.layer.plan), partial(self._loop, self.dual), self._published),
                strict=True,
            )
        )

    def training(self) -> dict[str, Pass]:
        """Forward and backward of each way: outputs and all gradients."""
        # The learner's and the optimizer's parameters that take no part (θ_lr: η is given) have no gradient.
        return {way: partial(self._gradients, function) for way, function in self._ways().items()}

    def inference(self) -> dict[str, Pass]:
        return {way: partial(_forward, function) for way, function in self._ways().items()}

    def _gradients(self, function: Callable[[], Tensor]) -> Sequence[Tensor]:
        y = function()
        found = torch.autograd.grad(y, self.leaves, self.cotangent, allow_unused=True)
        return [y.detach(), *(g for g in found if g is not None)]

    def check(self) -> list[Check]:
        """Outputs and gradients of all ways against the dual form."""
        found = {way: function() for way, function in self.training().items()}
        return [
            require(
                f"{self.learner}, {way} and dual, outputs and gradients, fp32",
                max(distance(a, b) for a, b in zip(found[way], found["dual"], strict=True)),
                1e-3,
            )
            for way in WAYS
            if way != "dual"
        ]

    def operations(self, training: bool) -> float:
        """Multiplications and additions of the fused form's products."""
        heads, length, d = self.tokens.k.shape[1:]
        b, f = self.size, 4 * d
        if self.learner == "linear":
            forward, backward = 3 * b * d * d + 2 * b * b * d, 9 * b * d * d + 6 * b * b * d
        else:
            forward = 7 * b * d * f + 2 * b * b * (d + f)
            backward = 21 * b * d * f + 6 * b * b * (d + f)
        return 2.0 * (forward + backward * training) * heads * length // b


def _forward(function: Callable[[], Tensor]) -> Sequence[Tensor]:
    with torch.no_grad():
        return [function()]


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _peak(learner: str, length: int, num_heads: int, head_dim: int, size: int, threads: int) -> Memory:
    """In a process of its own: the high-water mark of its memory cannot be lowered."""
    torch.set_num_threads(threads)
    Problem(learner, 4 * size, num_heads, head_dim, size).training()["fused"]()  # libraries and threads are there
    problem = Problem(learner, length, num_heads, head_dim, size)
    inputs = [*problem.tokens.views[:3], problem.tokens.gates.eta, problem.cotangent]
    weights = sum(w.nbytes for w in problem.given().weights.values())
    group_size = getattr(problem.kernel, "group_size", None)
    count = length // size
    groups = -(-count // (group_size(problem.given(), len(problem.tokens.views.k)) if group_size else round(count**0.5)))
    before = forget_peak()
    found = problem.training()["fused"]()
    peak = resident("VmHWM") - before + sum(x.nbytes for x in inputs if x is not None) / 1e6
    tensors = (sum(x.nbytes for x in inputs if x is not None) + sum(x.nbytes for x in found)) / 1e6
    return Memory(tensors, groups * weights / 1e6, peak)
