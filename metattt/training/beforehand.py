"""What is checked before anything of a run is read or made."""

from __future__ import annotations

import importlib
import re

import lightning
from omegaconf import DictConfig

from metattt.composition.components import TRAINER
from metattt.composition.compose import parts_of
from metattt.errors import MetaTTTError, check_flag, check_integer, check_number

NEEDED = ("model", "data", "training", "trainer")  # parts of the configuration

AUTO = "auto"  # resume=auto

FLAGS = (
    "barebones", "detect_anomaly", "enable_checkpointing", "enable_model_summary", "enable_progress_bar", "inference_mode",
    "sync_batchnorm", "use_distributed_sampler",
)  # fmt: skip


def check_given(cfg: DictConfig) -> None:
    """Refuses a configuration of which a part is missing, and words about the run's folder that do not go together.

    Raises:
        MetaTTTError: such a configuration.
    """
    stacked = cfg.get("model") is not None and cfg.model.get("blocks") is not None
    for part in NEEDED if stacked else (*parts_of(cfg.layer), *NEEDED) if cfg.get("layer") else ("layer",):
        if cfg.get(part) is None:
            raise MetaTTTError(f"there is no run without {part}: leave out ~{part}")
    if cfg.trainer.get("max_steps") is not None:
        check_integer("trainer.max_steps", cfg.trainer.max_steps, -1, advice=" (-1: no limit)")
    for key in ("resume", "output_dir"):
        if cfg[key] == "":
            raise MetaTTTError(f"{key}= is empty: give a folder, or leave it out (an empty variable of the shell?)")
    if cfg.resume == AUTO and not cfg.output_dir:
        raise MetaTTTError(
            f"resume={AUTO} goes on with the run in output_dir, or begins it there: add output_dir=<folder>"
        )
    if cfg.resume == AUTO and cfg.overwrite:
        raise MetaTTTError(f"resume={AUTO} keeps the run in output_dir, and overwrite=true does not: give one of them")


def check_before_training(cfg: DictConfig) -> None:
    """Refuses settings with which there is nothing to train.

    Raises:
        MetaTTTError: no steps, or a way of Lightning to train on a few batches, which takes the windows' order away.
    """
    trainer = cfg.trainer
    for group in ("callbacks", "logger"):
        for name, node in (cfg.get(group) or {}).items():
            if not isinstance(node, DictConfig) or "_target_" not in node:
                raise MetaTTTError(f"{group}.{name}={node} is not allowed: ~{group}.{name} leaves it out")
            if node.get("every_n_train_steps") is not None:
                check_integer(f"{group}.{name}.every_n_train_steps", node.every_n_train_steps)
    if trainer.get("max_steps") == 0:
        raise MetaTTTError(
            "trainer.max_steps=0 trains nothing: give the number of steps; metattt train --cfg shows a configuration"
        )
    _check_trainer(trainer)
    if trainer.get("overfit_batches"):
        raise MetaTTTError(
            f"trainer.overfit_batches={trainer.overfit_batches} is not supported: data.max_bytes=<few> trains on little text"
        )


def _check_trainer(trainer: DictConfig) -> None:
    """What Lightning would take, and fail of later, or in words of its own."""
    if trainer.get("_target_") != TRAINER:
        module, _, name = str(trainer.get("_target_")).rpartition(".")
        try:
            fits = issubclass(getattr(importlib.import_module(module), name), lightning.Trainer)
        except (ImportError, AttributeError, TypeError, ValueError):
            fits = False
        if not fits:
            raise MetaTTTError(f"trainer._target_={trainer.get('_target_')} is no lightning.Trainer: leave it out")
    given = {key: trainer.get(key) for key in trainer if trainer.get(key) is not None}  # null is Lightning's default
    epochs = given.get("max_epochs", -1)
    if epochs != -1:
        check_integer("trainer.max_epochs", epochs, advice=", or -1 for no limit")
    steps = given.get("max_steps", -1)
    if steps != -1 or epochs == -1:
        check_integer("trainer.max_steps", steps, advice=": a run must end")
    for key in ("accumulate_grad_batches", "check_val_every_n_epoch"):
        if key in given:
            check_integer(f"trainer.{key}", given[key])
    if given.get("num_nodes", "auto") != "auto":
        check_integer("trainer.num_nodes", given["num_nodes"])
    for key in FLAGS:
        if key in given:
            check_flag(f"trainer.{key}", given[key])
    if "num_sanity_val_steps" in given:
        check_integer("trainer.num_sanity_val_steps", given["num_sanity_val_steps"], -1)
    if "log_every_n_steps" in given:
        check_integer("trainer.log_every_n_steps", given["log_every_n_steps"], 0)
    if "gradient_clip_val" in given:
        check_number("trainer.gradient_clip_val", given["gradient_clip_val"], least=0)
    for key in ("val_check_interval", "limit_train_batches", "limit_val_batches"):
        value = given.get(key)
        if isinstance(value, float):
            check_number(f"trainer.{key}", value, above=0, most=1, advice=": a share, or an integer")
        elif value is not None and not (isinstance(value, str) and re.fullmatch(r"[\d:]+", value)):  # a time
            check_integer(f"trainer.{key}", value, advice=", or a share such as 0.25")
