"""What is special about training on images: sizes that must fit, the cost of an image, and top-1 and top-5 accuracy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lightning
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from metattt.checkpoints.record import make_record
from metattt.data.images import Images
from metattt.errors import MetaTTTError
from metattt.measures.flops import flops_per_image
from metattt.training.batches import plan_images, validate_between_steps
from metattt.training.image_module import ImageClassification, TimmRecipe
from metattt.training.job import Job
from metattt.training.resume import fingerprint
from metattt.training.sharding import FullyShardedData
from metattt.training.time_parallel import OverTime

if TYPE_CHECKING:
    from metattt.models.vision import ImageTransformer


class ImageJob(Job["ImageTransformer", ImageClassification]):
    """Image classification.

    Args:
        cfg: the configuration of the run.
        data: its data module; read and checked against the model here.

    Raises:
        MetaTTTError: images that cannot be read, or of another size, other channels or more classes than the model's.
    """

    def __init__(self, cfg: DictConfig, data: Images):
        self.cfg, self.data, self.mixup = cfg, data, False
        if "num_classes" not in cfg.model:
            raise MetaTTTError(
                "images need a model for images: set model=vision_transformer, or choose experiment=digits_pixel"
            )
        data.setup()
        for key in ("img_size", "in_chans"):
            if getattr(data, key) != cfg.model[key]:
                ours, theirs = getattr(data, key), cfg.model[key]
                raise MetaTTTError(f"the images have {key}={ours} and the model takes {theirs}: set model.{key}={ours}")
        if data.num_classes is not None and data.num_classes > cfg.model.num_classes:
            ours, theirs = data.num_classes, cfg.model.num_classes
            raise MetaTTTError(f"the images have {ours} classes and the model {theirs}: set model.num_classes={ours}")

    def module(self, model: ImageTransformer, recipe: TimmRecipe) -> ImageClassification:
        """The Lightning module."""
        if not isinstance(recipe, TimmRecipe):
            raise MetaTTTError(f"training: {type(recipe).__name__} is not for images: set training=timm")
        self.mixup = recipe.mixup > 0
        classes = {"classes": names} if (names := self.data.class_names) else {}
        evaluation = {} if self.data.evaluation is None else {"evaluation": dict(self.data.evaluation)}
        record = make_record(self.cfg, data=fingerprint(self.data), **classes, **evaluation)
        return ImageClassification(model, recipe, record)

    def prepare(self, trainer: lightning.Trainer) -> None:
        """Divides the batch among the trainer's processes, and counts the steps between validations over all passes."""
        if self.cfg.batch_tokens is not None:
            raise MetaTTTError("batch_tokens is for text: set data.batch_size and trainer.accumulate_grad_batches")
        if isinstance(trainer.strategy, FullyShardedData | OverTime):
            raise MetaTTTError(
                "trainer=fsdp is for text, and so is trainer=time_parallel: models for images fit on one device, set trainer=ddp"
            )
        plan = plan_images(self.data.batch_size, trainer.accumulate_grad_batches, trainer.world_size)
        self.data.batch_size, trainer.accumulate_grad_batches = plan
        if self.mixup and plan.batch_size % 2:
            raise MetaTTTError(
                f"training.mixup={self.cfg.training.mixup} mixes pairs of images, and a batch has {plan.batch_size} of them: "
                "change data.batch_size, or set training.mixup=0"
            )
        validate_between_steps(trainer)
        if isinstance(trainer.val_check_interval, int):
            trainer.check_val_every_n_epoch = None  # a stream has passes, which may be shorter

    def header(self, console: Console, trainer: lightning.Trainer, model: ImageTransformer, done: int) -> None:
        """What is about to run, in three lines."""
        images = self.data.batch_size * trainer.accumulate_grad_batches * trainer.world_size
        processes = f", {trainer.world_size} processes" if trainer.world_size > 1 else ""
        tokens, flops = model.patch_embed.num_patches, flops_per_image(model)
        console.print(f"images  {self.data.describe()}")
        console.print(
            f"model   {model.num_parameters():,} parameters, {flops / 1e9:.3g} GFLOPs per image of {tokens:,} tokens, "
            f"on {trainer.strategy.root_device}{processes}"
        )
        start = f", from step {done:,}" if done else ""
        console.print(f"run     {trainer.max_steps:,} steps of {images:,} images{start} -> {self.cfg.output_dir}")

    def report(self, console: Console, trainer: lightning.Trainer, seconds: float) -> None:
        """The final table."""
        table = Table(title=f"after {trainer.global_step:,} steps ({seconds:.0f} s)", title_justify="left")
        found = trainer.callback_metrics
        for name in ("top-1 %", "top-5 %", "cross-entropy (nats)"):
            table.add_column(f"validation {name}", justify="right")
        scores = [100 * found[f"validation/{name}"].item() for name in ("top1", "top5")]
        table.add_row(*(f"{score:.2f}" for score in scores), f"{found['validation/loss'].item():.4f}")
        console.print(table)

    def sample(self, console: Console, module: ImageClassification) -> None:
        """Nothing to show."""
