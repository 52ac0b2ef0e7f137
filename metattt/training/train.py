"""`metattt train`: from a configuration to a trained model, a log, curves and a report; text, images or
synthetic sequences, as the data is."""

from __future__ import annotations

import copy
import csv
import logging
import re
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import lightning
import torch
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.loggers import CSVLogger
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from metattt.checkpoints.record import RECORD
from metattt.checkpoints.rolling import path_of
from metattt.checkpoints.trust import modules
from metattt.composition.instantiate import instantiate_part
from metattt.data.sources import is_local
from metattt.errors import MetaTTTError
from metattt.training.beforehand import check_given
from metattt.training.building import Builder, differences
from metattt.training.callbacks import LossCurve
from metattt.training.checkpoint_files import CheckpointFiles
from metattt.training.csv_log import CSVLog
from metattt.training.data_module import ForLightning
from metattt.training.inner_loss_curves import InnerLossCurves
from metattt.training.job import Job
from metattt.training.launchers import follow_the_starter, is_first, processes, started_by_the_run
from metattt.training.loggers import MLflowLog, TensorBoardLog, WandbLog
from metattt.training.profiling import profiler, show
from metattt.training.replay import replay
from metattt.training.resume import OF_THE_COMMAND, WRITE, check_same_data
from metattt.training.saving import Checkpoints, validates_again
from metattt.training.sharding import FullyShardedData
from metattt.training.signals import Interrupted
from metattt.training.start import Start, open_run, start
from metattt.training.watch import Watch

C = TypeVar("C")
OUTSIDE = (TensorBoardLog, WandbLog, MLflowLog)
LOST = re.compile("gloo|nccl|connection|peer|socket|store|timed? ?out|broken pipe", re.I)
"""In the message of an error that comes when another process is lost."""


def train(cfg: DictConfig) -> int:
    """Trains a model, validates it, and prints what came out (`metattt.training.job.Job` of its data).

    Args:
        cfg: the configuration, as `metattt.composition.compose.compose(job="train")` makes it.

    Returns:
        The exit code: 0; 130 after Ctrl-C, 143 after SIGTERM, 138 after SIGUSR1, with a checkpoint written.

    Raises:
        MetaTTTError: a setting, a path or a checkpoint that cannot be used, or a run that diverges.
    """
    if cfg.replay is not None:
        return replay(cfg.replay, modules(cfg.trust))
    first = is_first()
    console = Console(highlight=False, soft_wrap=True, quiet=not first)  # one of several processes speaks
    if started_by_the_run():
        follow_the_starter()
    _quiet_lightning()
    check_given(cfg)
    cfg = copy.deepcopy(cfg)  # the caller's stays as it is
    named = "files" in cfg.data and (cfg.data.files is not None or not is_local(str(cfg.data.path)))  # a format, or on the Hub
    for key in ("path", "validation_path", "files"):
        if key in cfg.data and not (key == "path" and named):
            cfg.data[key] = _absolute(cfg.data[key])  # so that the checkpoint can be used from another folder
    opened = open_run(cfg, first)
    try:
        begin = start(cfg, opened, console.print)
        return 0 if begin.complete else _run(begin, console)
    finally:
        if opened.lock is not None:
            opened.lock.release()


def _run(begin: Start, console: Console) -> int:
    """The run from where it begins; its exit code."""
    cfg, folder, checkpoint, done = begin.cfg, begin.folder, begin.checkpoint, begin.done
    lightning.seed_everything(cfg.seed, verbose=False)
    data = instantiate_part(cfg, "data")
    job: Job[Any, Any] = data.job(cfg)
    if cfg.init_from == "":
        raise MetaTTTError("this experiment starts from a trained model: add init_from=<its run folder or checkpoint>")
    build = Builder(cfg, cfg.init_from if checkpoint is None else None)
    trainer = _trainer(cfg)
    in_parts = isinstance(trainer.strategy, FullyShardedData) and job.in_parts
    model = build.empty() if in_parts else build.whole()
    module = job.module(model, instantiate_part(cfg, "training"))
    module.build = build
    job.prepare(trainer)
    notes: list[str | None] = [*_take_up_logs(trainer, begin)]
    job.header(console, trainer, model, done)
    if checkpoint is not None:
        notes.append(check_same_data(begin.content[RECORD], data, begin.moved))
    elif cfg.init_from:
        notes.append(differences(cfg, cfg.init_from))
    for note in notes:
        if note:
            console.print(note)

    watch = _callback(trainer, Watch)
    if watch is not None:
        watch.folder = str(folder)
    started, ended_well = time.monotonic(), False
    try:
        trainer.fit(
            module, datamodule=ForLightning(data), ckpt_path=checkpoint, weights_only=True if checkpoint else None
        )
        if _callback(trainer, Checkpoints) is None:
            trainer.save_checkpoint(path_of(folder, trainer.global_step))
        seconds = time.monotonic() - started
        if not _validated_last(trainer, done):
            trainer.validate(module, datamodule=ForLightning(data), verbose=False)
        job.report(console, trainer, seconds)
        if cfg.trainer.get("profiler") is not None:
            show(console, folder)
        _files(console, trainer, folder, seconds)
        job.sample(console, module)
        ended_well = True
    except Interrupted as stop:
        ended_well = True
        console.print(f"stopped at step {trainer.global_step} ({stop}). To go on: metattt train resume={folder}")
        return 0 if started_by_the_run() else stop.exit_code
    except MetaTTTError:
        raise
    except Exception as error:
        if watch is not None and isinstance(error, RuntimeError) and LOST.search(str(error)):
            watch.wait()
        if checkpoint is not None and not (_callback(trainer, Begun) or Begun).begun:
            reason = (str(error).splitlines() or [""])[0]
            raise MetaTTTError(
                f"{checkpoint} holds a state that the run cannot take up ({type(error).__name__}: {reason:.200}): "
                "it is damaged, or of another version"
            ) from error
        raise
    finally:
        for logger in trainer.loggers:
            if isinstance(logger, OUTSIDE):
                logger.close()
        if watch is not None:
            watch.close(failed=not ended_well)
    return 0


