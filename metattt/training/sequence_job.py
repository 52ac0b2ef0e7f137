"""What is special about training on synthetic sequences: inputs that must fit the model, and accuracy or squared error."""

from __future__ import annotations

from typing import Any

import lightning
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from metattt.checkpoints.record import make_record
from metattt.data.sequences import SequenceData
from metattt.errors import MetaTTTError
from metattt.models.language_model import LanguageModel
from metattt.training.batches import plan_images, validate_between_steps
from metattt.training.job import Job
from metattt.training.sequence_module import LabelledSequences
from metattt.training.sharding import FullyShardedData
from metattt.training.text_module import AdamW
from metattt.training.time_parallel import OverTime


class SequenceJob(Job[Any, LabelledSequences]):
    """Answers at the labelled tokens of synthetic sequences.

    Args:
        cfg: the configuration of the run.
        data: its data; checked against the model here.

    Raises:
        MetaTTTError: a model that does not read these sequences.
    """

    def __init__(self, cfg: DictConfig, data: SequenceData):
        self.cfg, self.data = cfg, data
        if data.vocab_size is not None:
            if "vocab_size" not in cfg.model:
                raise MetaTTTError("recall needs a language model: set experiment=recall, or model=language_model")
            if data.vocab_size > cfg.model.vocab_size:
                raise MetaTTTError(
                    f"the sequences have {data.vocab_size} different ids and the model {cfg.model.vocab_size}: "
                    f"set model.vocab_size={data.vocab_size}"
                )
        elif "in_features" not in cfg.model:
            raise MetaTTTError("regression in context needs a model that reads vectors: set experiment=in_context, or model=regression")
        elif data.inputs != cfg.model.in_features:
            raise MetaTTTError(
                f"a token of the sequences has {data.inputs} numbers and the model takes {cfg.model.in_features}: "
                f"set model.in_features={data.inputs}"
            )

    def module(self, model: Any, recipe: AdamW) -> LabelledSequences:
        """The Lightning module.

        Raises:
            MetaTTTError: a recipe for text or images alone.
        """
        if not isinstance(recipe, AdamW) or recipe.forward_only or recipe.chunk is not None:
            raise MetaTTTError("synthetic sequences are trained on whole, with gradients: set training=adamw training.chunk=null")
        if isinstance(model, LanguageModel) and hasattr(model, "mini_batch_size"):
            raise MetaTTTError(
                "model=ttt_e2e learns from the next token at every place, which these sequences do not have: set model=language_model"
            )
        return LabelledSequences(model, recipe, make_record(self.cfg))

    def prepare(self, trainer: lightning.Trainer) -> None:
        """Divides the batch among the trainer's processes."""
        if self.cfg.batch_tokens is not None:
            raise MetaTTTError("batch_tokens is for text: set data.batch_size and trainer.accumulate_grad_batches")
        if isinstance(trainer.strategy, FullyShardedData | OverTime):
            raise MetaTTTError("trainer=fsdp and trainer=time_parallel are for text: set trainer=default, or trainer=ddp")
        plan = plan_images(self.data.batch_size, trainer.accumulate_grad_batches, trainer.world_size)
        self.data.batch_size, trainer.accumulate_grad_batches = plan
        validate_between_steps(trainer)

    def header(self, console: Console, trainer: lightning.Trainer, model: Any, done: int) -> None:
        """What is about to run, in three lines."""
        count = self.data.batch_size * trainer.accumulate_grad_batches * trainer.world_size
        processes = f", {trainer.world_size} processes" if trainer.world_size > 1 else ""
        console.print(f"data    {self.data.describe()}")
        console.print(f"model   {model.num_parameters():,} parameters on {trainer.strategy.root_device}{processes}")
        start = f", from step {done:,}" if done else ""
        console.print(f"run     {trainer.max_steps:,} steps of {count:,} sequences{start} -> {self.cfg.output_dir}")

    def report(self, console: Console, trainer: lightning.Trainer, seconds: float) -> None:
        """The final table."""
        table, found = Table(title=f"after {trainer.global_step:,} steps ({seconds:.0f} s)", title_justify="left"), []
        for name, key, scale in (
            ("accuracy %", "accuracy", 100),
            ("cross-entropy (nats)" if self.data.vocab_size else "squared error", "loss", 1),
        ):
            if (value := trainer.callback_metrics.get(f"validation/{key}")) is not None:
                table.add_column(f"validation {name}", justify="right")
                found.append(f"{scale * value.item():.4g}")
        table.add_row(*found)
        console.print(table)

    def sample(self, console: Console, module: LabelledSequences) -> None:
        """Nothing to show."""
