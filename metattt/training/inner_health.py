"""Warns if an inner loop learns nothing or its gates have died, which the outer loss does not show."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor

from metattt.declared import WithSettings
from metattt.layer import TTTLayer
from metattt.measures.inner_health import Health, inner_health, learning
from metattt.optimizers.momentum import RATES, STEPS
from metattt.registry import register
from metattt.setting import setting
from metattt.training.divergence import listed, say
from metattt.training.random_state import apart_from_the_run

DEAD_RATE = 1e-7  # an η below this changes no weight in fp32
FORGETTING = 0.5  # an α below this halves the weights with every token


@register(group="callback", name="inner_health")
class InnerHealth(WithSettings, Callback):
    """Checks the inner loops of every layer on the first windows of a validation, and prints each problem once per kind
    and layer, with the override that helps. The run continues.

    The cost of a check: the model reads these windows once more, and 32 tokens of each one by one (or by mini-batches,
    for rules that act once per mini-batch).

    Args:
        every: validations between two checks; 0: no checks.
        windows: of the first validation batch (or images).
    """

    _group = "callbacks.inner_health"

    every: int = setting(default=1, least=0)
    windows: int = setting(default=2)

    def configure(self) -> None:
        self.runs = 0  # validations so far
        self.said: list[str] = []  # kind and layer
        self.last: list[str] = []  # those of the previous check

    def state_dict(self) -> dict[str, Any]:
        return {"runs": self.runs, "said": list(self.said), "last": list(self.last)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.runs, self.said, self.last = state_dict["runs"], list(state_dict["said"]), list(state_dict["last"])

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if batch_idx or not self.every or self.runs % self.every:
            return
        if getattr(trainer.strategy, "tensor_ranks", 1) > 1:  # no process has a layer's loss
            if "divided" not in self.said:
                say(trainer, "inner_health: not looked at, as trainer.tensor_ranks divides the heads")
            self.said.append("divided")
            return
        for line in self._news(self.look(pl_module, batch), pl_module):
            say(trainer, f"step {trainer.global_step}: {line}")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.runs += 1  # not earlier: one that a signal cuts off comes again

    def look(self, pl_module: Any, batch: Any) -> dict[int, Health]:
        """The health of every layer on the first windows or images of a batch. Every process of a run takes part."""
        few = batch[: self.windows] if isinstance(batch, Tensor) else tuple(part[: self.windows] for part in batch)
        with apart_from_the_run(pl_module.device), torch.no_grad():
            return inner_health(pl_module.model, lambda: pl_module.read(few))

    def _news(self, found: dict[int, Health], pl_module: Any) -> Iterator[str]:
        before, self.last = self.last, []
        for index, health in found.items():
            layer = learning(pl_module.model.blocks[index])
            assert layer is not None  # it was checked
            for kind, line in complaints(health, layer):
                name = f"{kind} {index}"
                self.last.append(name)
                # early in training an inner loop may do harm
                if name not in self.said and (kind != "worse" or name in before):
                    self.said.append(name)
                    yield f"layer {index}, {line}"


def complaints(health: Health, layer: TTTLayer) -> Iterator[tuple[str, str]]:
    """The problems of an inner loop: the kind of each, and a message with the override that helps."""
    rule: Any = layer.optimizer
    rate = getattr(rule, "base_lr", None)
    shorter = (
        f"optimizer.base_lr={rate / 4:.2g} (now {rate:g}), or a lower training.lr" if rate else "a lower training.lr"
    )
    if rate is not None and rate <= 0:
        shorter = "a positive optimizer.base_lr"
    found = {}
    if rule.read in ("previous", "committed") and health.tokens <= rule.mini_batch_size:
        found["unread"] = (
            "every head learns for nothing: queries read the weights of complete mini-batches, and the "
            f"{health.tokens} tokens of a sequence end with the first: try optimizer.mini_batch_size="
            f"{max(1, health.tokens // 4)} (now {rule.mini_batch_size}), or longer sequences"
        )
    if rule.anchor != "batch":  # gradients at W_0 need not lower the loss at W_{t−1}
        if health.rising.numel() and (bad := health.rising.mean(1) > 0.5).any():
            rising = health.rising[bad]
            places = (rising.mean(0) > 0.5).nonzero().flatten().tolist()
            found["rising"] = (
                f"{_heads(bad)} learns nothing: the inner loss of {rising.mean():.0%} of the tokens is larger after "
                f"their own step, ℓ(W_t) > ℓ(W_t−1){_places(places, health.rising.shape[1])}: try {shorter}"
            )
        if (bad := health.worse.mean(1) > 0.5).any():
            found["worse"] = (
                f"{_heads(bad)} learns nothing: the inner loss of {health.worse[bad].mean():.0%} of the tokens is "
                f"larger with what was learned before them than with W0, ℓ(W_t−1) > ℓ(W_0): try {shorter}"
            )
    if (bad := health.eta < DEAD_RATE).any():
        larger = "optimizer.base_lr=1 (now 0)" if rate == 0 else "a lower training.lr, or a larger optimizer.base_lr"
        most, step = health.eta[bad].max(), "η" if getattr(rule, "write", "none") == "none" else "η κ"
        found["eta"] = f"{_heads(bad)} learns nothing: {step} is at most {most:.1g} for every token: try {larger}"
    decay = str(getattr(rule, "decay", ""))
    # rates of decay are drawn: heads are meant to differ, and the least α that one begins with is no fault
    least = math.exp(-RATES[decay][1] * STEPS[1]) if decay in RATES else FORGETTING
    if health.alpha is not None and (bad := health.alpha < least).any():
        kept = "optimizer.decay_init=0.99" if decay in ("constant", "shared", "per_head") else "a decay nearer to 1"
        most = health.alpha[bad].max()
        found["alpha"] = (
            f"{_heads(bad)} forgets: α is at most {most:.2g} for every token: try {kept}, or a lower training.lr"
        )
    if health.tau is not None and (dead := health.tau == 0).any():
        bad = dead.any(1) if len(dead) > 1 else torch.ones(layer.num_heads, dtype=torch.bool)
        places = dead.any(0).nonzero().flatten().tolist()
        found["tau"] = (
            f"{_heads(bad)} learns nothing{_places(places, dead.shape[1])}: the token step τ is 0 there, and has no "
            "gradient: try a lower training.lr, or optimizer.token_steps=none"
        )
    yield from found.items()


def _heads(bad: Tensor) -> str:
    numbers = bad.nonzero().flatten().tolist()
    if len(numbers) == len(bad):
        return "every head" if len(bad) > 1 else "head 0"
    return f"head{'s' * (len(numbers) > 1)} {listed(numbers)}"


def _places(places: list[int], size: int) -> str:
    """Places in the mini-batch, counted from 1; nothing, if it is all of them."""
    if len(places) in (0, size):
        return ""
    return f" at places {listed(place + 1 for place in places)} of {size} in the mini-batch"
