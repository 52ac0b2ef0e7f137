"""`metattt bench digits`: Table 3 of the MTTT paper at the size of scikit-learn's digits, several seeds a row."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from metattt.bench.base import Benchmark, require
from metattt.bench.report import Check, Report, Row
from metattt.composition.compose import build, compose
from metattt.errors import MetaTTTError, check_integer
from metattt.registry import register
from metattt.testing.specimen import distance

NAMES = {  # experiment=digits_pixel/<row>, best first in the paper (ImageNet from pixels, where self-attention does not fit)
    "mttt_mlp_sgd": "MTTT-MLP SGD T=4",
    "mttt_mlp": "MTTT-MLP",
    "mttt_linear": "MTTT-Linear",
    "linear_attention": "linear attention (identity)",
    "linear_attention_elu": "linear attention (elu + 1)",
    "self_attention": "self-attention",
}
PAPER = {
    "mttt_mlp_sgd": 65.2,
    "mttt_mlp": 61.9,
    "linear_attention_elu": 53.7,
    "mttt_linear": 50.0,
    "linear_attention": 49.9,
}


@register(group="benchmark", name="digits")
class Digits(Benchmark):
    """Trains every row with every seed as `metattt train experiment=digits_pixel/<row>` does.

    Args:
        rows: of `configs/experiment/digits_pixel`.
        seeds: of the initial parameters and the order of the images; the split is always the same.
        overrides: of the training's configuration, for all rows.
    """

    def __init__(
        self,
        rows: Sequence[str] = ("mttt_mlp_sgd", "mttt_mlp", "mttt_linear", "linear_attention", "self_attention"),
        seeds: Sequence[int] = (0, 1, 2),
        overrides: Sequence[str] = (),
    ):
        unknown = [row for row in rows if row not in NAMES]
        if unknown or not rows or len(seeds) < 2:
            raise MetaTTTError(
                f"benchmark.rows={list(rows)} benchmark.seeds={list(seeds)}: rows from {', '.join(NAMES)}; two seeds or more"
            )
        for seed in seeds:
            check_integer("benchmark.seeds", seed, 0, 2**32 - 1)
        if len(set(seeds)) < len(seeds):
            raise MetaTTTError(f"benchmark.seeds={list(seeds)}: the same seed twice gives the same run twice")
        self.rows, self.seeds, self.overrides = list(rows), list(seeds), list(overrides)

    def run(self, say: Callable[[str], None]) -> Report:
        checks = [self._check()]
        results: dict[str, list[tuple[float, float]]] = {}
        for row in self.rows:
            for seed in self.seeds:
                results.setdefault(row, []).append(self._train(row, seed))
                accuracy, loss = results[row][-1]
                say(f"{NAMES[row]}, seed {seed}: top-1 {accuracy:.2f}%, cross-entropy {loss:.4f}")
        table = [self._row(row, found) for row, found in results.items()]
        cfg = compose("experiment=digits_pixel", *self.overrides)
        blocks = "one block" if cfg.model.depth == 1 else f"{cfg.model.depth} blocks"
        text = (
            f"Held-out digits (359 of 1,797), raw 8×8 pixels as tokens, {blocks} of width {cfg.dim} with "
            f"{cfg.num_heads} heads, {cfg.trainer.max_steps} steps of {cfg.data.batch_size} images, the same recipe for all rows; mean ± "
            f"standard deviation over {len(self.seeds)} seeds. Made by `metattt bench digits`; one row is "
            "`metattt train experiment=digits_pixel/<row>`.\n\n"
            + self._order({row: [accuracy for accuracy, _ in found] for row, found in results.items()})
        )
        settings = {"rows": self.rows, "seeds": self.seeds, "overrides": self.overrides}
        return Report("Handwritten digits from raw pixels", text, {"Validation": table}, checks, settings)

    def _check(self) -> Check:
        """MTTT-Linear against the linear attention that it is."""
        layer = build("layer=mttt_linear", "dim=32", "num_heads=2").double()
        task: Any = layer.task
        x = torch.randn(2, 64, 32, dtype=torch.float64)
        k, q = (view(x).unflatten(-1, (2, 16)).transpose(1, 2) for view in (task.phi, task.psi))
        v = (x - task.decoder_bias).unsqueeze(1) @ task.decoder.mT
        expected = layer.out((q @ (k.mT @ v) / (64 * 16)).transpose(1, 2).flatten(2))
        return require(
            "MTTT-Linear against linear attention with the identity map", distance(layer(x)[0], expected), 1e-10
        )

    def _train(self, row: str, seed: int) -> tuple[float, float]:
        """Top-1 accuracy (%) and cross-entropy (nats) of the last validation."""
        from metattt.training.train import train  # not for the benchmarks beside this one: it waits for Lightning

        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            train(
                compose(
                    f"experiment=digits_pixel/{row}", f"seed={seed}", "~callbacks.progress", "trainer.accelerator=cpu",
                    f"output_dir={folder}/run", *self.overrides,
                )
            )  # fmt: skip
            with (Path(folder) / "run" / "metrics.csv").open(newline="") as file:
                last = [found for found in csv.DictReader(file) if found["validation/top1"]][-1]
        return 100 * float(last["validation/top1"]), float(last["validation/loss"])

    def _row(self, row: str, found: list[tuple[float, float]]) -> Row:
        accuracy, loss = zip(*found, strict=True)
        return {
            "layer": NAMES[row],
            "top-1 %": f"{statistics.mean(accuracy):.1f} ± {statistics.stdev(accuracy):.1f}",
            "per seed": ", ".join(f"{value:.1f}" for value in accuracy),
            "cross-entropy (nats)": f"{statistics.mean(loss):.3f} ± {statistics.stdev(loss):.3f}",
            "paper, ImageNet pixels, %": f"{PAPER[row]}" if row in PAPER else "does not fit",
        }

    def _order(self, accuracy: dict[str, list[float]]) -> str:
        """Where the paper's order shows here and where it does not."""
        known = sorted((row for row in accuracy if row in PAPER), key=lambda row: -PAPER[row])
        shows: list[str] = []
        hidden: list[str] = []
        for better, worse in itertools.pairwise(known):
            if abs(PAPER[better] - PAPER[worse]) < 1:  # equal within the paper's own noise
                continue
            gap = statistics.mean(accuracy[better]) - statistics.mean(accuracy[worse])
            noise = max(statistics.stdev(accuracy[better]), statistics.stdev(accuracy[worse]))
            (shows if gap > noise else hidden).append(f"{NAMES[better]} above {NAMES[worse]} ({gap:+.1f} points)")
        lines = [
            f"The paper's order shows here by more than the spread over seeds: {'; '.join(shows)}." if shows else ""
        ]
        lines += [f"It does not show at this size: {'; '.join(hidden)}." if hidden else ""]
        if {"mttt_linear", "linear_attention"} <= accuracy.keys():
            gap = abs(statistics.mean(accuracy["mttt_linear"]) - statistics.mean(accuracy["linear_attention"]))
            lines += [
                f"MTTT-Linear computes linear attention with the identity map: the {gap:.1f} points between them are chance."
            ]
        return " ".join(line for line in lines if line)
