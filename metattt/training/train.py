"""`metattt train`: from a configuration to a trained model, a log, plots and a report; for text, images or synthetic
sequences."""

from __future__ import annotations

import copy
import logging
import os
import re
import shlex
import signal
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning import Callback, Trainer, seed_everything
from lightning.pytorch.accelerators import MPSAccelerator
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Checkpoint,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ProgressBar,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from metattt.checkpoints.record import RECORD, as_override, modules, own_modules, to_names
from metattt.checkpoints.rolling import path_of, steps
from metattt.composition.instantiate import instantiate_part
from metattt.composition.messages import first_line
from metattt.data.sources import is_local
from metattt.errors import MetaTTTError
from metattt.optional import need
from metattt.training.batches import batch_share
from metattt.training.building import Builder, differences
from metattt.training.callbacks import LossCurve
from metattt.training.compiling import CompileWherePays
from metattt.training.csv_log import logs_of
from metattt.training.divergence import advice
from metattt.training.job import ForLightning, Job, callback_of
from metattt.training.launchers import is_first, processes, started_by_the_run
from metattt.training.resume import check_same_data
from metattt.training.run import Start, check_given, opened, write_configuration
from metattt.training.saving import CheckpointFiles, Checkpoints, flag_of
from metattt.training.sharding import FullyShardedData
from metattt.training.signals import Interrupted

OUTSIDE = {"TensorBoardLogger": "tensorboard", "WandbLogger": "wandb", "MLFlowLogger": "mlflow"}
"""Lightning's loggers and the libraries that they need."""
PROFILERS: dict[Any, Any] = {"simple": SimpleProfiler, "advanced": AdvancedProfiler, "pytorch": PyTorchProfiler}
UNFIT: dict[type, str] = {
    StochasticWeightAveraging: "it averages once per epoch, and a run is counted in steps: "
    "lightning.pytorch.callbacks.EMAWeightAveraging and WeightAveraging average per step",
    GradientAccumulationScheduler: "it counts epochs, and a run has steps: set trainer.accumulate_grad_batches",
    BatchSizeFinder: "a run keeps its batches: set data.batch_size",
    LearningRateFinder: "a run keeps its schedule: compare rates in a sweep, -m training.lr=<rate>,<rate>",
}
"""Lightning's callbacks that would do something else here than they say, and what to do instead."""
LOST = re.compile("gloo|nccl|connection|peer|socket|store|timed? ?out|broken pipe", re.I)
"""Parts of error messages that mean that another process was lost."""


def train(cfg: DictConfig) -> int:
    """Trains a model, validates it, and prints the results (`metattt.training.job.Job` of its data).

    Args:
        cfg: the configuration, as `metattt.composition.compose.compose(job="train")` makes it.

    Returns:
        The exit code: 0; 130 after Ctrl-C, 143 after SIGTERM, 138 after SIGUSR1, with a checkpoint written.

    Raises:
        MetaTTTError: a setting, a path or a checkpoint that cannot be used, or a run that diverges.
    """
    first = is_first()
    console = Console(highlight=False, markup=False, soft_wrap=True, quiet=not first)  # one of several processes prints
    _quiet_lightning()
    check_given(cfg)
    cfg = copy.deepcopy(cfg)  # the caller's stays as it is
    # a format, or on the Hub
    named = "files" in cfg.data and (cfg.data.files is not None or not is_local(str(cfg.data.get("path"))))
    for key in ("path", "validation_path", "files"):
        if key in cfg.data and not (key == "path" and named):
            cfg.data[key] = _absolute(cfg.data[key])  # so that the checkpoint can be used from another folder
    tokenizer = cfg.data.get("tokenizer")
    if isinstance(tokenizer, str) and tokenizer != "bytes" and Path(tokenizer).expanduser().exists():
        cfg.data.tokenizer = _absolute(tokenizer)
    # what the command itself runs, a checkpoint may name
    own = own_modules(to_names(OmegaConf.to_container(cfg, resolve=True)))
    cfg.trust = [*modules(cfg.trust), *own] or None
    with opened(cfg, first, console.print) as begin:
        return 0 if begin.complete else _run(begin, console)


