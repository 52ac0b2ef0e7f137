"""Decides when a run writes checkpoints and which it keeps, and stops it between two steps after a signal."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning import Callback, LightningModule, Trainer
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import Timer, WeightAveraging

from metattt.checkpoints.folder import write_checkpoint
from metattt.checkpoints.rolling import path_of, prune
from metattt.checkpoints.trained import read_checkpoint
from metattt.data.base import ReadError
from metattt.declared import WithSettings
from metattt.errors import MetaTTTError
from metattt.metrics_file import STEP, larger_is_better, of_validation, read_rows
from metattt.registry import register
from metattt.setting import setting
from metattt.training.batches import at_end_of_step
from metattt.training.csv_log import logs_of
from metattt.training.job import callback_of
from metattt.training.random_state import random_state, set_random_state
from metattt.training.signals import Interrupted, StopRequests, silence_lightning


class CheckpointFiles(TorchCheckpointIO):
    """How strategies whose first process has all of the model read and write checkpoints."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        write_checkpoint(Path(path), checkpoint)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return read_checkpoint(path)


@register(group="callback", name="checkpoints")
class Checkpoints(WithSettings, Callback):
    """Writes `checkpoints/step-<n>` every so many steps, every so many minutes, at the best validation, at the end, and
    when a signal asks the run to stop.

    A checkpoint is written between two steps, after the log has the step and its validation, so that resuming
    reproduces the uninterrupted run exactly. Ctrl-C, SIGTERM and SIGUSR1 finish the step, write a checkpoint and raise
    `Interrupted`. They do not wait for a running validation: it is repeated.

    Args:
        folder: of the run.
        every_steps: steps between two checkpoints; null: only the minutes count.
        every_minutes: minutes between two checkpoints, at most; null: only the steps count.
        keep: number of the last checkpoints that are kept.
        best: the metric of the validation whose best value makes a checkpoint that is kept as well: the lowest, but of
            accuracies and PSNR the largest; null: none. A resumed run with another one begins to compare anew.

    Raises:
        MetaTTTError: a number that is not allowed; after a validation: a metric that is not logged.
    """

    _group = "callbacks.checkpoint"

    folder: str = setting()
    every_steps: int | None = setting(default=100)
    every_minutes: float | None = setting(default=10.0, least=0.01)
    keep: int = setting(default=2)
    best: str | None = setting(default="validation/loss")

    def configure(self) -> None:
        self.best_step: int | None = None
        self._sign = -1 if self.best is not None and larger_is_better(self.best) else 1
        self.best_value = self._sign * math.inf
        self.last: Path | None = None  # that this run has written
        self.validate_again = False  # for a checkpoint in the middle of a validation
        self.ended_early = False
        self._saved_step = self._validated_step = -1
        self._saved_at = 0.0
        self._between_steps = False
        self._running = False
        self._random: Mapping[str, Any] | None = None  # before the step under way
        self._found_random: list[Mapping[str, Any]] = []  # in the checkpoint that the run resumes from, by process
        self._ranks: Any = None  # for flags and plain data, on the CPU: no step waits for the GPU
        self._requests = StopRequests(self._kept)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self.folder = trainer.strategy.broadcast(self.folder)
        if trainer.world_size > 1 and dist.is_initialized():
            timeout = getattr(trainer.strategy, "_timeout", None)  # as of every other message
            self._ranks = dist.new_group(backend="gloo", timeout=timeout)
        silence_lightning(trainer)
        self._requests.speaks = trainer.is_global_zero
        self._requests.listen()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        together = getattr(trainer.strategy, "tensor_ranks", 1)  # they draw alike, whoever wrote the states
        first = trainer.global_rank - trainer.global_rank % together
        if first < len(self._found_random):
            set_random_state(self._found_random[first], trainer.strategy.root_device)
        self._found_random = []
        self._running, self._saved_step, self._saved_at = True, trainer.global_step, time.monotonic()
        self._take_random(trainer)
        self._compare_logged(trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._take_random(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._running:
            self._validated_step = trainer.global_step
            self._take_random(trainer)
        elif self.last == path_of(Path(self.folder), trainer.global_step):  # the run is over, and this its result
            self._validated_step = trainer.global_step
            self._is_best(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Called between two steps, when the log has the last step and its validation. (Not earlier: Lightning logs a
        step after its last hook.)"""
        if batch_idx % trainer.accumulate_grad_batches:
            return
        # Lightning's own count of steps, by which it logs every n-th, slips when a run resumes at a validation
        trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step
        signal, due = self._together((self._requests.received, self._is_due(trainer)))
        if due or (signal and trainer.global_step > self._saved_step):
            self._save(trainer, between_steps=True)
        if signal:
            raise Interrupted(signal)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if not self._running:
            return
        (signal,) = self._together((self._requests.received,))
        if signal:
            if (averaging := callback_of(trainer, WeightAveraging)) is not None:
                averaging.on_validation_epoch_end(trainer, pl_module)  # it validates its averages: puts weights back
            if trainer.global_step > self._saved_step:
                self._save(trainer, between_steps=True, validate_again=True)
            raise Interrupted(signal)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._is_best(trainer)
        timed = callback_of(trainer, Timer) is not None  # it stops a run that is resumed later
        self.ended_early = trainer.should_stop and bool(trainer.early_stopping_callbacks) and not timed
        if trainer.global_step > self._saved_step:
            self._save(trainer)
        self._running = False

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Data that cannot be read costs no step: what was done is saved, if one process trains and no batch is under
        way."""
        batches = trainer.fit_loop.epoch_loop.batch_progress.current
        between = batches.ready == batches.completed and batches.completed % trainer.accumulate_grad_batches == 0
        alone = self._running and trainer.training and self._ranks is None
        if isinstance(exception, ReadError) and alone and between and trainer.global_step > self._saved_step:
            self._save(trainer, between_steps=True)
        self._running = False
        self._requests.stop_listening()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._requests.stop_listening()

    def state_dict(self) -> dict[str, Any]:
        """The state of all processes together: the best validation, and the random generators of every process."""
        random: list[Any] = [self._random]
        if self._ranks is not None:
            mine, random = random[0], [None] * dist.get_world_size(self._ranks)
            dist.all_gather_object(random, mine, self._ranks)
        names = ("best", "best_step", "best_value", "validate_again", "ended_early")
        known = {name: getattr(self, name) for name in names}
        return {**known, "random": random}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict.get("best", self.best) == self.best:  # else its values are of another metric
            self.best_step, self.best_value = state_dict["best_step"], state_dict["best_value"]
        self._found_random = [one for one in state_dict["random"] if one is not None]

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._between_steps:
            at_end_of_step(checkpoint, self.validate_again)

    def _take_random(self, trainer: Trainer) -> None:
        """Between two steps: one that the end of the time, or a validation, cuts in two begins again on resuming."""
        if not trainer.fit_loop.epoch_loop.batch_progress.current.ready % trainer.accumulate_grad_batches:
            self._random = random_state(trainer.strategy.root_device)

    def _is_due(self, trainer: Trainer) -> bool:
        """Whether a checkpoint is to be written now, as the first process decides."""
        step, better = trainer.global_step, self._is_best(trainer)
        steps = self.every_steps is not None and step % self.every_steps == 0
        minutes = self.every_minutes is not None and time.monotonic() - self._saved_at >= 60 * self.every_minutes
        return trainer.is_global_zero and step > self._saved_step and (better or steps or minutes)

    def _is_best(self, trainer: Trainer) -> bool:
        """Whether the validation of this step, if there was one, is the best so far."""
        if self.best is None or self._validated_step != trainer.global_step:
            return False
        known = trainer.callback_metrics
        if self.best not in known:
            logged = ", ".join(sorted(name for name in known if name.startswith("validation"))) or "nothing"
            raise MetaTTTError(f"callbacks.checkpoint.best={self.best} is not logged: the validation logs {logged}")
        return self._improves(trainer.global_step, float(known[self.best]))

    def _improves(self, step: int, value: float) -> bool:
        """Compares a validation with the best one so far, whose place it takes if it is better."""
        if better := self._sign * value < self._sign * self.best_value:
            self.best_step, self.best_value = step, value
        return better

    def _compare_logged(self, trainer: Trainer) -> None:
        """Compares the validation of the step that a run resumes from, as the log has it: the one after the last step
        of a run comes after its checkpoint."""
        rows = [row for log in logs_of(trainer) for row in read_rows(log.path)[0]] if self.best is not None else []
        for row in rows:
            if int(row[STEP]) == trainer.global_step and of_validation(row) and (value := row.get(str(self.best))):
                self._improves(trainer.global_step, float(value))

    def _together(self, flags: tuple[int | bool, ...]) -> tuple[int, ...]:
        """The maximum of each number over all processes, so that all act alike between the same two steps."""
        if self._ranks is None:
            return tuple(int(flag) for flag in flags)
        numbers = torch.tensor([int(flag) for flag in flags])
        dist.all_reduce(numbers, dist.ReduceOp.MAX, self._ranks)
        return tuple(numbers.tolist())

    def _save(self, trainer: Trainer, between_steps: bool = False, validate_again: bool = False) -> None:
        """Writes a checkpoint; the log reaches the disk before it. A trial (`fast_dev_run`) has none: it is no run."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        path = path_of(Path(self.folder), trainer.global_step)
        for log in logs_of(trainer):
            log.sync()
        self._between_steps, self.validate_again = between_steps, validate_again
        try:
            trainer.save_checkpoint(path)
        finally:
            self._between_steps = self.validate_again = False
        self.last, self._saved_step, self._saved_at = path, trainer.global_step, time.monotonic()
        if trainer.is_global_zero:
            prune(Path(self.folder), self.keep, self.best_step)

    def _kept(self) -> str:
        return f"the last checkpoint is {self.last}" if self.last else "this run has written no checkpoint yet"


def flag_of(checkpoint: Mapping[str, Any], name: str) -> bool:
    """Whether a checkpoint has `validate_again`: it was written during a validation, which must be repeated; or
    `ended_early`: it is the last of a run that Lightning's `EarlyStopping` has ended."""
    states = checkpoint.get("callbacks")
    state = states.get(Checkpoints.__qualname__) if isinstance(states, Mapping) else None
    return bool(state[name]) if isinstance(state, Mapping) and name in state else False
