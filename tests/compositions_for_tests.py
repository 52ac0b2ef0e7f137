"""What Hydra composes of the same overrides is the same: composed once in a process, and copied for everyone who asks."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable
from functools import cache

from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from metattt.composition.choices import groups
from metattt.composition.overrides import SEARCH_PATH
from metattt.registry import SCHEMAS

Composed = tuple[DictConfig, DictConfig]
SETTING = re.compile(r"(\w+(?:\.\w+)*)=(.*)", re.DOTALL)

OWN_LEARNER = """
from metattt.learners import Learner, Weight
class Own(Learner):
    def weights(self, d_in, d_out): return {"w": Weight((d_in, d_out))}
    def forward(self, w, x): return 2 * w.linear(x, "w")
"""
"""A module of a user's own."""


def remembering(compose: Callable[[list[str], str], Composed]) -> Callable[[list[str], str], Composed]:
    """As `compose(overrides, job)`, and asks it once for the same choices, registered classes and Python path.

    Values are set in the copy, as Hydra sets values in what it has composed of the choices. Files in folders of the
    caller's own are read every time, and what is refused is refused anew: all checks of overrides and parts come before
    and after what is kept here.
    """
    known: dict[tuple[object, ...], Composed] = {}
    parse = cache(OverridesParser.create().parse_override)

    def remembered(overrides: list[str], job: str) -> Composed:
        if any(SEARCH_PATH in override for override in overrides):
            return compose(overrides, job)
        set_later = [one for one in overrides if (key := SETTING.fullmatch(one)) and key[1] not in groups()]
        others = [one for one in overrides if one not in set_later]
        key = job, tuple(others), tuple(SCHEMAS.items()), tuple(sys.path)
        try:
            if key not in known:
                known[key] = compose(others, job)
            cfg, chosen = copy.deepcopy(known[key])
            for one in map(parse, set_later):
                if one.is_sweep_override() or OmegaConf.select(cfg, one.key_or_group, default=cfg) is cfg:
                    return compose(overrides, job)  # no such key: Hydra says so
                OmegaConf.update(cfg, one.key_or_group, copy.deepcopy(one.value()))
        except (HydraException, OmegaConfBaseException):
            return compose(overrides, job)
        return cfg, chosen

    remembered.plain = compose  # type: ignore[attr-defined]
    return remembered


def light(repository: CachingConfigRepository, delegate: ConfigRepository) -> None:
    """As Hydra begins a composition, without a copy of every schema there is."""
    repository.delegate, repository.cache = copy.copy(delegate), {}
