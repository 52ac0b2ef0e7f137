"""The outer loop: next-token prediction with AdamW, in one process or in several."""

from __future__ import annotations

import math
from collections.abc import Collection
from contextlib import nullcontext
from typing import Any

import lightning
import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn

from metattt.checkpoints.record import RECORD
from metattt.data.windows import NO_TOKEN
from metattt.errors import MetaTTTError, check_integer, check_number
from metattt.models.language_model import LanguageModel
from metattt.parallel.gradients import clip_norm, several_meshes
from metattt.parallel.line import Line
from metattt.parallel.relay import handed_on
from metattt.parallel.scan import may_scan
from metattt.registry import register
from metattt.training.batches import recount_batches
from metattt.training.building import Builder
from metattt.training.sharding import FullyShardedData, build_divided, divided
from metattt.training.truncated import truncated_loss


@register(group="training", name="adamw")
class AdamW:
    """The recipe of the TTT papers: AdamW, linear warm-up, cosine decay (arXiv 2407.04620, App. C).

    Args:
        lr: peak learning rate.
        betas: decay of the first and the second moment.
        eps: added to the root of the second moment.
        weight_decay: of projections and embeddings. Norms, biases, convolutions, inner learning rates and the initial
            weights of the inner loop do not decay.
        warmup_fraction: share of the steps with a rising learning rate.
        min_lr: learning rate at the last step.
        chunk: tokens of a window that are read at a time, the state carried on; None: all of them.
        truncate: k, chunks that the gradient of a chunk's loss reaches back over, its own among them
            (`metattt.training.truncated`): memory does not grow with the window, and the gradient is not that of the
            whole window. None: all chunks, the exact gradient.

    Raises:
        MetaTTTError: a value that is not allowed.
    """

    forward_only = (
        False  #: the optimizer needs the loss alone, again and again: no graph is made, and nothing is backpropagated
    )

    chunk: int | None = None
    truncate: int | None = None

    def __init__(
        self,
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        warmup_fraction: float = 0.1,
        min_lr: float = 1e-5,
        chunk: int | None = None,
        truncate: int | None = None,
    ):
        check_number("training.lr", lr, above=0, most=1e36)  # a step of it is a number in fp32
        check_betas(betas)
        check_number("training.eps", eps, above=0)
        check_number("training.weight_decay", weight_decay, least=0)
        check_number("training.warmup_fraction", warmup_fraction, least=0, most=1)
        check_number("training.min_lr", min_lr, least=0)
        self.lr, self.betas, self.eps, self.weight_decay = lr, (float(betas[0]), float(betas[1])), eps, weight_decay
        self.warmup_fraction, self.min_lr = warmup_fraction, min_lr
        for key, value in (("chunk", chunk), ("truncate", truncate)):
            if value is not None:
                check_integer(f"training.{key}", value, advice=", or null for all")
        if truncate is not None and chunk is None:
            raise MetaTTTError(f"training.truncate={truncate} counts chunks: set training.chunk to their tokens")
        self.chunk, self.truncate = chunk, truncate

    def warmup_steps(self, num_steps: int) -> int:
        """Steps with a rising learning rate, at least one."""
        return max(1, round(self.warmup_fraction * num_steps))

    def factor(self, step: int, num_steps: int) -> float:
        """The learning rate at a step, over its peak."""
        warmup = self.warmup_steps(num_steps)
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, num_steps - warmup))
        low = min(self.min_lr / self.lr, 1.0)
        return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The outer optimizer."""
        return torch.optim.AdamW(self.groups(model), lr=self.lr, betas=self.betas, eps=self.eps)

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """The parameters in two groups: those that decay, and the others."""
        matrices = [module.weight for module in model.modules() if isinstance(module, (nn.Linear, nn.Embedding))]
        decayed = {id(weight) for weight in matrices}
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return [
            {"params": [p for p in parameters if id(p) in decayed], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if id(p) not in decayed], "weight_decay": 0.0},
        ]


def check_betas(betas: object) -> None:
    """Refuses what are no two decays of moments.

    Raises:
        MetaTTTError: not two numbers from 0 to below 1.
    """
    if not isinstance(betas, list | tuple) or len(betas) != 2:
        raise MetaTTTError(f"training.betas={betas} is not allowed: it must be two numbers, training.betas=[0.9,0.95]")
    for beta in betas:
        check_number("training.betas", beta, least=0, below=1)


class LanguageModeling(lightning.LightningModule):
    """Trains a language model on windows of tokens `[B, T + 1]`: the first T are read, the last T predicted.

    Args:
        model: the language model.
        recipe: the outer optimizer and its schedule.
        token_bytes: `[V]` bytes of text that each token stands for.
        record: of the run (`metattt.checkpoints.record`), kept in every checkpoint.
        document_start: the token at which the inner loop starts again from W0; None: it never does.
    """

    def __init__(
        self,
        model: LanguageModel,
        recipe: AdamW,
        token_bytes: Tensor,
        record: dict[str, Any],
        document_start: int | None = None,
    ):
        super().__init__()
        self.model = model
        self.build: Builder | None = (
            None  # makes the model in parts; trainer=fsdp needs it, and `model` may then be without values
        )
        self.recipe = recipe
        self.record = record
        self.document_start = document_start
        self.line: Line | None = None  # the processes that read parts of the same windows (trainer=time_parallel)
        self.scanned: Collection[int] = ()  # blocks whose states need not wait for each other there
        self._batch: tuple[Tensor, Tensor] | None = None  # the latest one, on the device and on the host
        self.token_bytes: Tensor
        self.register_buffer("token_bytes", token_bytes, persistent=False)
        # cross-entropy (nats), predicted tokens and the bytes that they stand for: of the step and of the validation so
        # far
        self.step_sums = self.validation_sums = torch.zeros(3, dtype=torch.float64)

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, FullyShardedData) and not divided(self.model):
            assert self.build is not None
            self.model = build_divided(
                self.build, self.trainer.strategy.device_mesh["data_parallel"], self.trainer.strategy.on_block
            )

    def on_fit_start(self) -> None:
        if not divided(self.model):  # else it was checked while it was made; a part of a model cannot run
            self.model.check_causal()

    def sums(self, ids: Tensor) -> Tensor:
        """Cross-entropy summed over the predicted tokens of `ids` `[B, T + 1]` (nats), their number, and their bytes:
        `[3]`.

        The first T tokens are read, or the part of them that is this process's own. Labels that are `NO_TOKEN` do not
        count.
        """
        (read, reset, labels), parts, scanned = self._windows(ids), 1, self.scanned
        if self.line is not None:
            scanned = scanned if may_scan(self.model, read.shape[1] // self.line.size) else ()
            read, labels, parts = self.line.own(read), self.line.own(labels), self.line.count_parts(len(ids))
            reset = None if reset is None else self.line.own(reset)
        resets = [None] * parts if reset is None else reset.tensor_split(parts)
        losses = []
        for own, following, starts in zip(read.tensor_split(parts), labels.tensor_split(parts), resets, strict=True):
            with nullcontext() if self.line is None else handed_on(self.model, self.line, scanned):
                nats, _ = self.model.cross_entropy(own, following, reset=starts, ignore_index=NO_TOKEN)
            losses.append(nats)
        return self._with_counts(torch.stack(losses).sum(), labels)

    def _with_counts(self, nats: Tensor, labels: Tensor) -> Tensor:
        real = labels != NO_TOKEN
        counts = torch.stack((real.sum(), (self.token_bytes[labels.clamp(min=0)] * real).sum()))
        return torch.cat((nats.unsqueeze(0), counts.to(nats.dtype)))

    def in_chunks(self, ids: Tensor, chunk: int) -> Tensor:
        """As `sums`, a chunk of every window at a time; its backward pass reaches back over `training.truncate` of
        them."""
        read, reset, labels = self._windows(ids)
        parts = [x.split(chunk, dim=1) for x in (read, labels)]
        starts = [None] * len(parts[0]) if reset is None else reset.split(chunk, dim=1)
        pieces = list(zip(*parts, starts, strict=True))
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]

        def nats(piece: tuple[Tensor, Tensor, Tensor | None], state: Any) -> tuple[Tensor, Any]:
            own, following, fresh = piece
            return self.model.cross_entropy(own, following, state, fresh, ignore_index=NO_TOKEN)

        return self._with_counts(truncated_loss(nats, pieces, parameters, self.recipe.truncate), labels)

    def _windows(self, ids: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """What is read `[B, T]`, where documents start, and the labels.

        Where documents start is looked up in what the host has of the batch: their layout is worked out there, and the
        device need not be waited for.
        """
        read, reset = ids[:, :-1].clamp(min=0), None
        if self.document_start is not None:
            here = self._batch[1] if self._batch is not None and self._batch[0] is ids else ids
            reset = here[:, :-1] == self.document_start
        return read, reset, ids[:, 1:]

    def batch_moved(self, batch: Any, moved: Any) -> None:
        """What the host has of the batch that comes next; `ForLightning` says so."""
        self._batch = (moved, batch) if isinstance(batch, Tensor) and isinstance(moved, Tensor) else None

    def batch_loss(self, ids: Tensor) -> Tensor:
        """The loss of a batch, as a training step takes it: the mean over its predicted tokens (nats)."""
        sums = self.sums(ids) if self.recipe.chunk is None else self.in_chunks(ids, self.recipe.chunk)
        return sums[0] / sums[1]

    def item_losses(self, ids: Tensor) -> Tensor:
        """The loss of every token of a batch `[B, T + 1]`: `[B, T]` nats, 0 where nothing is predicted."""
        read, reset, labels = self._windows(ids)
        losses, _ = self.model.cross_entropy(read, labels, reset=reset, ignore_index=NO_TOKEN, reduction="none")
        return losses

    def shortest_loss(self) -> Tensor:
        """The loss of one token: what it does not depend on, a step may leave without a gradient."""
        return self.sums(torch.zeros(1, 2, dtype=torch.long, device=self.device))[0]

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        with torch.set_grad_enabled(not self.recipe.forward_only):
            sums = self.sums(ids) if self.recipe.chunk is None else self.in_chunks(ids, self.recipe.chunk)
        # divided by what the processes read on average: of one window, some may have a token more than others
        whole = 1 if self.line is None else self.line.size
        loss = sums[0] / (sums[1] if whole == 1 else (ids[:, 1:] != NO_TOKEN).sum() / whole)
        per_step = self.trainer.accumulate_grad_batches
        self.step_sums = sums.detach().double() + (self.step_sums if batch_idx % per_step else 0)
        if (batch_idx + 1) % per_step == 0:  # the whole step: all of its batches, in all processes
            nats, num_tokens, num_bytes = self._over_processes(self.step_sums)
            # Lightning takes the step of the log from here; its own count slips on resuming. (What the host knows is logged
            # as a tensor there: a plain number would be sent to the device, and waited for.)
            self.log("step", torch.tensor(self.global_step + 1.0))
            self.log("train/loss", nats / num_tokens)
            self.log("train/bits_per_byte", nats / math.log(2) / num_bytes)
        return loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if not self.recipe.forward_only:
            super().backward(loss, *args, **kwargs)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if gradient_clip_val and gradient_clip_algorithm in (None, "norm") and several_meshes(parameters):
            clip_norm(parameters, gradient_clip_val)
        else:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.log("lr", torch.tensor(float(optimizer.param_groups[0]["lr"])))

    def on_validation_epoch_start(self) -> None:
        self.validation_sums = torch.zeros(3, dtype=torch.float64)

    def validation_step(self, ids: Tensor, batch_idx: int) -> None:
        self.validation_sums = self.validation_sums + self.sums(ids).double().cpu()

    def on_validation_epoch_end(self) -> None:
        if self.line is not None:
            self.line.finish()
        # sums over all windows, divided once: the last batch may be smaller
        nats, num_tokens, num_bytes = self._over_processes(self.validation_sums.to(self.device))
        self.log("step", float(self.global_step))
        self.log("validation/loss", nats / num_tokens)
        self.log("validation/bits_per_byte", nats / math.log(2) / num_bytes)

    def _over_processes(self, sums: Tensor) -> Tensor:
        """The sum of what every process has."""
        return self.trainer.strategy.reduce(sums, reduce_op="sum")

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        if self.recipe.forward_only and (self.trainer.accumulate_grad_batches > 1 or self.trainer.world_size > 1):
            raise MetaTTTError(
                f"{type(self.recipe).__name__} takes its steps from one batch in one process: "
                "set trainer.accumulate_grad_batches=1, trainer.devices=1 and batch_tokens=null"
            )
        if self.recipe.chunk is not None:
            self._check_chunks()
        optimizer = self.recipe.optimizer(self.model)
        num_steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self.recipe.factor(step, num_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _check_chunks(self) -> None:
        """Refuses what does not go with reading in chunks.

        Raises:
            MetaTTTError: naming the override.
        """
        compiled = any(getattr(block, "_compiled_call_impl", None) is not None for block in self.model.blocks)
        for wrong, reason, instead in (
            (self.line is not None, "trainer=time_parallel, which divides windows itself", "trainer=default"),
            (isinstance(self.trainer.strategy, FullyShardedData), "trainer=fsdp, which divides gradients", "trainer=ddp"),
            (self.trainer.precision == "16-mixed", "trainer.precision=16-mixed, which scales losses", "trainer.precision=bf16-mixed"),
            (compiled and self.recipe.truncate not in (None, 1), "compile=true, whose graphs run backwards once", "training.truncate=1"),
        ):
            if wrong:
                raise MetaTTTError(f"training.chunk={self.recipe.chunk} does not go with {reason}: set {instead}, or training.chunk=null")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[RECORD] = self.record

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        recount_batches(checkpoint, self.trainer.accumulate_grad_batches)
