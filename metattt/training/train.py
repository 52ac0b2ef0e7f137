"""`metattt train`: from a configuration to a trained model, a log, curves and a report; text or images, as the data is."""

from __future__ import annotations

import copy
import csv
import logging
import time
import warnings
from pathlib import Path
from typing import Any

import hydra
import lightning
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from metattt.checkpoints.trained import FILE_NAME, checkpoint_config, find_checkpoint, read_checkpoint
from metattt.composition.compose import compose
from metattt.data.images import Images
from metattt.errors import MetaTTTError
from metattt.training.building import Builder
from metattt.training.callbacks import Interrupted, LossCurve
from metattt.training.checkpoint_files import CheckpointFiles
from metattt.training.image_job import ImageJob
from metattt.training.inner_loss_curves import InnerLossCurves
from metattt.training.job import Job
from metattt.training.launchers import processes
from metattt.training.sharding import FullyShardedData
from metattt.training.text_job import TextJob

RESUMABLE = ("trainer", "callbacks", "logger", "sample")  # parts of the configuration that a resumed run may change


def train(cfg: DictConfig) -> int:
    """Trains a model, validates it, and prints what came out (`TextJob`, `ImageJob`).

    Args:
        cfg: the configuration, as `metattt.composition.compose.compose(job="train")` makes it.

    Returns:
        The exit code: 0, or 130 after Ctrl-C.

    Raises:
        MetaTTTError: a setting, a path or a checkpoint that cannot be used, or a loss that is not finite.
    """
    console = Console(highlight=False, soft_wrap=True, quiet=bool(getattr(rank_zero_only, "rank", 0)))  # one of several processes speaks
    _quiet_lightning()
    cfg = copy.deepcopy(cfg)  # the caller's stays as it is
    for key in ("path", "validation_path"):
        if key in cfg.data:
            cfg.data[key] = _absolute(cfg.data[key])  # so that the checkpoint can be used from another folder
    checkpoint = find_checkpoint(cfg.resume) if cfg.resume else None
    done = 0
    if checkpoint is not None:
        content = read_checkpoint(checkpoint, tensors="none")
        cfg, done = _resumed(cfg, checkpoint_config(content), checkpoint), int(content["global_step"])
        if 0 < cfg.trainer.max_steps <= done:
            raise MetaTTTError(f"the run {checkpoint} is complete at step {done}: to train on, add trainer.max_steps=<more>")
    cfg.output_dir = cfg.output_dir or _new_folder(cfg)
    folder = Path(cfg.output_dir)

    lightning.seed_everything(cfg.seed, verbose=False)
    data = _instantiate(cfg, "data")
    job: Job[Any, Any] = ImageJob(cfg, data) if isinstance(data, Images) else TextJob(cfg, data)
    if cfg.init_from == "":
        raise MetaTTTError("this experiment starts from a trained model: add init_from=<its run folder or checkpoint>")
    build = Builder(cfg, cfg.init_from if checkpoint is None else None)
    trainer = _trainer(cfg)
    in_parts = isinstance(trainer.strategy, FullyShardedData) and isinstance(job, TextJob)
    model = build.empty() if in_parts else build.whole()
    module = job.module(model, _instantiate(cfg, "training"))
    module.build = build
    job.prepare(trainer)
    if checkpoint is not None:
        _replay_log(trainer, done)
    job.header(console, trainer, model, done)

    started = time.monotonic()
    try:
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True if checkpoint else None)
    except Interrupted:
        console.print(f"stopped at step {trainer.global_step}. To go on: metattt train resume={folder}")
        return 130
    trainer.save_checkpoint(folder / FILE_NAME)
    seconds = time.monotonic() - started
    if not _validated_last(trainer):
        trainer.validate(module, datamodule=data, verbose=False)
    job.report(console, trainer, seconds)
    _files(console, trainer, folder)
    job.sample(console, module)
    return 0


