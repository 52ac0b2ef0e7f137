"""What is checked before anything of a run is read or made."""

from __future__ import annotations

from omegaconf import DictConfig

from metattt.errors import MetaTTTError

NEEDED = ("task", "learner", "optimizer", "layer", "model", "data", "training", "trainer")  # parts of the configuration

AUTO = "auto"  # resume=auto


def check_given(cfg: DictConfig) -> None:
    """Refuses a configuration of which a part is missing, and words about the run's folder that do not go together.

    Raises:
        MetaTTTError: such a configuration.
    """
    for part in NEEDED:
        if cfg.get(part) is None:
            raise MetaTTTError(f"there is no run without {part}: leave out ~{part}")
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
    if trainer.get("max_steps") == 0:
        raise MetaTTTError(
            "trainer.max_steps=0 trains nothing: give the number of steps; metattt train --cfg shows a configuration"
        )
    if trainer.get("overfit_batches"):
        raise MetaTTTError(
            f"trainer.overfit_batches={trainer.overfit_batches} is not supported: data.max_bytes=<few> trains on little text"
        )
