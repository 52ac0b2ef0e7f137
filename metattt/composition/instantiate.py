"""From a configuration to objects: the only place where a class that a configuration names is looked up and called."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from metattt.composition.messages import explain_instantiation
from metattt.errors import MetaTTTError

if TYPE_CHECKING:
    from torch import nn

    from metattt.layer import TTTLayer
    from metattt.models.language_model import LanguageModel


def instantiate_part(cfg: DictConfig, key: str, **options: Any) -> Any:
    """The object of one node, with plain lists and dictionaries inside.

    Args:
        cfg: the configuration.
        key: of the node in it.
        options: arguments beside those of the node.

    Raises:
        MetaTTTError: what the constructor refuses, in its own words; whatever else goes wrong, with the key and the
            class.
    """
    try:
        return hydra.utils.instantiate(cfg[key], _convert_="all", **options)
    except MetaTTTError:
        raise
    except (HydraException, OmegaConfBaseException) as error:
        raise MetaTTTError(explain_instantiation(error, key)) from error


def instantiate_layer(cfg: DictConfig) -> TTTLayer:
    """A new layer from `cfg.layer`, with its own task, learner and optimizer.

    Raises:
        MetaTTTError: as `instantiate_part`.
    """
    layer: TTTLayer = instantiate_part(cfg, "layer")
    return layer


def instantiate_model(cfg: DictConfig, on_block: Callable[[nn.Module], object] | None = None) -> LanguageModel:
    """The model of `cfg.model`; every one of its blocks gets a new layer of `cfg.layer`. `on_block`: see
    `LanguageModel`.

    Raises:
        MetaTTTError: as `instantiate_part`.
    """
    make = instantiate_part(cfg, "model", _partial_=True)
    layer = partial(instantiate_layer, cfg)
    model: LanguageModel = make(layer=layer) if on_block is None else make(layer=layer, on_block=on_block)
    if not hasattr(model, "parameters"):
        raise MetaTTTError(f"model._target_={cfg.model._target_} makes a {type(model).__name__}: it must be a torch.nn.Module")
    return model
