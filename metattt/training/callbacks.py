"""What is shown of a run while it trains: progress, and the curve of the loss."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.callbacks import TQDMProgressBar

from metattt.errors import check_integer
from metattt.registry import register
from metattt.training.step_statistics import Pace

SHARE = 0.01  # of the time of a run, at most, that its pictures take


@register(group="callback", name="progress")
class Progress(TQDMProgressBar):
    """Lightning's progress bar with loss and bits per byte; where nobody watches (a file, CI), a line now and then
    instead.

    A line shows the validation that came since the line before, and the time of a step without validation and
    compilation.

    Args:
        lines: number of lines of a run whose output is not a terminal.
        refresh_rate: steps between two updates of the bar.
    """

    def __init__(self, lines: int = 10, refresh_rate: int = 1):
        check_integer("callbacks.progress.lines", lines)
        check_integer("callbacks.progress.refresh_rate", refresh_rate, 0)
        super().__init__(refresh_rate=refresh_rate)
        self.lines = lines
        self.terminal = sys.stderr.isatty()
        if not self.terminal:
            self.disable()
        self.pace = Pace()
        self.validated = self.shown = 0  # the step of the last validation, and of the last one that a line has shown

    def get_metrics(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> dict[str, Any]:
        at = f" (step {self.validated})"
        names = {
            "train/loss": "loss",
            "train/bits_per_byte": "bits/byte",
            "validation/bits_per_byte": f"validation bits/byte{at}",
        }
        names["validation/top1"] = f"validation top-1{at}"
        names["validation/accuracy"] = f"validation accuracy{at}"
        known = trainer.callback_metrics
        return {short: f"{known[name].item():.3f}" for name, short in names.items() if name in known}

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self.pace.start()

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        super().on_validation_start(trainer, pl_module)
        self.pace.pause()

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        self.validated = trainer.global_step
        self.pace.go_on()

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        self.pace.step()
        step, steps = trainer.global_step, trainer.max_steps
        every = max(1, steps // self.lines) if steps > 0 else 100
        if self.terminal or step % every or not trainer.is_global_zero:
            return
        metrics = self.get_metrics(trainer, pl_module)
        if self.shown == self.validated:  # no news
            metrics = {name: value for name, value in metrics.items() if not name.startswith("validation")}
        self.shown = self.validated
        parts = [f"step {step}/{steps}", *(f"{name} {value}" for name, value in metrics.items())]
        if (seconds := self.pace.seconds) is not None:
            parts.append(f"{seconds * 1000:.0f} ms/step")
            if steps > 0:
                parts.append(f"{(steps - step) * seconds:.0f} s of steps left")
        print("  ".join(parts), file=sys.stderr, flush=True)


@register(group="callback", name="loss_curve")
class LossCurve(lightning.Callback):
    """A metric against steps, as a PNG: training, validation, and the baseline as a dashed line.

    The points are kept in the checkpoint, so that the curve of a resumed run is whole. The picture is drawn when
    validation ends, but not so often that drawing takes more than a hundredth of the time (`SHARE`), and at the end.

    Args:
        path: the PNG to write.
        every: steps between two points of the training curve.
        metric: logged as `train/<metric>` and `validation/<metric>`.
        label: of the metric, with its unit.
        title: of the figure.
    """

    def __init__(
        self,
        path: str,
        every: int = 5,
        metric: str = "bits_per_byte",
        label: str = "bits per byte",
        title: str = "Next-byte prediction",
    ):
        check_integer("callbacks.loss_curve.every", every)
        self.path, self.every = Path(path), every
        self.metric, self.label, self.title = metric, label, title
        self.baseline: float | None = None  # bits per byte; set by the training command
        self.points: dict[str, list[list[float]]] = {"train": [], "validation": []}
        self.next = -math.inf  # the moment from which on it may be drawn again
        self.drawn = (-1, -1)  # points of either curve in the picture

    def state_dict(self) -> dict[str, Any]:
        return {"points": self.points}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.points = state_dict["points"]

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step % self.every == 0:
            self._add("train", trainer)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if trainer.global_step and trainer.is_global_zero:
            self._add("validation", trainer)
            if time.monotonic() >= self.next:
                self._draw()

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if trainer.is_global_zero:
            self._draw()

    def _draw(self) -> None:
        """Nothing is drawn again that the picture shows already."""
        count = len(self.points["train"]), len(self.points["validation"])
        if count != self.drawn:
            began = time.monotonic()
            plot(self.points, self.baseline, self.path, self.label, self.title)
            ended = time.monotonic()
            self.drawn, self.next = count, ended + (ended - began) / SHARE

    def _add(self, name: str, trainer: lightning.Trainer) -> None:
        value = trainer.callback_metrics.get(f"{name}/{self.metric}")
        step = trainer.global_step
        if value is not None and (not self.points[name] or self.points[name][-1][0] < step):
            self.points[name].append([step, value.item()])


def plot(points: dict[str, list[list[float]]], baseline: float | None, path: Path, label: str, title: str) -> None:
    """Draws the curves of `LossCurve` into a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    styles: dict[str, dict[str, Any]] = {
        "train": {"linewidth": 1.0, "alpha": 0.7},
        "validation": {"marker": "o", "linewidth": 1.5},
    }
    for name, style in styles.items():
        if points[name]:
            steps, bits = zip(*points[name], strict=True)
            axes.plot(steps, bits, label=name, **style)
    if baseline is not None:
        axes.axhline(baseline, linestyle="--", color="gray", label="order-2 byte model")
    axes.set(xlabel="outer-loop steps", ylabel=label, title=title)
    values = [value for curve in points.values() for _, value in curve if math.isfinite(value)]
    if values:  # the first steps would squeeze the rest
        low, high = min([*values, baseline or values[0]]), max(sorted(values)[: max(1, int(0.97 * len(values)))])
        axes.set_ylim(low - 0.1, max(high, baseline or 0.0) + 0.1)
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(path)
