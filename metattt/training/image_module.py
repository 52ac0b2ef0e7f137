"""The outer loop for images: classification with timm's optimizers, schedule and mixup."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader

from metattt.checkpoints.record import RECORD
from metattt.data.images import NO_LABEL
from metattt.errors import MetaTTTError, check_integer, check_number
from metattt.optional import need
from metattt.registry import register
from metattt.training.batches import recount_batches
from metattt.training.text_module import check_betas

if TYPE_CHECKING:
    from timm.scheduler import CosineLRScheduler

    from metattt.models.vision import ImageTransformer


@register(group="training", name="timm")
class TimmRecipe:
    """The recipe of the MTTT paper (arXiv 2310.13807, Sec. 5; Beyer et al., arXiv 2205.01580) from timm's factories.

    Args:
        optimizer: timm's name of the outer optimizer.
        lr: peak learning rate.
        betas: decay of the first and the second moment.
        weight_decay: of kernels. Biases, norms, gates and position tables do not decay.
        warmup_steps: steps with a rising learning rate; then it falls to zero along a cosine.
        mixup: α of mixup; 0 is none.

    Raises:
        MetaTTTError: a value that is not allowed.
    """

    def __init__(
        self,
        optimizer: str = "adamw",
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.1,
        warmup_steps: int = 10000,
        mixup: float = 0.0,
    ):
        need("timm", extra="images", what="training=timm")
        from timm.optim import get_optimizer_info, list_optimizers

        rule = str(optimizer).lower().removeprefix("lookahead_")
        try:
            get_optimizer_info(rule)
        except ValueError as error:
            near = difflib.get_close_matches(rule, list_optimizers(), 1) or ["adamw"]
            raise MetaTTTError(
                f"training.optimizer={optimizer} is not allowed: timm has no optimizer of that name. Did you mean {near[0]}?"
            ) from error
        check_number("training.lr", lr, above=0, most=1e36)
        check_betas(betas)
        check_integer("training.warmup_steps", warmup_steps, 0)
        for name, value in (("mixup", mixup), ("weight_decay", weight_decay)):
            check_number(f"training.{name}", value, least=0)
        self.name, self.lr, self.betas = optimizer, lr, (float(betas[0]), float(betas[1]))
        self.weight_decay, self.warmup_steps, self.mixup = weight_decay, warmup_steps, mixup

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The outer optimizer; the model's `no_weight_decay` says what does not decay."""
        from timm.optim import create_optimizer_v2

        return create_optimizer_v2(model, opt=self.name, lr=self.lr, weight_decay=self.weight_decay, betas=self.betas)

    def schedule(self, optimizer: torch.optim.Optimizer, num_steps: int) -> CosineLRScheduler:
        """Linear warm-up, then a cosine to zero at the last step."""
        from timm.scheduler import CosineLRScheduler

        warmup = min(self.warmup_steps, num_steps - 1)
        return CosineLRScheduler(
            optimizer, t_initial=num_steps - warmup, warmup_t=warmup, warmup_prefix=True, t_in_epochs=False
        )


class ImageClassification(lightning.LightningModule):
    """Trains a model on images `[B, C, h, w]` with labels `[B]`.

    Args:
        model: the vision transformer.
        recipe: the outer optimizer, its schedule, and mixup.
        record: of the run (`metattt.checkpoints.record`), kept in every checkpoint.
    """

    def __init__(self, model: ImageTransformer, recipe: TimmRecipe, record: dict[str, Any]):
        from timm.data import Mixup

        super().__init__()
        self.model, self.recipe, self.record = model, recipe, record
        self.mixup = (
            Mixup(mixup_alpha=recipe.mixup, label_smoothing=0.0, num_classes=model.num_classes)
            if recipe.mixup
            else None
        )
        self.step_loss = torch.zeros(())  # of the batches of a step so far (nats per image), summed
        self.validation_sums = torch.zeros(4, dtype=torch.float64)  # cross-entropy (nats), top-1 and top-5 hits, images

    def on_train_epoch_start(self) -> None:
        loader = self.trainer.train_dataloader
        if isinstance(loader, DataLoader) and hasattr(loader.dataset, "set_epoch"):
            loader.dataset.set_epoch(self.current_epoch)  # a stream of timm then reads its files in a new order

    def shortest_loss(self) -> Tensor:
        """The loss of one image: what it does not depend on, a step may leave without a gradient."""
        embed: Any = self.model.patch_embed
        image = torch.zeros(1, embed.proj.in_channels, *embed.img_size, device=self.device)
        return self.model(image).float().logsumexp(1).sum()

    def batch_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The loss of a batch, as a training step takes it: the mean over its images (nats)."""
        return self._cross_entropy(batch, "mean")

    def item_losses(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The loss of every image of a batch, after mixup: `[B]` nats."""
        return self._cross_entropy(batch, "none")

    def _cross_entropy(self, batch: tuple[Tensor, Tensor], reduction: str) -> Tensor:
        images, labels = batch
        self._check(labels, least=0)
        if self.mixup is not None:  # it works in place; labels become probabilities [B, classes]
            images, labels = self.mixup(images.clone(), labels)
        return F.cross_entropy(self.model(images).float(), labels, reduction=reduction)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.batch_loss(batch)
        per_step = self.trainer.accumulate_grad_batches
        self.step_loss = loss.detach() + (self.step_loss if batch_idx % per_step else 0)
        if (batch_idx + 1) % per_step == 0:  # the whole step: all of its batches, in all processes
            # Lightning takes the step of the log from here (a tensor of the host: a plain number would be sent to the device)
            self.log("step", torch.tensor(self.global_step + 1.0))
            self.log("train/loss", self.trainer.strategy.reduce(self.step_loss / per_step, reduce_op="mean"))
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.log("lr", torch.tensor(float(optimizer.param_groups[0]["lr"])))

    def on_validation_epoch_start(self) -> None:
        self.validation_sums = torch.zeros(4, dtype=torch.float64)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self._check(labels, least=NO_LABEL)
        logits = self.model(images).float()
        found = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels.unsqueeze(1)
        nats = F.cross_entropy(logits, labels, reduction="sum", ignore_index=NO_LABEL)
        sums = (nats, found[:, 0].sum(), found.sum(), (labels != NO_LABEL).sum())
        self.validation_sums = self.validation_sums + torch.stack([value.cpu().double() for value in sums])

    def _check(self, labels: Tensor, least: int) -> None:
        """Refuses labels `[B]` that are no class of the model: not every source says how many classes it has."""
        if (wrong := labels[(labels < least) | (labels >= self.model.num_classes)]).numel():
            raise MetaTTTError(
                f"an image has the label {wrong[0]}, and the model has {self.model.num_classes} classes: set model.num_classes"
            )

    def on_validation_epoch_end(self) -> None:
        # sums over all images, divided once: the last batch may be smaller
        sums = self.trainer.strategy.reduce(self.validation_sums.float().to(self.device), reduce_op="sum")
        nats, top1, top5, images = sums
        self.log("step", float(self.global_step))
        self.log("validation/loss", nats / images)
        self.log("validation/top1", top1 / images)
        self.log("validation/top5", top5 / images)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer = self.recipe.optimizer(self.model)
        schedule: Any = self.recipe.schedule(optimizer, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step_update(num_updates=self.global_step)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        recount_batches(checkpoint, self.trainer.accumulate_grad_batches)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[RECORD] = self.record