def _run(begin: Start, console: Console) -> int:
    """Runs the training from its starting point; returns the exit code."""
    cfg, folder, checkpoint, done = begin.cfg, begin.folder, begin.checkpoint, begin.done
    seed_everything(cfg.seed, verbose=False)
    data = instantiate_part(cfg, "data")
    job: Job = data.job(cfg)
    if cfg.init_from == "":
        raise MetaTTTError("this experiment starts from a trained model: add init_from=<its run folder or checkpoint>")
    build = Builder(cfg, cfg.init_from if checkpoint is None else None)
    trainer = _trainer(cfg, done)
    if trainer.world_size == 1 and not is_first():  # it would lock and log nothing, and write over other runs
        ranks = [name for name in ("LOCAL_RANK", "NODE_RANK", "GROUP_RANK") if name in os.environ]
        raise MetaTTTError(
            f"{', '.join(f'{name}={os.environ[name]}' for name in ranks)} in the environment is of one of several "
            f"processes, and this run has one: unset {' '.join(ranks)}, or set trainer.devices and trainer.num_nodes"
        )
    in_parts = isinstance(trainer.strategy, FullyShardedData) and job.in_parts
    if callback_of(trainer, WeightAveraging) is not None:
        if in_parts:
            raise MetaTTTError("WeightAveraging needs the whole model, which this trainer divides: set trainer=ddp")
        if (kind := trainer.precision) in ("bf16-true", "16-true"):  # validation puts the averages into the model
            raise MetaTTTError(
                f"WeightAveraging with trainer.precision={kind} would round the averages to 16 bits at every "
                f"validation: set trainer.precision={kind.replace('true', 'mixed')}"
            )
    model = build.to_divide() if in_parts else build.whole()
    module = job.module(model, instantiate_part(cfg, "training"))
    module.build = build
    job.prepare(trainer)
    if share := batch_share(trainer)[0]:  # other dropout and corruption in other windows
        seed_everything((cfg.seed + share) % 2**32, verbose=False)
    if cfg.trainer.get("precision") == "64-true":  # Lightning restores weights before it makes them so
        module.double()
    notes = []
    if checkpoint is not None:
        notes.append(check_same_data(begin.content[RECORD], data, begin.moved))
    elif cfg.init_from:
        read_by = getattr(data, "tokenizer", None)
        notes.append(differences(cfg, cfg.init_from, read_by and (read_by.content or "bytes")))
    if is_first():  # nothing of another run, or of a later part of this one, goes before all is known to be right
        begin.clear()
        write_configuration(folder, cfg)
        settings: Any = OmegaConf.to_container(cfg, resolve=True)
        for logger in trainer.loggers if not done else ():
            logger.log_hyperparams(settings)
    notes += [log.go_on_from(done, flag_of(begin.content, "validate_again")) for log in logs_of(trainer)]
    job.header(console, trainer, model, done)
    for note in filter(None, notes):
        console.print(note)
    started, batches = time.monotonic(), ForLightning(data)
    try:
        trainer.fit(module, datamodule=batches, ckpt_path=checkpoint, weights_only=True if checkpoint else None)
        trial = bool(trainer.fast_dev_run)  # type: ignore[attr-defined]
        if callback_of(trainer, Checkpoints) is None and not trial:
            trainer.save_checkpoint(path_of(folder, trainer.global_step))
        seconds = time.monotonic() - started
        if module.validated != trainer.global_step:  # its time may have ended anywhere, with a validation
            trainer.validate(module, datamodule=batches, verbose=False)
        job.report(console, trainer, seconds)
        _files(console, trainer, folder)
        job.sample(console, module)
        last = trainer.callback_metrics.get("validation/loss")
        if last is not None and not last.isfinite():  # all is saved; no sweep takes it for a result
            raise MetaTTTError(f"the last validation loss is {last.item()}: {advice(module)}")
    except Interrupted as stop:
        own = own_modules(to_names(OmegaConf.to_container(cfg)))
        words = [f"resume={folder}", *([as_override(own)] if own else [])]
        console.print(f"stopped at step {trainer.global_step} ({stop}). To resume: metattt train {shlex.join(words)}")
        return 0 if started_by_the_run() else stop.exit_code
    except SystemExit:  # Lightning's own end after Ctrl-C
        if callback_of(trainer, Checkpoints) is not None:
            raise
        console.print(f"stopped at step {trainer.global_step}; nothing is saved without callbacks.checkpoint")
        return 128 + signal.SIGINT
    except RuntimeError as error:
        if trainer.world_size == 1 or not LOST.search(str(error)):
            raise
        if trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(signal.SIGKILL)  # a stopped process would hang
        again = shlex.quote(f"resume={folder}")
        known = f"to resume: metattt train {again}" if steps(folder) else "nothing is saved yet"
        raise MetaTTTError(
            f"another process of the run has died or hangs ({first_line(error):.200}); {known}"
        ) from error
    finally:
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger) and trainer.is_global_zero:
                logger.experiment.finish()  # all logs are sent; the next run in this process starts new ones
    return 0


