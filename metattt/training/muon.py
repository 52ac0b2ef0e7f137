"""The outer loop with Muon: orthogonal steps for matrices, AdamW for everything else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from metattt.errors import MetaTTTError
from metattt.optimizers.block import newton_schulz
from metattt.registry import register
from metattt.setting import setting
from metattt.training.recipes import AdamW
from metattt.training.sharding import divided

RMS = 0.2  # of a step's entries, over the learning rate: about that of AdamW's steps (arXiv 2502.16982, Sec. 2.2)
LEAST = 16  # rows and columns of a matrix that Muon moves: narrower ones are gates, a few directions at most


@register(group="training", name="muon")
class Muon(AdamW):
    """Muon for the matrices of the blocks, AdamW for embeddings, the head, norms, gates, convolutions, the projections
    that `nn.MultiheadAttention` joins to one matrix and the weights that the inner loop begins with; one learning rate
    for both (arXiv 2502.16982).

    `M ← μ M + G`, `W ← (1 − lr λ) W − lr · 0.2 √max(rows, columns) · polar(G + μ M)`: the polar factor comes from five
    Newton–Schulz iterations in the type of the parameters, fp32 or wider (https://kellerjordan.github.io/posts/muon).
    The factor makes the entries of a step as large as AdamW's, so that a learning rate for AdamW is a good first guess.

    Args:
        lr: peak learning rate.
        momentum: μ.
        betas, eps: of AdamW.
        weight_decay: λ of projections and embeddings, as in `AdamW`.
        warmup_fraction: share of the steps with a rising learning rate.
        min_lr: learning rate where the schedule ends, one step after the last.
        decay_fraction, chunk, truncate: as in `AdamW`.
    """

    lr = 1.6e-2
    min_lr = 0.0
    momentum: float = setting(default=0.95, least=0, below=1)

    def decay(self, progress: float, low: float) -> float:
        """A line down to the end."""
        return 1 - (1 - low) * progress

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if divided(model):
            raise MetaTTTError(
                "training=muon needs whole matrices, and this trainer divides them among processes: set "
                "training=adamw, or trainer=ddp"
            )
        return MuonAndAdamW(self.groups(model), self.lr, self.momentum, self.betas, self.eps)

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """The parameters in three groups: those that Muon moves, those of AdamW that decay, and the others."""
        embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        matrices = {
            id(module.weight)
            for block in getattr(model, "blocks", ())
            for module in block.modules()  # (the maps of a module that is a learner hold no weights)
            if isinstance(module, nn.Linear) and module.weight is not None and min(module.weight.shape) >= LEAST
        } - embeddings
        decayed, others = super().groups(model)
        moved = [p for p in decayed["params"] if id(p) in matrices]
        rest = [p for p in decayed["params"] if id(p) not in matrices]
        return [{**decayed, "params": moved, "muon": True}, {**decayed, "params": rest}, others]


class MuonAndAdamW(torch.optim.Optimizer):
    """The step of `Muon`: parameter groups with `muon=True` hold matrices, the others are torch's AdamW's.

    Args:
        params: groups of parameters with `weight_decay`, and `muon`.
        lr, momentum, betas, eps: see `Muon`.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ):
        groups = [group for group in params if group["params"]]
        plain = [group for group in groups if not group.get("muon")]
        self.adamw = torch.optim.AdamW(plain or [{"params": [torch.zeros(0)]}], lr=lr, betas=betas, eps=eps)
        defaults = {**self.adamw.defaults, "muon": False, "momentum": momentum}
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Moves the parameters; returns what `closure` does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["muon"]:
                self._move(group)
        # linked at every step: loading a state makes new groups
        self.adamw.param_groups = [group for group in self.param_groups if not group["muon"]]
        self.adamw.state = self.state
        if self.adamw.param_groups:
            self.adamw.step()
        return loss

    def _move(self, group: dict[str, Any]) -> None:
        """A step of Muon; matrices of one shape iterate together."""
        alike: dict[tuple[torch.Size, torch.dtype, torch.device], list[tuple[Tensor, Tensor]]] = {}
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            mean = state["momentum_buffer"].mul_(group["momentum"]).add_(gradient)
            step = gradient.add(mean, alpha=group["momentum"])
            alike.setdefault((step.shape, step.dtype, step.device), []).append((parameter, step))
        for (shape, dtype, _), pairs in alike.items():
            accum_dtype = torch.promote_types(dtype, torch.float32)
            polar = newton_schulz(torch.stack([step for _, step in pairs]).to(accum_dtype))
            size = group["lr"] * RMS * math.sqrt(max(shape))
            for (parameter, _), direction in zip(pairs, polar.to(dtype), strict=True):
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-size)
