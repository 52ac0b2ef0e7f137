"""What Hydra composes of the same overrides is the same: composed once in a process, and copied for everyone who asks."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable

from omegaconf import DictConfig

from metattt.composition.flags import SEARCH_PATH
from metattt.registry import SCHEMAS

Composed = tuple[DictConfig, DictConfig]


def remembering(compose: Callable[[list[str], str], Composed]) -> Callable[[list[str], str], Composed]:
    """As `compose(overrides, job)`, and asks it once for the same overrides, registered classes and Python path.

    Files in folders of the caller's own are read every time, and what is refused is refused anew: all checks of
    overrides and parts come before and after what is kept here.
    """
    known: dict[tuple[object, ...], Composed] = {}

    def remembered(overrides: list[str], job: str) -> Composed:
        if any(SEARCH_PATH in override for override in overrides):
            return compose(overrides, job)
        key = job, tuple(overrides), tuple(SCHEMAS.items()), tuple(sys.path)
        if key not in known:
            known[key] = compose(overrides, job)
        return copy.deepcopy(known[key])

    return remembered
