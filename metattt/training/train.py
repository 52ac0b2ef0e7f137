"""`metattt train`: from a configuration to a trained model, a log, curves and a report; text or images, as the data
is."""

from __future__ import annotations

import copy
import csv
import logging
import time
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig
from rich.console import Console

from metattt.checkpoints.files import LAST, find_checkpoint
from metattt.checkpoints.record import RECORD, record_config
from metattt.checkpoints.trained import read_checkpoint
from metattt.composition.instantiate import instantiate_part
from metattt.data.images import Images
from metattt.errors import MetaTTTError
from metattt.training.beforehand import check_before_training, open_folder
from metattt.training.building import Builder, differences
from metattt.training.callbacks import Interrupted, LossCurve
from metattt.training.checkpoint_files import CheckpointFiles
from metattt.training.data_module import ForLightning
from metattt.training.image_job import ImageJob
from metattt.training.inner_loss_curves import InnerLossCurves
from metattt.training.job import Job
from metattt.training.launchers import processes
from metattt.training.replay import replay
from metattt.training.resume import check_same_data, resumed
from metattt.training.sharding import FullyShardedData
from metattt.training.text_job import TextJob

NEEDED = ("task", "learner", "optimizer", "layer", "model", "data", "training", "trainer")  # parts of the configuration


def train(cfg: DictConfig) -> int:
    """Trains a model, validates it, and prints what came out (`TextJob`, `ImageJob`).

    Args:
        cfg: the configuration, as `metattt.composition.compose.compose(job="train")` makes it.

    Returns:
        The exit code: 0, or 130 after Ctrl-C.

    Raises:
        MetaTTTError: a setting, a path or a checkpoint that cannot be used, or a run that diverges.
    """
    if cfg.replay is not None:
        return replay(cfg.replay)
    console = Console(
        highlight=False, soft_wrap=True, quiet=bool(getattr(rank_zero_only, "rank", 0))
    )  # one of several processes speaks
    _quiet_lightning()
    for part in NEEDED:
        if cfg.get(part) is None:
            raise MetaTTTError(f"there is no run without {part}: leave out ~{part}")
    cfg = copy.deepcopy(cfg)  # the caller's stays as it is
    for key in ("path", "validation_path"):
        if key in cfg.data:
            cfg.data[key] = _absolute(cfg.data[key])  # so that the checkpoint can be used from another folder
    checkpoint = find_checkpoint(cfg.resume) if cfg.resume else None
    done, record, moved = 0, None, False
    if checkpoint is not None:
        content = read_checkpoint(checkpoint, tensors="none")
        record, done = content[RECORD], int(content["global_step"])
        cfg, moved = resumed(cfg, record_config(record, checkpoint), checkpoint)
        if 0 < cfg.trainer.get("max_steps", -1) <= done:
            raise MetaTTTError(
                f"the run {checkpoint} is complete at step {done}: to train on, add trainer.max_steps=<more>"
            )
    check_before_training(cfg)
    cfg.output_dir = cfg.output_dir or _new_folder(cfg)
    folder = open_folder(cfg)

    lightning.seed_everything(cfg.seed, verbose=False)
    data = instantiate_part(cfg, "data")
    job: Job[Any, Any] = ImageJob(cfg, data) if isinstance(data, Images) else TextJob(cfg, data)
    if cfg.init_from == "":
        raise MetaTTTError("this experiment starts from a trained model: add init_from=<its run folder or checkpoint>")
    build = Builder(cfg, cfg.init_from if checkpoint is None else None)
    trainer = _trainer(cfg)
    in_parts = isinstance(trainer.strategy, FullyShardedData) and isinstance(job, TextJob)
    model = build.empty() if in_parts else build.whole()
    module = job.module(model, instantiate_part(cfg, "training"))
    module.build = build
    job.prepare(trainer)
    if checkpoint is not None:
        _replay_log(trainer, done)
    job.header(console, trainer, model, done)
    if record is not None and (note := check_same_data(record, data, moved)):
        console.print(note)
    if record is None and cfg.init_from and (note := differences(cfg, cfg.init_from)):
        console.print(note)

    started = time.monotonic()
    try:
        trainer.fit(
            module, datamodule=ForLightning(data), ckpt_path=checkpoint, weights_only=True if checkpoint else None
        )
    except Interrupted:
        console.print(f"stopped at step {trainer.global_step}. To go on: metattt train resume={folder}")
        return 130
    trainer.save_checkpoint(folder / LAST)
    seconds = time.monotonic() - started
    if not _validated_last(trainer):
        trainer.validate(module, datamodule=ForLightning(data), verbose=False)
    job.report(console, trainer, seconds)
    _files(console, trainer, folder)
    job.sample(console, module)
    return 0


