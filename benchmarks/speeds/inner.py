"""The inner operation alone on the CPU: closed form against the generic dual form and the published style."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial

import torch
from common import Check, Row, Say, in_turn, ratios, require, some, summary
from operation import LEARNERS, Operation
from published_style import published_style
from report import Report
from torch import Tensor

from metattt.errors import MetaTTTError, check_choice
from metattt.testing.specimen import distance


@dataclass
class Inner:
    """Views and step sizes to predictions, for one sequence in fp32, forward and backward and forward alone.

    Args:
        learners: of `linear` and `mlp`.
        length: T, tokens.
        num_heads, head_dim: heads H and their width d.
        mini_batch_size: b, tokens.
        num_threads: every number is measured on its own.
        rounds: timed calls of each way, in turn.
    """

    learners: list[str] = some("linear", "mlp")
    length: int = 2048
    num_heads: int = 12
    head_dim: int = 64
    mini_batch_size: int = 16
    num_threads: list[int] = some(1, 2)
    rounds: int = 7

    def run(self, say: Say) -> Report:
        if self.length % self.mini_batch_size:
            raise MetaTTTError(f"length={self.length} is no multiple of mini_batch_size={self.mini_batch_size}")
        checks: list[Check] = []
        rows: list[Row] = []
        for learner in self.learners:
            check_choice("learners", learner, LEARNERS)
            say(f"{learner}: checking")
            given = Operation(learner, 1, self.length, self.num_heads, self.head_dim, self.mini_batch_size)
            calls = {
                "fused": partial(given.run, given.layer.plan), "dual": partial(given.run, given.dual),
                "published style": partial(_published, given),
            }  # fmt: skip
            found = {way: given.training(call) for way, call in calls.items()}
            for way in ("fused", "published style"):
                error = max(distance(a, b) for a, b in zip(found[way], found["dual"], strict=True))
                checks.append(require(f"{learner}, {way} and dual, outputs and gradients, fp32", error, 1e-3))
            del found
            for threads in self.num_threads:
                say(f"{learner}: timing, threads={threads}")
                torch.set_num_threads(threads)
                for title in ("training", "inference"):
                    timed = {way: partial(getattr(given, title), call) for way, call in calls.items()}
                    seconds = in_turn(timed, self.rounds)
                    for way, took in seconds.items():
                        row: Row = {"learner": learner, "pass": title, "threads": threads, "way": way}
                        times = ratios(took, seconds["fused"]).columns("times fused")
                        rows.append(row | summary(took).columns("ms", 1000) | times)
        text = (
            f"B = 1, H = {self.num_heads}, T = {self.length}, d = {self.head_dim}, b = {self.mini_batch_size}, fp32, "
            f"{self.rounds} rounds in turn in one process. Training is forward and backward with all gradients.\n\n"
            "- fused: the layer's closed form (`layer.form=fused`), which recomputes it in its backward pass.\n"
            "- dual: the generic dual form, not compiled, that stores everything (`layer.group_size=0`).\n"
            "- published style: the dual form of arXiv 2407.04620 in a Python loop, autograd through all of it "
            "(`benchmarks/published_style.py`)."
        )
        return Report("The inner operation", text, {"Time": rows}, checks, asdict(self))


def _published(given: Operation) -> Tensor:
    weights, slow = given.layer.inner.start(1, torch.float32)["commit"], given.layer.learner.slow
    tau = given.layer.optimizer.token_steps()
    assert tau is not None
    k, v, q, eta = *given.tokens.views[:3], given.tokens.gates.eta
    return published_style(q, k, v, eta, tau, weights, slow["norm_scale"], slow["norm_bias"])[0]
