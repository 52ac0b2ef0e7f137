"""What every kind of data has in common in training: the Lightning module, the data as Lightning asks for it, and the
job around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from lightning import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from metattt.checkpoints.record import RECORD
from metattt.data.base import Data, Place
from metattt.errors import MetaTTTError
from metattt.training.batches import batch_share, plan_batches, recount_batches, validate_between_steps
from metattt.training.random_state import random_state, set_random_state

C = TypeVar("C", bound=Callback)


class OuterLoop(LightningModule):
    """Trains a model on batches. A subclass for a kind of data defines the loss of a batch and the validation.

    Args:
        model: the model.
        recipe: the outer optimizer and its schedule.
        record: of the run (`metattt.checkpoints.record`), kept in every checkpoint.
    """

    build: Any = None  #: makes the model in parts; trainer=fsdp needs it, and `model` may then be without values

    def __init__(self, model: Any, recipe: Any, record: dict[str, Any]):
        super().__init__()
        self.model, self.recipe, self.record = model, recipe, record
        # of the step and of the validation so far, by figure, [2]: its sum, and the number of what it is over
        self.step_sums: dict[str, Tensor] = {}
        self.validation_sums: dict[str, Tensor] = {}
        self.validated = -1  # the step of the last validation in this process

    def batch_loss(self, batch: Any) -> Tensor:
        """The loss of a batch, as a training step takes it."""
        raise NotImplementedError

    def read(self, batch: Any) -> None:
        """Runs the model on a batch of the validation, whatever its labels are."""
        self.model(batch[0])

    def shortest_loss(self) -> Tensor:
        """The loss of the smallest batch. Parameters that do not affect it may get no gradient in a step."""
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.batch_loss(batch)
        self.add_to_step(batch_idx, loss=(loss, torch.ones_like(loss)))
        return loss

    def add_to_step(self, batch_idx: int, **figures: tuple[Tensor, Tensor]) -> None:
        """Adds a batch to figures of its step, to each a sum and the number of what it is over; with the last batch,
        they are logged."""
        per_step = self.trainer.accumulate_grad_batches
        if batch_idx % per_step == 0:
            self.step_sums = {}
        _add(self.step_sums, figures)
        if (batch_idx + 1) % per_step == 0:
            # Lightning takes the step of the log from here; its own count slips on resuming. (What the host knows is
            # logged as a tensor there: a plain number would be sent to the device, and waited for.)
            self.log("step", torch.tensor(self.global_step + 1.0))
            self._log_means("train", self.step_sums)

    def on_validation_epoch_start(self) -> None:
        """Every validation draws the same random numbers, and the training goes on as if it had drawn none."""
        self.validation_sums, self.random = {}, random_state(self.device)
        torch.manual_seed(0)

    def add_to_validation(self, **figures: tuple[Tensor, Tensor]) -> None:
        """Adds a batch to figures of the validation: to each a sum, and the number of what it is over."""
        _add(self.validation_sums, figures)

    def on_validation_epoch_end(self) -> None:
        set_random_state(self.random, self.device)
        self.log("step", float(self.global_step))
        self._log_means("validation", self.validation_sums)
        self.validated = self.global_step

    def _log_means(self, part: str, sums: dict[str, Tensor]) -> None:
        """Over all batches in all processes, divided once: they may differ in size."""
        of_all = self.trainer.strategy.reduce(torch.stack(list(sums.values())), reduce_op="sum")
        for name, (total, count) in zip(sums, of_all, strict=True):
            self.log(f"{part}/{name}", total / count)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.log("lr", torch.tensor(float(optimizer.param_groups[0]["lr"]), dtype=torch.float64))

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer = self.recipe.optimizer(self.model)
        schedule = self.recipe.schedule(optimizer, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_start(self) -> None:
        """The rate of the first step: with another number of steps than before, a checkpoint's is of another
        schedule."""
        scheduler = self.lr_schedulers()
        if isinstance(scheduler, LambdaLR):
            rates = zip(scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
            for group, base, factor in rates:
                group["lr"] = base * factor(scheduler.last_epoch)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[RECORD] = self.record

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if "current_model_state" in checkpoint and callback_of(self.trainer, WeightAveraging) is None:
            checkpoint["state_dict"] = checkpoint["current_model_state"]  # else the run goes on from the averages
        recount_batches(checkpoint, self.trainer.accumulate_grad_batches)
        checkpoint["callbacks"].pop("Timer", None)  # trainer.max_time is of a job: the next one has as long again


def callback_of(trainer: Trainer, kind: type[C]) -> C | None:
    """The trainer's callback of this class."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return next((callback for callback in callbacks if isinstance(callback, kind)), None)


def _add(sums: dict[str, Tensor], figures: dict[str, tuple[Tensor, Tensor]]) -> None:
    for name, pair in figures.items():
        sums[name] = torch.stack([value.detach().double() for value in pair]) + sums.get(name, 0)


