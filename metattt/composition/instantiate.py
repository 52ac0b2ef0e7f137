"""From a configuration to objects: the only place where a class that a configuration names is looked up and called."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from metattt.composition.messages import explain_instantiation
from metattt.errors import MetaTTTError, check_choice

if TYPE_CHECKING:
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
        if isinstance(cfg[key], DictConfig) and "_target_" not in cfg[key]:
            place = cfg._get_full_key(key)
            group = "layer" if place.startswith("model.blocks.") else place.partition(".")[0]
            raise MetaTTTError(
                f"nothing says what {place} is: give {place}._target_, or in a file of your own begin with the "
                f"`defaults` of a file in metattt/configs/{group}"
            )
        return hydra.utils.instantiate(cfg[key], _convert_="all", **options)
    except MetaTTTError:
        raise
    except (HydraException, OmegaConfBaseException) as error:
        raise MetaTTTError(explain_instantiation(error, key)) from error


def instantiate_layer(cfg: DictConfig) -> TTTLayer:
    """A new layer from `cfg.layer`, with its own task, learner and optimizer (or, of `layer=titans_mag` and the like, a
    `Combined` of two; of `layer=mamba` and the like, a `Mixer`; with `direction=both` a `Bidirectional` of it).

    Raises:
        MetaTTTError: as `instantiate_part`; another direction.
    """
    return _directed(cfg, instantiate_part(cfg, "layer"))


def _directed(cfg: DictConfig, layer: Any) -> Any:
    direction = cfg.get("direction", "forward")  # older checkpoints say none
    check_choice("direction", direction, ("forward", "both"))  # of a file too, or assigned since it was composed
    if direction == "forward":
        return layer
    from metattt.bidirectional import Bidirectional

    return Bidirectional(layer.dim, layer)


def instantiate_model(cfg: DictConfig) -> LanguageModel:
    """The model of `cfg.model`. Every one of its blocks gets a new layer of `cfg.layer`, or of its place in the pattern
    `cfg.model.blocks` (`metattt.composition.blocks`).

    Raises:
        MetaTTTError: as `instantiate_part`.
    """
    layers = _pattern(cfg)
    if layers is not None:
        cfg = copy.deepcopy(cfg)
        cfg.model.blocks = None
    make = instantiate_part(cfg, "model", _partial_=True)
    options: dict[str, Any] = {"layer": partial(instantiate_layer, cfg)} if layers is None else {"blocks": layers}
    try:
        inspect.signature(make).bind_partial(**options)
    except TypeError as error:
        raise MetaTTTError(
            f"model._target_={cfg.model._target_}: {error}: a model takes layer=<function that makes a layer>, as a "
            "subclass of metattt.models.LanguageModel does"
        ) from error
    model: LanguageModel = make(**options)
    if not hasattr(model, "parameters"):
        raise MetaTTTError(
            f"model._target_={cfg.model._target_} makes a {type(model).__name__}: it must be a torch.nn.Module"
        )
    return model


def _pattern(cfg: DictConfig) -> list[Callable[[], Any]] | None:
    """What makes the layers of a pattern of blocks; None: there is none."""
    blocks = cfg.model.get("blocks")
    if blocks is None:
        return None

    def make(name: str) -> Any:
        try:
            return _directed(cfg, instantiate_part(blocks.layers, name))
        except MetaTTTError as error:
            raise MetaTTTError(f"model.blocks, {name}: {error}") from error

    return [partial(make, str(name)) for name in blocks.pattern]