class Begun(lightning.Callback):
    """Notes that a run has taken up its state and begun to train."""

    begun = False

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self.begun = True


def _absolute(path: Any) -> Any:
    """A path, or a list of paths, that does not depend on the working directory."""
    if path is None:
        return None
    if isinstance(path, Sequence) and not isinstance(path, str):
        return [_absolute(one) for one in path]
    if not isinstance(path, str):
        raise MetaTTTError(f"data.path={path} is no path: give a file, a folder or a list of these")
    return path if "://" in path else str(Path(path).expanduser().absolute())  # a stream may come from the net


def _trainer(cfg: DictConfig) -> lightning.Trainer:
    """Lightning's Trainer with the configured callbacks and loggers, each a named entry of its group."""
    callbacks = [instantiate_part(cfg.callbacks, name) for name in cfg.get("callbacks") or {}]
    callbacks.append(Begun())
    loggers = [instantiate_part(cfg.logger, name) for name in cfg.get("logger") or {}]
    settings = processes(cfg.trainer)
    if "enable_checkpointing" not in cfg.trainer:  # else Lightning adds a callback of its own, which writes elsewhere
        settings["enable_checkpointing"] = any(isinstance(callback, Checkpoint) for callback in callbacks)
    if "enable_progress_bar" not in cfg.trainer:  # the same
        settings["enable_progress_bar"] = any(isinstance(callback, ProgressBar) for callback in callbacks)
    settings["profiler"] = profiler(cfg.trainer.get("profiler"), Path(cfg.output_dir))
    trainer: lightning.Trainer = instantiate_part(
        cfg, "trainer", callbacks=callbacks, logger=loggers or False, **settings
    )
    trainer.strategy.checkpoint_io = CheckpointFiles()
    return trainer


def _take_up_logs(trainer: lightning.Trainer, begin: Start) -> list[str | None]:
    """Brings the logs to the step that the run begins at; lines for the user."""
    notes: list[str | None] = []
    for logger in trainer.loggers:
        if isinstance(logger, OUTSIDE) and trainer.is_global_zero:
            logger.take_up(begin.done, _settings(begin.cfg))
        elif isinstance(logger, CSVLog):
            notes.append(logger.go_on_from(begin.done, validates_again(begin.content)))
        elif isinstance(logger, CSVLogger) and begin.checkpoint is not None:
            _replay_log(logger, begin.done)
    return notes


def _settings(cfg: DictConfig) -> dict[str, Any]:
    """What other programs are told of a run's configuration."""
    plain = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items() if key not in (*OF_THE_COMMAND, *WRITE) or key == "trainer"}


def _replay_log(logger: CSVLogger, done: int) -> None:
    """Logs again what the run had logged up to step `done`: Lightning's CSV log starts as an empty file."""
    file = Path(logger.log_dir) / "metrics.csv"
    rows = list(csv.DictReader(file.open(newline=""))) if file.is_file() else []
    for row in rows:
        if int(row["step"]) <= done:
            metrics: dict[str, torch.Tensor | float] = {
                key: float(value) for key, value in row.items() if value and key != "step"
            }
            logger.log_metrics(metrics, step=int(row["step"]))
    logger.save()


def _callback(trainer: lightning.Trainer, kind: type[C]) -> C | None:
    """The callback of a kind, if there is one."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return next((callback for callback in callbacks if isinstance(callback, kind)), None)


def _validated_last(trainer: lightning.Trainer, done: int) -> bool:
    """Whether this process has validated after the last step."""
    interval = trainer.val_check_batch
    batches = trainer.global_step * trainer.accumulate_grad_batches
    return trainer.global_step > done and isinstance(interval, int) and interval > 0 and batches % interval == 0


def _files(console: Console, trainer: lightning.Trainer, folder: Path, seconds: float) -> None:
    """Where the results are."""
    saving = _callback(trainer, Checkpoints)
    console.print(f"checkpoint  {path_of(folder, trainer.global_step)}{saving.cost(seconds) if saving else ''}")
    if saving is not None and saving.best_step is not None:
        console.print(f"best        {path_of(folder, saving.best_step)}  ({saving.best} {saving.best_value:.4f})")
    for logger in trainer.loggers:
        if isinstance(logger, CSVLog):
            console.print(f"log         {logger.path}")
        elif isinstance(logger, OUTSIDE):
            console.print(f"log         {logger.place}")
        elif isinstance(logger, CSVLogger):
            console.print(f"log         {Path(logger.log_dir) / 'metrics.csv'}")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (LossCurve, InnerLossCurves)) and callback.path.is_file():
            console.print(f"{'loss curve' if isinstance(callback, LossCurve) else 'inner loss'}  {callback.path}")


def _quiet_lightning() -> None:
    """Only what a user can act on: no lines about devices, workers and tips."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    unneeded = (
        "callbacks used to create the checkpoint",  # of a run that goes on without one of them
        "does not have many workers", "dataloader is not resumable", "exists and is not empty", "isinstance.treespec",
        "IterableDataset.? has",  # a length, which timm knows
    )  # fmt: skip
    # the sums are over all processes already; nothing is done in place; the layout of a convolution's gradient
    several = ("sync_dist=True", "returned a view tensor", "Grad strides do not match")
    for message in (*unneeded, *several):
        warnings.filterwarnings("ignore", f".*{message}.*")
