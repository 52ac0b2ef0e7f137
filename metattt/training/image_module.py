"""The outer loop for images: classification with timm's optimizers, schedule and mixup."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from lightning import Trainer
from rich.console import Console
from torch import Tensor
from torch.utils.data import DataLoader

from metattt.checkpoints.record import make_record
from metattt.data.images import Batch
from metattt.errors import MetaTTTError
from metattt.measures.flops import flops_per_image
from metattt.measures.labelled import check_classes, classified
from metattt.training.job import Job, OuterLoop
from metattt.training.recipes import TimmRecipe

if TYPE_CHECKING:
    from metattt.models.vision import ImageTransformer


class ImageClassification(OuterLoop):
    """Trains a model on images `[B, C, h, w]` with labels `[B]`, mixed as the recipe says."""

    def __init__(self, model: ImageTransformer, recipe: TimmRecipe, record: dict[str, Any]):
        from timm.data import Mixup

        super().__init__(model, recipe, record)
        classes, alpha = model.num_classes, recipe.mixup
        self.mixup = Mixup(mixup_alpha=alpha, label_smoothing=0.0, num_classes=classes) if alpha else None

    def on_train_epoch_start(self) -> None:
        loader = self.trainer.train_dataloader
        if isinstance(loader, DataLoader) and hasattr(loader.dataset, "set_epoch"):
            loader.dataset.set_epoch(self.current_epoch)  # a stream of timm then reads its files in a new order

    def shortest_loss(self) -> Tensor:
        embed: Any = self.model.patch_embed
        like = {"device": self.device, "dtype": embed.proj.weight.dtype}
        return self.logits(torch.zeros(1, embed.proj.in_channels, *embed.img_size, **like)).logsumexp(1).sum()

    def logits(self, images: Tensor) -> Tensor:
        """`[B, V]`, in fp32 or wider."""
        found: Tensor = self.model(images)
        return found.to(torch.promote_types(found.dtype, torch.float32))

    def batch_loss(self, batch: Batch) -> Tensor:
        images, labels = batch
        check_classes(labels, self.model.num_classes, least=0)
        if self.mixup is not None:  # it works in place; labels become probabilities [B, classes]
            images, labels = self.mixup(images.clone(), labels)
        return F.cross_entropy(self.logits(images), labels)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, labels = batch
        check_classes(labels, self.model.num_classes)
        nats, first, among, count = classified(self.logits(images), labels)
        self.add_to_validation(loss=(nats, count), top1=(first, count), top5=(among, count))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        checkpoint["lr_schedulers"] = []  # timm's keeps the number of steps, and a resumed run may have another
        if self.trainer.datamodule.data.streamed:  # type: ignore[attr-defined]
            counts = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]  # of its pass: again
            counts.update(dict.fromkeys(counts, 0))

    def on_train_start(self) -> None:
        self.lr_scheduler_step(self.lr_schedulers(), None)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step_update(num_updates=self.global_step)


class ImageJob(Job):
    """Image classification."""

    kind = unit = "images"
    mixup = 0.0  #: of the recipe, whose configuration need not have it

    def check(self) -> None:
        """Refuses images that cannot be read, or of another size, other channels or more classes than the model's."""
        cfg, data = self.cfg, self.data
        if "num_classes" not in cfg.model:
            raise MetaTTTError(
                "images need a model for images: set model=vision_transformer, or choose experiment=digits_pixel"
            )
        data.setup()
        if wrong := [key for key in ("img_size", "in_chans") if getattr(data, key) != cfg.model[key]]:
            ours, theirs = [f"{key}={getattr(data, key)}" for key in wrong], [f"{cfg.model[key]}" for key in wrong]
            raise MetaTTTError(
                f"the images have {' and '.join(ours)}, and the model takes {' and '.join(theirs)}: set model."
                f"{' model.'.join(ours)}"
            )
        ours, theirs = data.num_classes, cfg.model.num_classes
        if ours is not None and ours > theirs:
            raise MetaTTTError(f"the images have {ours} classes and the model {theirs}: set model.num_classes={ours}")

    def module(self, model: ImageTransformer, recipe: TimmRecipe) -> ImageClassification:
        if not isinstance(recipe, TimmRecipe):
            raise MetaTTTError(f"training: {type(recipe).__name__} is not for images: set training=timm")
        self.mixup = recipe.mixup
        classes = {"classes": names} if (names := self.data.class_names) else {}
        evaluation = {} if self.data.evaluation is None else {"evaluation": dict(self.data.evaluation)}
        record = make_record(self.cfg, data=self.data.fingerprint(), **classes, **evaluation)
        return ImageClassification(model, recipe, record)

    def prepare(self, trainer: Trainer) -> None:
        super().prepare(trainer)
        if self.mixup and self.data.batch_size % 2:
            raise MetaTTTError(
                f"training.mixup={self.mixup} mixes pairs of images, and a batch has "
                f"{self.data.batch_size} of them: change data.batch_size, or set training.mixup=0"
            )
        if isinstance(trainer.val_check_interval, int):
            trainer.check_val_every_n_epoch = None  # a stream has passes, which may be shorter

    def header(self, console: Console, trainer: Trainer, model: ImageTransformer, done: int) -> None:
        super().header(console, trainer, model, done)
        if done and self.data.streamed:
            console.print("data    is a stream, which begins its pass again: some images come twice, others later")
        if (warmup := self.cfg.training.warmup_steps) >= trainer.max_steps > 0:
            console.print(
                f"warm-up is longer than the run (training.warmup_steps={warmup}): the learning rate never falls"
            )
        if (ours := self.data.num_classes) is not None and ours < model.num_classes:
            console.print(f"classes {ours}, of {model.num_classes} outputs: model.num_classes={ours} leaves none over")

    def about(self, model: ImageTransformer) -> str:
        tokens, flops = model.patch_embed.num_patches, flops_per_image(model)
        return f"{super().about(model)}, {flops / 1e9:.3g} GFLOPs per image of {tokens:,} tokens,"

    def columns(self) -> dict[str, tuple[str, float, str]]:
        loss = ("cross-entropy (nats)", 1, ".4f")
        return {"top1": ("top-1 %", 100, ".2f"), "top5": ("top-5 %", 100, ".2f"), "loss": loss}
