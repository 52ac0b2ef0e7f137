"""Recipes of the outer loop: the optimizer, its learning rates, and the parameters without weight decay."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from metattt.declared import Declared
from metattt.errors import MetaTTTError, check_number
from metattt.optional import need
from metattt.registry import register
from metattt.setting import setting

if TYPE_CHECKING:
    from timm.scheduler import CosineLRScheduler


@register(group="training", name="adamw")
class AdamW(Declared):
    """The recipe of the TTT papers: AdamW, linear warm-up, cosine decay (arXiv 2407.04620, App. C).

    Args:
        lr: peak learning rate.
        betas: decay of the first and the second moment.
        eps: added to the root of the second moment.
        weight_decay: of projections and embeddings. Norms, biases, convolutions, inner learning rates and the initial
            weights of the inner loop do not decay.
        warmup_fraction: share of the steps with a rising learning rate.
        min_lr: learning rate where the schedule ends, one step after the last.
        decay_fraction: share of the steps after the warm-up in which the rate falls; before, it stays at its peak (0.2:
            warm-up, stable, decay).
        chunk: tokens of a window that are read at a time, with the state passed on; None: all of them.
        truncate: k, chunks that the gradient of a chunk's loss reaches back over, its own among them
            (`metattt.training.truncated`): memory does not grow with the window, and the gradient is not that of the
            whole window. None: all chunks, the exact gradient.
    """

    _group = "training"

    lr: float = setting(default=3e-3, above=0, most=1e36)  # a step of it is a number in fp32
    betas: tuple[float, float] = setting(default=(0.9, 0.95))
    eps: float = setting(default=1e-8, above=0)
    weight_decay: float = setting(default=0.1, least=0)
    warmup_fraction: float = setting(default=0.1, least=0, most=1)
    min_lr: float = setting(default=1e-5, least=0)
    decay_fraction: float = setting(default=1.0, above=0, most=1, kw_only=True)
    chunk: int | None = setting(default=None, advice=", or null for all")
    truncate: int | None = setting(default=None, advice=", or null for all")

    def check_settings(self) -> None:
        super().check_settings()
        self.betas = two(self.betas)
        if self.truncate is not None and self.chunk is None:
            raise MetaTTTError(f"training.truncate={self.truncate} counts chunks: set training.chunk=<tokens>")

    def warmup_steps(self, num_steps: int) -> int:
        """Steps with a rising learning rate, at least one."""
        return max(1, round(self.warmup_fraction * num_steps))

    def factor(self, step: int, num_steps: int) -> float:
        """The learning rate at a step, over its peak."""
        warmup = self.warmup_steps(num_steps)
        if step < warmup:
            return (step + 1) / warmup
        left = min(1.0, (step - warmup) / max(1, num_steps - warmup)) - (1 - self.decay_fraction)
        return self.decay(min(1.0, max(0.0, left / self.decay_fraction)), min(self.min_lr / self.lr, 1.0))

    def decay(self, progress: float, low: float) -> float:
        """The same after the warm-up: from 1 to `low` as `progress` goes from 0 to 1."""
        return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The outer optimizer."""
        return torch.optim.AdamW(self.groups(model), lr=self.lr, betas=self.betas, eps=self.eps)

    def schedule(self, optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
        """The learning rates of a run."""
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self.factor(step, num_steps))

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """The parameters in two groups: those that decay, and the others."""
        matrices = [module.weight for module in model.modules() if isinstance(module, (nn.Linear, nn.Embedding))]
        matrices += [module.in_proj_weight for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
        decayed = {id(weight) for weight in matrices}
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return [
            {"params": [p for p in parameters if id(p) in decayed], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if id(p) not in decayed], "weight_decay": 0.0},
        ]


def two(betas: Any) -> tuple[float, float]:
    """The decays of the first and the second moment; optimizers would take more numbers, and use two of them."""
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise MetaTTTError(f"training.betas={betas} is not allowed: give two numbers, training.betas=[0.9,0.95]")
    for place, beta in enumerate(betas):
        check_number(f"training.betas[{place}]", beta, least=0, below=1)
    return betas[0], betas[1]


@register(group="training", name="timm")
class TimmRecipe(Declared):
    """The recipe of the MTTT paper (arXiv 2310.13807, Sec. 5; Beyer et al., arXiv 2205.01580) from timm's factories.

    Args:
        optimizer: timm's name of the outer optimizer.
        lr: peak learning rate.
        betas: decay of the first and the second moment.
        weight_decay: of kernels. Biases, norms, gates and position tables do not decay.
        warmup_steps: steps with a rising learning rate; then it falls to zero along a cosine.
        mixup: α of mixup; 0 is none.
    """

    _group = "training"

    name: str = setting(default="adamw", alias="optimizer")
    lr: float = setting(default=1e-3, above=0, most=1e36)
    betas: tuple[float, float] = setting(default=(0.9, 0.999))
    weight_decay: float = setting(default=0.1, least=0)
    warmup: int = setting(default=10000, least=0, alias="warmup_steps")
    mixup: float = setting(default=0.0, least=0)

    def check_settings(self) -> None:
        timm: Any = need("timm.optim", extra="images", what="training=timm")
        super().check_settings()
        self.betas = two(self.betas)
        about = {one: timm.get_optimizer_info(one) for one in timm.list_optimizers()}
        known = [one for one, info in about.items() if not info.second_order and info.num_betas == 2]
        if (plain := self.name.lower().removeprefix("lookahead_")) not in known:
            near = ", ".join(difflib.get_close_matches(plain, known) or ("adamw", "sgd", "lion"))
            raise MetaTTTError(
                f"training.optimizer={self.name} is not an optimizer of timm with first derivatives and two betas: set "
                f"{near} or another of timm.optim.list_optimizers()"
            )

    def warmup_steps(self, num_steps: int) -> int:
        """Steps with a rising learning rate, fewer than those of the run."""
        return min(self.warmup, num_steps - 1)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The outer optimizer; the model's `no_weight_decay` says what does not decay."""
        from timm.optim import create_optimizer_v2

        return create_optimizer_v2(model, opt=self.name, lr=self.lr, weight_decay=self.weight_decay, betas=self.betas)

    def schedule(self, optimizer: torch.optim.Optimizer, num_steps: int) -> CosineLRScheduler:
        """Linear warm-up, then a cosine to zero at the end, one step after the last."""
        from timm.scheduler import CosineLRScheduler

        warmup = self.warmup_steps(num_steps)
        return CosineLRScheduler(
            optimizer, t_initial=num_steps - warmup, warmup_t=warmup, warmup_prefix=True, t_in_epochs=False
        )
