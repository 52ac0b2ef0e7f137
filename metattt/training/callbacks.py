"""The display of a run while it trains: progress, and the plot of the loss."""

from __future__ import annotations

import math
import sys
import time
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar, WeightAveraging

from metattt.declared import WithSettings
from metattt.errors import MetaTTTError, check_integer
from metattt.io import path_of
from metattt.measures.inner_loss import Curves, average
from metattt.metrics_file import STEP, read_rows
from metattt.models.language_model import LanguageModel
from metattt.registry import register
from metattt.setting import setting
from metattt.training.csv_log import logs_of
from metattt.training.job import callback_of
from metattt.training.picture import plot
from metattt.training.random_state import apart_from_the_run
from metattt.training.sharding import divided

SHARE = 0.01  # largest share of the time of a run for drawing its plots
REST = 0.5  # seconds between two updates of the bar's metrics


@register(group="callback", name="progress")
class Progress(TQDMProgressBar):
    """Lightning's progress bar with loss, bits per byte and tokens per second; if the output is not a terminal (a file,
    CI), some lines instead, which show the last validation and the time that is left as well.

    The bar fetches numbers from the device at most twice a second, so that steps do not wait.

    Args:
        lines: number of lines of a run whose output is not a terminal.
    """

    def __init__(self, lines: int = 10):
        check_integer("callbacks.progress.lines", lines)
        super().__init__()
        self.lines = lines
        self.terminal = sys.stderr.isatty()
        if not self.terminal:
            self.disable()
        self.metrics: dict[str, Any] = {}  # that the bar shows
        self.read_at = -REST
        self.validated = self.first = 0  # the steps of the last validation, and at which this process began
        self.began = 0.0

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        if time.monotonic() - self.read_at >= REST:
            self.metrics, self.read_at = self._read(trainer), time.monotonic()
        return self.metrics

    def _read(self, trainer: Trainer) -> dict[str, Any]:
        """The metrics to show. Waits for the device."""
        at = f" (step {self.validated})"
        names = {
            "train/loss": ("loss", ".3f"),
            "train/bits_per_byte": ("bits/byte", ".3f"),
            "validation/bits_per_byte": (f"validation bits/byte{at}", ".3f"),
            "validation/top1": (f"validation top-1{at}", ".3f"),
            "validation/accuracy": (f"validation accuracy{at}", ".3f"),
            "tokens_per_second": ("tokens/s", ",.0f"),
            "images_per_second": ("images/s", ",.0f"),
        }
        known = trainer.callback_metrics
        return {short: format(known[name].item(), digits) for name, (short, digits) in names.items() if name in known}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self.began, self.first = time.monotonic(), trainer.global_step

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        self.validated = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        step, steps = trainer.global_step, trainer.max_steps
        every = max(1, steps // self.lines) if steps > 0 else 100
        ends = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if self.terminal or not ends or step % every or not trainer.is_global_zero:
            return
        parts = [f"step {step}/{steps}", *(f"{name} {value}" for name, value in self._read(trainer).items())]
        if steps > 0 and step > self.first:
            left = (time.monotonic() - self.began) / (step - self.first) * (steps - step)
            parts.append(f"{left:.0f} s left")
        print("  ".join(parts), file=sys.stderr, flush=True)


@register(group="callback", name="loss_curve")
class LossCurve(WithSettings, Callback):
    """A metric of the run's log (`logger=csv`) against steps, as a PNG: training, validation, and baselines as dashed
    lines. When a language model has been trained, a second panel: the loss of its inner loops before and after each
    step, by position in a window.

    It is drawn after validations, as long as drawing takes at most a hundredth of the time (`SHARE`), and at the end.

    Args:
        path: the PNG to write.
        metric: logged as `train/<metric>` and `validation/<metric>`.
        label: of the metric, with its unit.
        title: of the panel.
        inner_windows: validation windows over which the inner losses are averaged; 0 leaves their panel out. Layers
            without curves (`metattt.measures.inner_loss.unmeasured`) have none, nor have models that are divided among
            processes.
    """

    _group = "callbacks.loss_curve"

    path: str = setting()
    metric: str = setting(default="bits_per_byte")
    label: str = setting(default="bits per byte")
    title: str = setting(default="Next-token prediction")
    inner_windows: int = setting(default=32, least=0)

    def configure(self) -> None:
        self.file = path_of(self.path, f"{self._group}.path")
        self.baselines: dict[str, float] = {}  # bits per byte by name; set by the training command
        self.inner: dict[int, Curves] | None = None  # at the end of the run
        self.next = -math.inf  # the moment from which on it may be drawn again

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step and trainer.is_global_zero and time.monotonic() >= self.next:
            self._draw(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self.inner = self._inner_losses(trainer, pl_module)
            self._draw(trainer)

    def _draw(self, trainer: Trainer) -> None:
        began = time.monotonic()
        rows = next((read_rows(log.path)[0] for log in logs_of(trainer)), [])
        points = {
            part: [(int(row[STEP]), float(value)) for row in rows if (value := row.get(f"{part}/{self.metric}"))]
            for part in ("train", "validation")
        }
        plot(points, self.baselines, self.file, self.label, self.title, self.inner)
        ended = time.monotonic()
        self.next = ended + (ended - began) / SHARE

    def _inner_losses(self, trainer: Any, pl_module: Any) -> dict[int, Curves] | None:
        """The inner losses of the trained model on validation windows; None if there are none."""
        model, batches = pl_module.model, trainer.datamodule
        windows = getattr(getattr(batches, "data", batches), "windows_of_text", False)
        if not (self.inner_windows and windows and isinstance(model, LanguageModel)) or divided(model):
            return None
        training, averaging = model.training, callback_of(trainer, WeightAveraging)
        if averaging is not None:  # as for a validation: its own end of training may come after this one
            averaging.on_validation_epoch_start(trainer, pl_module)
        try:
            with apart_from_the_run(pl_module.device):  # views may be random
                whole = (real for batch in batches.val_dataloader() if len(real := batch[(batch >= 0).all(1)]))
                return average(model.eval(), whole, self.inner_windows, segment=2048)
        except MetaTTTError:  # no layer with an inner loss, or one that is not finite: the curve is drawn without
            return None
        finally:
            model.train(training)
            if averaging is not None:
                averaging.on_validation_epoch_end(trainer, pl_module)