class ForLightning(LightningDataModule):
    """A data set that is told how far the run has come before it is asked for batches."""

    def __init__(self, data: Data):
        super().__init__()
        self._data = data

    @property
    def data(self) -> Data:
        """The data set, at the step of the run."""
        if (trainer := self.trainer) is not None:
            per_step, most = trainer.accumulate_grad_batches, trainer.max_steps
            total = most * per_step if most > 0 else None
            self._data.place = Place(*batch_share(trainer), trainer.global_step * per_step, total)
        return self._data

    def setup(self, stage: str) -> None:
        self.data.setup(stage)

    def state_dict(self) -> dict[str, Any]:
        return self._data.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._data.load_state_dict(state_dict)

    def train_dataloader(self) -> DataLoader[Any]:
        loader = self.data.train_dataloader()
        if self.trainer is not None and getattr(self._data, "streamed", False):  # Lightning ends a step with the pass
            per_step, count = self.trainer.accumulate_grad_batches, len(loader)
            if count < per_step:
                many = f"trainer.accumulate_grad_batches={per_step} is not allowed for a pass of {count} batches"
                raise MetaTTTError(f"{many}: set it to {count} or less, or lower data.batch_size")
            self.trainer.limit_train_batches = count - count % per_step
            if hasattr(loader.dataset, "set_epoch"):  # before its workers begin; `on_train_epoch_start` may be too late
                loader.dataset.set_epoch(self.trainer.current_epoch)
        return loader

    def val_dataloader(self) -> DataLoader[Any]:
        return self.data.val_dataloader()


class Job:
    """The part of training that depends on the kind of data (`Data.job`).

    Args:
        cfg: the configuration of the run.
        data: its data; read, and checked against the model.
    """

    kind = "data"  #: first word of the header
    unit = "sequences"  #: what a batch has a number of
    in_parts = False  #: the model can be made block by block (trainer=fsdp)

    def __init__(self, cfg: DictConfig, data: Any):
        self.cfg, self.data = cfg, data
        self.check()

    def check(self) -> None:
        """Reads the data; what cannot be read, or does not go with the model, raises an error."""

    def module(self, model: Any, recipe: Any) -> Any:
        """The Lightning module; a recipe for another kind of data raises an error."""
        raise NotImplementedError

    def prepare(self, trainer: Trainer) -> None:
        """Divides the batch among the trainer's processes, and counts the steps between validations over all passes.

        Raises:
            MetaTTTError: a batch that cannot be divided, or a trainer for text.
        """
        if self.cfg.batch_tokens is not None:
            raise MetaTTTError("batch_tokens is for text: set data.batch_size and trainer.accumulate_grad_batches")
        if hasattr(trainer.strategy, "on_block"):  # it divides language models, whose blocks it looks at
            raise MetaTTTError("trainer=fsdp is for text, and so is trainer=time_parallel: set trainer=ddp, or default")
        self.divide(trainer, None, 1, self.unit)

    def divide(self, trainer: Trainer, tokens: int | None, length: int, unit: str) -> None:
        """Sets the batch sizes of the trainer's processes: `metattt.training.batches.plan_batches`."""
        before, processes = (self.data.batch_size, trainer.accumulate_grad_batches), batch_share(trainer)[1]
        now = plan_batches(tokens, length, *before, processes, unit)
        self.data.batch_size, trainer.accumulate_grad_batches = now
        validate_between_steps(trainer)

    def header(self, console: Console, trainer: Trainer, model: Any, done: int) -> None:
        """Three lines about the run before it starts. `done`: steps of a resumed run."""
        count = self.data.batch_size * trainer.accumulate_grad_batches * batch_share(trainer)[1] * self.items()
        processes = f", {trainer.world_size} processes" if trainer.world_size > 1 else ""
        start = f", from step {done:,}" if done else ""
        console.print(f"{self.kind:<8}{self.data.describe()}")
        console.print(f"model   {self.about(model)} on {trainer.strategy.root_device}{processes}")
        console.print(f"run     {trainer.max_steps:,} steps of {count:,} {self.unit}{start} -> {self.cfg.output_dir}")

    def items(self) -> int:
        """How many of `unit` there are in an item of a batch."""
        return 1

    def about(self, model: Any) -> str:
        """The model in a few words."""
        return f"{model.num_parameters():,} parameters"

    def report(self, console: Console, trainer: Trainer, seconds: float) -> None:
        """The final table."""
        steps, asked = trainer.global_step, trainer.max_steps  # fewer: a callback or a time limit has ended it
        of = f"{steps:,} of {asked:,}" if steps < asked else f"{steps:,}"
        table = Table(title=f"after {of} steps ({seconds:.0f} s)", title_justify="left")
        known = {key.removeprefix("validation/"): value.item() for key, value in trainer.callback_metrics.items()}
        head, *rows = self.results(known) or [()]
        for name in head:
            table.add_column(name, justify="left" if name == "validation" else "right")
        for row in rows:
            table.add_row(*row)
        console.print(table)

    def results(self, known: Mapping[str, float]) -> Sequence[Sequence[str]]:
        """Head and rows of the final table, from what the last validation has logged."""
        shown = [
            (f"validation {name}", f"{scale * known[key]:{form}}")
            for key, (name, scale, form) in self.columns().items()
            if key in known
        ]
        return list(zip(*shown, strict=True))

    def columns(self) -> dict[str, tuple[str, float, str]]:
        """Logged figure of the validation -> its name in the final table, its factor and its format."""
        return {"loss": ("loss", 1, ".4g")}

    def sample(self, console: Console, module: Any) -> None:
        """A sample of the trained model, if there is one."""
