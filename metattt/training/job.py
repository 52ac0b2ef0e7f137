"""The contract of a training job: what is special about one kind of data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

import lightning
from rich.console import Console

Model = TypeVar("Model")
Module = TypeVar("Module")


class Job(ABC, Generic[Model, Module]):
    """Made from the configuration and its data module, which it reads and checks against the model."""

    @abstractmethod
    def module(self, model: Model, recipe: Any) -> Module:
        """The Lightning module."""

    @abstractmethod
    def prepare(self, trainer: lightning.Trainer) -> None:
        """What needs the trainer: how many processes there are, which callbacks."""

    @abstractmethod
    def header(self, console: Console, trainer: lightning.Trainer, model: Model, done: int) -> None:
        """What is about to run, in three lines. `done`: steps of a run that goes on."""

    @abstractmethod
    def report(self, console: Console, trainer: lightning.Trainer, seconds: float) -> None:
        """The final table."""

    @abstractmethod
    def sample(self, console: Console, module: Module) -> None:
        """Something that the trained model made, if it makes anything."""
