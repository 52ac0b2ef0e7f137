"""What is checked before anything of a run is read or made, and the record of its configuration."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from metattt.errors import MetaTTTError

CONFIGURATION = "run.yaml"
"""In the folder of a run: its configuration, for people. `config.yaml` beside weights is that of a converted model."""


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


def open_folder(cfg: DictConfig) -> Path:
    """Makes the folder of a run and writes its configuration there, resolved, as `run.yaml`.

    Raises:
        MetaTTTError: a folder that cannot be made or written.
    """
    folder = Path(cfg.output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not getattr(rank_zero_only, "rank", 0):  # one of several processes
            (folder / CONFIGURATION).write_text(OmegaConf.to_yaml(cfg, resolve=True), encoding="utf-8")
    except OSError as error:
        reason = "it is a file" if folder.is_file() else error.strerror
        raise MetaTTTError(f"output_dir={folder} cannot be used: {reason}; choose another folder") from error
    return folder
