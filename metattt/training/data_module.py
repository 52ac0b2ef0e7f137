"""Our data sets, as Lightning asks for them."""

from __future__ import annotations

from typing import Any

import lightning
from torch.utils.data import DataLoader

from metattt.data.base import Data
from metattt.training.batches import batch_share


class Share:
    """A trainer as a data set sees it: only processes that read different windows count.

    Args:
        trainer: of the run.
    """

    def __init__(self, trainer: lightning.Trainer):
        self.trainer = trainer
        self.global_rank, self.world_size = batch_share(trainer)
        self.accumulate_grad_batches = trainer.accumulate_grad_batches

    @property
    def max_steps(self) -> int:
        return self.trainer.max_steps

    @property
    def global_step(self) -> int:
        return self.trainer.global_step


class ForLightning(lightning.LightningDataModule):
    """A data set with the trainer that reads it."""

    def __init__(self, data: Data):
        super().__init__()
        self.data = data

    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        self.data.trainer = Share(self.trainer)
        self.data.setup(stage)

    def state_dict(self) -> dict[str, Any]:
        return self.data.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.data.load_state_dict(state_dict)

    def train_dataloader(self) -> DataLoader[Any]:
        return self.data.train_dataloader()

    def val_dataloader(self) -> DataLoader[Any]:
        return self.data.val_dataloader()
