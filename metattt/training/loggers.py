"""Logs beside `metrics.csv`: TensorBoard, Weights & Biases, MLflow. A run that goes on goes on in the same place of each.

They are Lightning's, with the settings that a configuration has, and with a name of the run that outlives it.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from metattt.errors import MetaTTTError
from metattt.io import read_object, write_whole
from metattt.optional import need
from metattt.registry import register
from metattt.training.run_folder import LOGGED_AS


@register(group="logger", name="tensorboard")
class TensorBoardLog(TensorBoardLogger):
    """Event files in a folder: `tensorboard --logdir runs`.

    Args:
        folder: for them.

    Raises:
        MetaTTTError: TensorBoard is not installed.
    """

    def __init__(self, folder: str):
        need("tensorboard", extra="loggers", what="logger=tensorboard")
        self.place = folder
        super().__init__(save_dir=folder, name="", version="", default_hp_metric=False)

    def take_up(self, step: int, settings: Mapping[str, Any]) -> None:
        """Begins, or goes on after a step."""
        if step:
            self._kwargs["purge_step"] = step + 1  # rows that come again are shown once
        else:
            self.log_hyperparams(dict(settings))

    def close(self) -> None:
        """What is logged is on the disk."""
        self.finalize("success")


@register(group="logger", name="wandb")
class WandbLog(WandbLogger):
    """A run of Weights & Biases.

    Args:
        folder: of the run, for its files.
        project: that it belongs to.
        name: of the run.
        entity: user or team; None is the default of the login.
        group: runs that belong together, such as those of a sweep.
        offline: everything stays in `folder`, until `wandb sync`.

    Raises:
        MetaTTTError: wandb is not installed.
    """

    def __init__(
        self,
        folder: str,
        project: str = "metattt",
        name: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        offline: bool = False,
    ):
        wandb = need("wandb", extra="loggers", what="logger=wandb")
        self.folder, self.place = Path(folder), str(Path(folder) / "wandb")
        # not Lightning's `offline`, which is for all runs of the process to come
        mode: dict[str, Any] = {"mode": "offline"} if offline else {}
        super().__init__(
            name=name, save_dir=folder, project=project, id=_name_of(self.folder, "wandb") or secrets.token_hex(4),
            entity=entity, group=group, settings=wandb.Settings(silent=True), **mode,
        )  # fmt: skip
        self._wandb_init.pop("anonymous", None)  # of which W&B warns

    def take_up(self, step: int, settings: Mapping[str, Any]) -> None:
        """Begins, or goes on.

        Raises:
            MetaTTTError: the service does not take it.
        """
        wandb = need("wandb", extra="loggers", what="logger=wandb")
        try:
            run = self.experiment
            _keep_name(self.folder, "wandb", run.id)
            run.config.update(dict(settings), allow_val_change=True)
        except (wandb.errors.Error, OSError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise MetaTTTError(
                f"logger=wandb cannot begin: {reason:.200}\nlogger.wandb.offline=true keeps the log in the run's folder, for `wandb sync`"
            ) from error
        self.place = run.url or self.place

    @rank_zero_only
    def close(self) -> None:
        """What is logged has arrived."""
        if self._experiment is not None:
            self._experiment.finish()


@register(group="logger", name="mlflow")
class MLflowLog(MLFlowLogger):
    """A run of MLflow.

    Args:
        folder: of the run.
        experiment: that it belongs to.
        name: of the run.
        tracking_uri: where MLflow keeps it; None is MLflow's own default, also from `MLFLOW_TRACKING_URI`.

    Raises:
        MetaTTTError: MLflow is not installed.
    """

    def __init__(
        self, folder: str, experiment: str = "metattt", name: str | None = None, tracking_uri: str | None = None
    ):
        mlflow = need("mlflow", extra="loggers", what="logger=mlflow")
        logging.getLogger("alembic").setLevel(logging.WARNING)  # a line for every table that it makes
        self.folder, where = Path(folder), str(tracking_uri or mlflow.get_tracking_uri())
        self.place = where
        try:
            super().__init__(
                experiment_name=experiment, run_name=name, tracking_uri=where, run_id=_name_of(self.folder, "mlflow")
            )
        except Exception as error:
            raise _refused(where, error) from error

    def take_up(self, step: int, settings: Mapping[str, Any]) -> None:
        """Begins, or goes on.

        Raises:
            MetaTTTError: the service does not take it.
        """
        begins = _name_of(self.folder, "mlflow") is None
        try:
            run = str(self.run_id)
            if begins:
                _keep_name(self.folder, "mlflow", run)
                self.log_hyperparams(dict(settings))
        except Exception as error:  # of MLflow, its data base, or the net
            raise _refused(self.place, error) from error
        self.place = f"{self.place}, run {run}"

    def close(self) -> None:
        """Nothing is left to do: MLflow is told of every row at once."""


def _refused(where: str, error: Exception) -> MetaTTTError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return MetaTTTError(f"logger=mlflow cannot write to {where}: {reason:.200}; set logger.mlflow.tracking_uri")


def _name_of(folder: Path, program: str) -> str | None:
    """What a program calls the run in a folder, if it has begun there."""
    if not (folder / LOGGED_AS).is_file():
        return None
    name = read_object(folder / LOGGED_AS, 2**16).get(program)
    return name if isinstance(name, str) else None


@rank_zero_only
def _keep_name(folder: Path, program: str, name: str) -> None:
    names = read_object(folder / LOGGED_AS, 2**16) if (folder / LOGGED_AS).is_file() else {}
    write_whole(folder / LOGGED_AS, json.dumps({**names, program: name}).encode())