def _absolute(path: Any) -> Any:
    """A path, or a list of paths, that does not depend on the working directory."""
    if path is None:
        return None
    if not isinstance(path, str):
        return [_absolute(one) for one in path]
    return path if "://" in path else str(Path(path).expanduser().absolute())  # a stream may come from the net


def _new_folder(cfg: DictConfig) -> str:
    """`runs/<time>-<name>`, a folder that does not exist yet."""
    name = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{cfg.get('name') or 'run'}"
    folder, count = name, 1
    while folder.exists():
        count += 1
        folder = name.with_name(f"{name.name}-{count}")
    return str(folder)


def _trainer(cfg: DictConfig) -> lightning.Trainer:
    """Lightning's Trainer with the configured callbacks and loggers, each a named entry of its group."""
    callbacks = [instantiate_part(cfg.callbacks, name) for name in cfg.get("callbacks") or {}]
    loggers = [instantiate_part(cfg.logger, name) for name in cfg.get("logger") or {}]
    many = processes(cfg.trainer)
    trainer: lightning.Trainer = instantiate_part(cfg, "trainer", callbacks=callbacks, logger=loggers or False, **many)
    trainer.strategy.checkpoint_io = CheckpointFiles()
    return trainer


def _replay_log(trainer: lightning.Trainer, done: int) -> None:
    """Logs again what the run had logged up to step `done`: Lightning's CSV log starts as an empty file."""
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger):
            file = Path(logger.log_dir) / "metrics.csv"
            rows = list(csv.DictReader(file.open(newline=""))) if file.is_file() else []
            for row in rows:
                if int(row["step"]) <= done:
                    metrics: dict[str, torch.Tensor | float] = {
                        key: float(value) for key, value in row.items() if value and key != "step"
                    }
                    logger.log_metrics(metrics, step=int(row["step"]))
            logger.save()


def _validated_last(trainer: lightning.Trainer) -> bool:
    """Whether the last validation was after the last step."""
    interval = trainer.val_check_batch
    batches = trainer.global_step * trainer.accumulate_grad_batches
    return isinstance(interval, int) and interval > 0 and batches % interval == 0


def _files(console: Console, trainer: lightning.Trainer, folder: Path) -> None:
    """Where the results are."""
    console.print(f"checkpoint  {folder / LAST}")
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger):
            console.print(f"log         {Path(logger.log_dir) / 'metrics.csv'}")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (LossCurve, InnerLossCurves)) and callback.path.is_file():
            console.print(f"{'loss curve' if isinstance(callback, LossCurve) else 'inner loss'}  {callback.path}")


def _quiet_lightning() -> None:
    """Only what a user can act on: no lines about devices, workers and tips."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    unneeded = (
        "The dirpath has changed",  # a run whose folder has moved
        "does not have many workers", "dataloader is not resumable", "exists and is not empty", "isinstance.treespec",
        "IterableDataset.? has",  # a length, which timm knows
    )  # fmt: skip
    # the sums are over all processes already; nothing is done in place; the layout of a convolution's gradient
    several = ("sync_dist=True", "returned a view tensor", "Grad strides do not match")
    for message in (*unneeded, *several):
        warnings.filterwarnings("ignore", f".*{message}.*")