def _absolute(path: Any) -> Any:
    """A path, or a list of paths, that does not depend on the working directory; what else is given stays as it is."""
    if isinstance(path, Sequence) and not isinstance(path, str):
        return [_absolute(one) for one in path]
    if not isinstance(path, str) or "://" in path:  # a stream may come from the net
        return path
    return str(Path(path).expanduser().absolute())


def _trainer(cfg: DictConfig, done: int) -> Trainer:
    """Lightning's Trainer with the configured callbacks and loggers, each a named entry of its group. What TensorBoard
    has of steps after the `done` ones, which a killed run took, is hidden."""
    callbacks = [_entry(cfg, "callbacks", name, Callback) for name in cfg.get("callbacks") or {}]
    if cfg.compile == "auto":
        callbacks.append(CompileWherePays())
    loggers = [_entry(cfg, "logger", name, Logger, done) for name in cfg.get("logger") or {}]
    settings = {"default_root_dir": cfg.trainer.get("default_root_dir") or cfg.output_dir, **processes(cfg.trainer)}
    for key, kind in (("enable_checkpointing", Checkpoint), ("enable_progress_bar", ProgressBar)):
        if key not in cfg.trainer:  # else Lightning adds one of its own
            settings[key] = any(isinstance(callback, kind) for callback in callbacks)
    if cfg.trainer.get("accelerator") == "auto" and MPSAccelerator.is_available():
        settings["accelerator"] = "cpu"  # Apple's GPUs have no float64, in which losses are added up
    if (profiler := cfg.trainer.get("profiler")) in PROFILERS:
        settings["profiler"] = PROFILERS[profiler](dirpath=cfg.output_dir, filename="profile")
    trainer = instantiate_part(cfg, "trainer", callbacks=callbacks, logger=loggers or False, **settings)
    if not isinstance(trainer, Trainer):
        raise MetaTTTError(f"trainer._target_={cfg.trainer.get('_target_')} is not a lightning.Trainer: leave it out")
    trainer.strategy.checkpoint_io = CheckpointFiles()
    return trainer


def _entry(cfg: DictConfig, group: str, name: str, kind: type, done: int = 0) -> Any:
    """A callback or logger; an entry that is none raises an error."""
    node = cfg[group][name]
    known = str(node.get("_target_") if isinstance(node, DictConfig) else None).rpartition(".")[2]
    if known in OUTSIDE:
        need(OUTSIDE[known], extra="loggers", what=f"{group}={name}")
    more = {"purge_step": done + 1} if done and known == "TensorBoardLogger" else {}
    made = instantiate_part(cfg[group], name, **more) if isinstance(node, DictConfig) else None
    if not isinstance(made, kind):
        raise MetaTTTError(f"{group}.{name}={node} is not allowed: ~{group}.{name} leaves it out")
    if instead := next((said for unfit, said in UNFIT.items() if isinstance(made, unfit)), None):
        raise MetaTTTError(f"{group}.{name}={known} is not allowed: {instead}")
    return made


def _files(console: Console, trainer: Trainer, folder: Path) -> None:
    """Where the results are."""
    if not trainer.fast_dev_run:  # type: ignore[attr-defined]
        console.print(f"checkpoint  {path_of(folder, trainer.global_step)}")
        saving = callback_of(trainer, Checkpoints)
        if saving is not None and saving.best_step is not None:
            best = path_of(folder, saving.best_step)
            place = best if best.exists() else f"step {saving.best_step} of the run that this one began from"
            console.print(f"best        {place}  ({saving.best} {saving.best_value:.4f})")
    for logger in trainer.loggers:
        places = [getattr(logger, name, None) for name in ("path", "log_dir", "save_dir", "name")]
        for place in [one for one in places if one and isinstance(one, str | Path)][:1]:  # fast_dev_run has none
            console.print(f"log         {place}")
    curve = callback_of(trainer, LossCurve)
    if curve is not None and curve.file.is_file():
        console.print(f"loss curve  {curve.file}")
    for file in sorted(folder.glob("fit-profile*.txt")):
        console.print(f"profile     {file}")


def _quiet_lightning() -> None:
    """Hides warnings that a user cannot act on: lines about devices, workers and tips."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # it says that a process that it has started is dead, before it ends the others
    logging.getLogger("lightning.fabric.strategies.launchers.subprocess_script").setLevel(logging.INFO)
    for message in (
        "callbacks used to create the checkpoint",  # of a resumed run without one of them
        "does not have many workers", "dataloader is not resumable", "isinstance.treespec",
        "IterableDataset.? has",  # a length, which timm knows
        "overridden `transfer_batch_to_device`",
        "sync_dist=True",  # the sums are over all processes already
        "returned a view tensor", "Grad strides do not match",  # nothing is done in place; of a convolution's gradient
    ):  # fmt: skip
        warnings.filterwarnings("ignore", f".*{message}.*")
