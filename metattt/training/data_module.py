"""Our data sets, as Lightning asks for them."""

from __future__ import annotations

from typing import Any

import lightning
from torch.utils.data import DataLoader

from metattt.data.base import Data


class ForLightning(lightning.LightningDataModule):
    """A data set, told which trainer reads it."""

    def __init__(self, data: Data):
        super().__init__()
        self.data = data

    def setup(self, stage: str) -> None:
        self.data.trainer = self.trainer
        self.data.setup(stage)

    def train_dataloader(self) -> DataLoader[Any]:
        return self.data.train_dataloader()

    def val_dataloader(self) -> DataLoader[Any]:
        return self.data.val_dataloader()
