"""The contract of a data set: what training asks of it, and what it may ask of training. Lightning is not needed for
it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch.utils.data import DataLoader

from metattt.errors import MetaTTTError

MOST_ROWS = 2**20  # windows or images in a batch
MOST_WORKERS = 1024  # processes that make batches
MOST_SEED = 2**63 - 1


class Trainer(Protocol):
    """How far a run has come, and who takes part; `lightning.Trainer` is one."""

    accumulate_grad_batches: int

    @property
    def max_steps(self) -> int: ...

    @property
    def global_rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def global_step(self) -> int: ...


class ReadError(MetaTTTError):
    """Data that cannot be read, found while batches are made."""

    def __init__(self, message: str):
        # A data worker hands its error on as a traceback in text: the last line is ours.
        super().__init__((message.strip().splitlines() or [""])[-1].rpartition(f"{type(self).__name__}: ")[2])


class Data:
    """Batches to train on and to validate on.

    Attributes:
        trainer: of the run that reads the batches; None outside of one.
    """

    trainer: Trainer | None = None

    def setup(self, stage: str | None = None) -> None:
        """Finds or reads the data, once; called before the first batch is asked for."""

    def state_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint that makes going on quick. What comes next follows from the trainer's step."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` gave."""

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled batches for the whole run, from the step that the trainer has reached."""
        raise NotImplementedError

    def val_dataloader(self) -> DataLoader[Any]:
        """The held-out data in order, a part of it in each process."""
        raise NotImplementedError