def _resumed(given: DictConfig, saved: DictConfig, checkpoint: Path) -> DictConfig:
    """The configuration of the run, with what the command line changes.

    What is neither at its default nor as it was has been changed. Model, data and recipe stay: else it would be another run.
    """
    default, before = (_leaves(OmegaConf.to_container(one)) for one in (compose(job="train"), saved))
    for key, value in _leaves(OmegaConf.to_container(given)).items():
        unchanged = any(key in known and known[key] == value for known in (default, before))
        if key in ("resume", "output_dir") or unchanged:
            continue
        if key.partition(".")[0] not in RESUMABLE:
            allowed = ", ".join(f"{part}.*" for part in RESUMABLE)
            raise MetaTTTError(f"{key}={value} would change the run that resume goes on with: only {allowed} may be given")
        OmegaConf.update(saved, key, value, force_add=True)
    saved.resume, saved.output_dir = str(checkpoint), given.output_dir or str(checkpoint.parent)
    return saved


def _leaves(node: Any, prefix: str = "") -> dict[str, Any]:
    """Every value of a nested configuration, by dotted key."""
    if not isinstance(node, dict) or not node:
        return {prefix: node}
    items = ((f"{prefix}.{key}" if prefix else str(key), value) for key, value in node.items())
    return {leaf: value for key, child in items for leaf, value in _leaves(child, key).items()}


def _absolute(path: Any) -> Any:
    """A path, or a list of paths, that does not depend on the working directory."""
    if path is None:
        return None
    if not isinstance(path, str):
        return [_absolute(one) for one in path]
    return path if "://" in path else str(Path(path).expanduser().absolute())  # a stream may come from the net


def _new_folder(cfg: DictConfig) -> str:
    """`runs/<time>-<learner>`, a folder that does not exist yet."""
    learner = cfg.learner._target_.rpartition(".")[2]
    name = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{learner}"
    folder, count = name, 1
    while folder.exists():
        count += 1
        folder = name.with_name(f"{name.name}-{count}")
    return str(folder)


def _instantiate(cfg: DictConfig, key: str) -> Any:
    """`hydra.utils.instantiate` of one node; what a constructor refuses becomes one line."""
    try:
        return hydra.utils.instantiate(cfg[key], _convert_="all")
    except Exception as error:
        cause = error.__cause__ or error
        if isinstance(cause, MetaTTTError):
            raise cause from None
        raise MetaTTTError(f"{key}: {str(cause).splitlines()[0]}") from error


def _trainer(cfg: DictConfig) -> lightning.Trainer:
    """Lightning's Trainer with the configured callbacks and loggers, each a named entry of its group."""
    callbacks = [_instantiate(cfg.callbacks, name) for name in cfg.callbacks or {}]
    loggers = [_instantiate(cfg.logger, name) for name in cfg.logger or {}]
    try:
        many = processes(cfg.trainer)
        trainer: lightning.Trainer = hydra.utils.instantiate(cfg.trainer, callbacks=callbacks, logger=loggers or False, **many)
    except MetaTTTError:
        raise
    except Exception as error:  # Lightning's own checks of its arguments
        raise MetaTTTError(f"trainer: {str(error.__cause__ or error).splitlines()[0]}") from error
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
                    metrics: dict[str, torch.Tensor | float] = {key: float(value) for key, value in row.items() if value and key != "step"}
                    logger.log_metrics(metrics, step=int(row["step"]))
            logger.save()


def _validated_last(trainer: lightning.Trainer) -> bool:
    """Whether the last validation was after the last step."""
    interval = trainer.val_check_batch
    batches = trainer.global_step * trainer.accumulate_grad_batches
    return isinstance(interval, int) and interval > 0 and batches % interval == 0


def _files(console: Console, trainer: lightning.Trainer, folder: Path) -> None:
    """Where the results are."""
    console.print(f"checkpoint  {folder / FILE_NAME}")
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
        "does not have many workers", "dataloader is not resumable", "exists and is not empty", "isinstance.treespec",
        "IterableDataset.? has",  # a length, which timm knows
    )  # fmt: skip
    # the sums are over all processes already; nothing is done in place; the layout of a convolution's gradient
    several = ("sync_dist=True", "returned a view tensor", "Grad strides do not match")
    for message in (*unneeded, *several):
        warnings.filterwarnings("ignore", f".*{message}.*")
