"""The model of a run, made at once or block by block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from metattt.checkpoints.record import OF_TRAINING, modules
from metattt.checkpoints.trained import CLASSIFIER, fill, open_trained, read_weights
from metattt.composition.choices import leaves
from metattt.composition.instantiate import instantiate_model
from metattt.errors import MetaTTTError
from metattt.models.block import Block
from metattt.models.language_model import LanguageModel
from metattt.parallel.cuts import check_divisible
from metattt.training.compiling import compile_blocks

HOW_NOT_WHAT = (
    "form", "group_size", "compute_chunk", "chunk_size", "checkpoint_blocks", "checkpoint_mini_batches", "checkpoint",
)  # fmt: skip
"""Settings that never change a result."""


class Builder:
    """Makes the model of a run. Its parameters are drawn from torch's global generator as it is when the builder is
    made.

    Args:
        cfg: the configuration of the run.
        weights: a run or checkpoint whose weights the model starts from; None: from its random ones.
    """

    def __init__(self, cfg: DictConfig, weights: str | None):
        self.cfg, self.weights = cfg, weights
        self.random = torch.get_rng_state()

    def whole(self) -> LanguageModel:
        """Makes the model, ready to train; weights that do not fit raise an error."""
        model = instantiate_model(self.cfg)
        self.finish(model)
        return model

    def empty(self) -> LanguageModel:
        """Names and shapes of the parameters without their values."""
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            return instantiate_model(self.cfg)

    def to_divide(self) -> LanguageModel:
        """`empty`, for FSDP2, which divides one block after the other and may lose that blocks share a weight: such a
        model raises an error."""
        model, owner = self.empty(), dict[nn.Parameter, str]()
        for name, one in model.named_parameters(remove_duplicate=False):
            block = name.split(".")[1] if name.startswith("blocks.") else ""
            if owner.setdefault(one, block) != block:
                raise MetaTTTError(f"{name} is a weight of several blocks, which FSDP cannot divide: set trainer=ddp")
        return model

    def in_parts(self, on_block: Callable[[nn.Module], object]) -> LanguageModel:
        """The model with the same random parameters as `whole`; `on_block` is called with every block before the next
        is made. A model whose blocks cannot be divided among processes raises an error."""

        def look(owner: nn.Module, name: str, module: nn.Module | None) -> None:
            if isinstance(owner, nn.ModuleList) and isinstance(module, Block):
                check_divisible(module)
                on_block(module)

        seen = register_module_module_registration_hook(look)
        try:
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(self.random)
                return instantiate_model(self.cfg)
        finally:
            seen.remove()

    def finish(self, model: LanguageModel) -> None:
        """The steps after the random parameters: loading weights of another run, and compilation."""
        if self.weights is not None:
            complaint = f"init_from={self.weights} does not fit this model"
            fill(model, read_weights(self.weights, modules(self.cfg.trust)), complaint, CLASSIFIER)
        if self.cfg.compile is True:
            compile_blocks(model)


def differences(cfg: DictConfig, weights: str, tokenizer: str | None) -> str | None:
    """A line that lists the settings in which a run differs from the model whose weights it starts from and that
    weights do not show (activation, inner learning rate, mini-batch size): the change may be intended.

    Args:
        tokenizer: of the run's data, as `Trained` has it; None: there is none.
    """
    found = open_trained(weights, (*OF_TRAINING, "data"), modules(cfg.trust))
    ours, theirs = map(_settings, (cfg, found.config))
    changed = [
        f"{key} {value} (there {theirs[key]})" for key, value in ours.items() if key in theirs and value != theirs[key]
    ]
    if any(change.startswith("num_classes ") for change in changed):
        changed.append("a new classifier")
    if None not in (tokenizer, found.tokenizer) and tokenizer != found.tokenizer:
        changed.append("another tokenizer (its tokens stand for other text)")
    return f"weights of {weights}, but here with {', '.join(changed)}" if changed else None


def _settings(cfg: DictConfig) -> dict[str, str]:
    """The settings that change what a model computes, by dotted key."""
    plain: Any = OmegaConf.to_container(cfg, resolve=True)
    found = leaves(plain.get("model") or {}) | leaves(plain.get("layer") or {})
    return {key: str(value) for key, value in found.items() if key.rpartition(".")[2] not in HOW_NOT_WHAT}
