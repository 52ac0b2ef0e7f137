"""The model of a run, made at once or block by block."""

from __future__ import annotations

from collections.abc import Callable

import torch
from omegaconf import DictConfig
from torch import nn

from metattt.checkpoints.trained import load_weights
from metattt.composition.compose import instantiate_model
from metattt.models.language_model import LanguageModel


class Builder:
    """Makes the model of a run. Its parameters are drawn from torch's global generator as it is when the builder is made.

    Args:
        cfg: the configuration of the run.
        weights: a run or checkpoint whose weights the model starts from; None: from its random ones.
    """

    def __init__(self, cfg: DictConfig, weights: str | None):
        self.cfg, self.weights = cfg, weights
        self.random = torch.get_rng_state()

    def whole(self) -> LanguageModel:
        """The model, ready to train.

        Raises:
            MetaTTTError: weights that do not fit.
        """
        model = instantiate_model(self.cfg)
        self.finish(model)
        return model

    def empty(self) -> LanguageModel:
        """Names and shapes of the parameters without their values."""
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            return instantiate_model(self.cfg)

    def in_parts(self, on_block: Callable[[nn.Module], object]) -> LanguageModel:
        """The model with the same random parameters as `whole`; `on_block` is called with every block before the next is made."""
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.random)
            return instantiate_model(self.cfg, on_block)

    def finish(self, model: LanguageModel) -> None:
        """What comes after the random parameters: weights of another run, and compilation.

        Raises:
            MetaTTTError: weights that do not fit.
        """
        if self.weights is not None:
            load_weights(model, self.weights)
        if self.cfg.compile:
            for block in model.blocks:  # alike, so compiled once
                block.compile()
