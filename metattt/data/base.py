"""The contract of a data set: what training asks of it, and what it may ask of training. Lightning is not needed for
it."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from torch.utils.data import DataLoader

from metattt.composition.keys import MOST_ROWS
from metattt.declared import WithSettings
from metattt.errors import MetaTTTError
from metattt.setting import setting

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from metattt.training.job import Job

MOST_SEED = 2**63 - 1


class Place(NamedTuple):
    """Which batches of a run a process reads.

    Attributes:
        rank, world_size: this process among those that read different batches, and their number.
        done: batches that each of them has read.
        total: batches of each in the whole run; None: the run has no number of steps.
    """

    rank: int = 0
    world_size: int = 1
    done: int = 0
    total: int | None = None


ALONE = Place()
"""The place of the only process, which reads everything once."""


class ReadError(MetaTTTError):
    """Data that cannot be read, found while batches are made."""

    def __init__(self, message: str):
        # A data worker hands its error on as a traceback in text: the last line is ours.
        super().__init__((message.strip().splitlines() or [""])[-1].rpartition(f"{type(self).__name__}: ")[2])


class Data(WithSettings):
    """Batches to train on and to validate on. Its constructor is made from declared settings.

    A new kind of data is a subclass of `WindowData` (text), `Images` or `SequenceData`, which say how models are
    trained on it, and a YAML file in `configs/data`; or one of this class, with a job of its own.

    Args:
        batch_size: windows, images or sequences in a batch.
        seed: of the order of what is trained on.
        num_workers: processes that make batches; 0 makes them in the training process.

    Attributes:
        place: which batches this process reads; a run sets it before it asks for them.
        trained_by: `module:class` of the job that trains on it.
        scored_by: the module whose `evaluate` scores models of this data (`metattt.evaluation.evaluate.Evaluation`);
            None: they are scored as text.
        windows_of_text: a batch is windows of tokens `[B, T + 1]` and nothing else.
    """

    _group = "data"

    batch_size: int = setting(default=64, most=MOST_ROWS)
    seed: int = setting(default=0, least=0, most=MOST_SEED)
    num_workers: int = setting(default=0, least=0, most=1024)

    place = ALONE
    trained_by: ClassVar[str]
    scored_by: ClassVar[str | None] = None
    windows_of_text: ClassVar[bool] = False

    def job(self, cfg: DictConfig) -> Job:
        """How a model is trained on this data.

        Args:
            cfg: the configuration of the run.

        Raises:
            MetaTTTError: data that cannot be read, or that the model of the run cannot read.
        """
        job: Job = pkgutil.resolve_name(self.trained_by)(cfg, self)
        return job

    def setup(self, stage: str | None = None) -> None:
        """Finds or reads the data, once; called before the first batch is asked for."""

    def describe(self) -> str:
        """Where the data is from and how much there is, in a line; the name of the class, unless it says more."""
        return type(self).__name__

    def fingerprint(self) -> str | None:
        """What tells this data from other data wherever it is, a short text; None if it is always the same."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint that makes resuming quick. Which batches come next follows from `place`."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` gave."""

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled batches for the whole run, from those at `place.done` on."""
        raise NotImplementedError

    def val_dataloader(self) -> DataLoader[Any]:
        """The held-out data in order, a part of it in each process."""
        raise NotImplementedError
