"""The contract of a data set: what training asks of it, and what it may ask of training. Lightning is not needed for
it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torch.utils.data import DataLoader

from metattt.errors import MetaTTTError, check_integer

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from metattt.training.job import Job

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


def check_loading(batch_size: int, seed: int, num_workers: int = 0) -> None:
    """Refuses what no loader can have.

    Raises:
        MetaTTTError: naming the setting.
    """
    check_integer("data.batch_size", batch_size, most=MOST_ROWS)
    check_integer("data.seed", seed, 0, MOST_SEED)
    check_integer("data.num_workers", num_workers, 0, MOST_WORKERS)


class ReadError(MetaTTTError):
    """Data that cannot be read, found while batches are made."""

    def __init__(self, message: str):
        # A data worker hands its error on as a traceback in text: the last line is ours.
        super().__init__((message.strip().splitlines() or [""])[-1].rpartition(f"{type(self).__name__}: ")[2])


class Data:
    """Batches to train on and to validate on.

    A new kind of data is a subclass of `WindowData` (text), `Images` or `SequenceData`, which say how models are
    trained on it, and a YAML file in `configs/data`; or one of this class, with a job of its own.

    Attributes:
        trainer: of the run that reads the batches; None outside of one.
        scored_by: the module whose `evaluate` scores models of this data (`metattt.evaluation.evaluate.Evaluation`);
            None: they are scored as text.
        windows_of_text: a batch is windows of tokens `[B, T + 1]` and nothing else.
    """

    trainer: Trainer | None = None
    scored_by: ClassVar[str | None] = None
    windows_of_text: ClassVar[bool] = False

    def job(self, cfg: DictConfig) -> Job[Any, Any]:
        """How a model is trained on this data.

        Args:
            cfg: the configuration of the run.

        Raises:
            MetaTTTError: data that cannot be read, or that the model of the run cannot read.
        """
        raise NotImplementedError

    def setup(self, stage: str | None = None) -> None:
        """Finds or reads the data, once; called before the first batch is asked for."""

    def describe(self) -> str:
        """Where the data is from and how much there is, in a line."""
        raise NotImplementedError

    def fingerprint(self) -> str | None:
        """What tells this data from other data wherever it is, a short text; None if it is always the same."""
        return None

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
