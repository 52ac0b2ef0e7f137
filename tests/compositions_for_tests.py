"""What Hydra composes of the same overrides is the same: composed once in a process, and copied for everyone who asks."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable

from omegaconf import DictConfig, OmegaConf

from metattt.composition.overrides import SEARCH_PATH
from metattt.registry import SCHEMAS

Composed = tuple[DictConfig, DictConfig]

PATH = re.compile(r"(output_dir|data\.path)='([^'\\$]*)'")
"""A value that is another one in every test, and that no choice depends on; as `prepare` has quoted it."""

OWN_LEARNER = """
from metattt.learners import Learner, Weight
class Own(Learner):
    def weights(self, d_in, d_out): return {"w": Weight((d_in, d_out))}
    def forward(self, w, x): return 2 * w.linear(x, "w")
"""
"""A module of a user's own."""


def remembering(compose: Callable[[list[str], str], Composed]) -> Callable[[list[str], str], Composed]:
    """As `compose(overrides, job)`, and asks it once for the same overrides, registered classes and Python path.

    Paths are set in the copy, as Hydra sets values in what it has composed of the choices. Files in folders of the
    caller's own are read every time, and what is refused is refused anew: all checks of overrides and parts come before
    and after what is kept here.
    """
    known: dict[tuple[object, ...], Composed] = {}

    def remembered(overrides: list[str], job: str) -> Composed:
        if any(SEARCH_PATH in override for override in overrides):
            return compose(overrides, job)
        paths = dict(match.groups() for match in map(PATH.fullmatch, overrides) if match)
        if any(sum(one.startswith(f"{name}=") for one in overrides) > 1 for name in paths):
            return compose(overrides, job)  # the last one counts
        others = [override for override in overrides if not PATH.fullmatch(override)]
        key = job, tuple(others), tuple(SCHEMAS.items()), tuple(sys.path)
        if key not in known:
            known[key] = compose(others, job)
        cfg, chosen = copy.deepcopy(known[key])
        if any(OmegaConf.select(cfg, name, default=cfg) is cfg for name in paths):
            return compose(overrides, job)  # no such key: Hydra says so
        for name, path in paths.items():
            OmegaConf.update(cfg, name, path)
        return cfg, chosen

    remembered.plain = compose  # type: ignore[attr-defined]
    return remembered
