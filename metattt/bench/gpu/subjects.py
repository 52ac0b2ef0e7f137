"""What the subject of a point names: an object that measures one point of its kinds."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

from metattt.errors import MetaTTTError

OPERATIONS = ("ttt_linear", "ttt_mlp")
CEILINGS, IN_TURN, SANITIZER, NCU = "ceilings", "in turn", "compute-sanitizer", "ncu"

HOMES = {
    **{name: f"metattt.bench.gpu.operations:{name}" for name in OPERATIONS},
    CEILINGS: "metattt.bench.gpu.others:ceilings",
    IN_TURN: "metattt.bench.gpu.others:in_turn",
    SANITIZER: "metattt.bench.gpu.tools:sanitizer",
    NCU: "metattt.bench.gpu.tools:ncu",
}


class Subject(Protocol):
    """What a point is about."""

    def measure(self, kind: str, case: dict[str, Any], device: str) -> dict[str, Any]:
        """The result of a point, as JSON can hold it. Whatever it raises is recorded as the reason why there is
        none."""


def load(name: str) -> Any:
    """The subject of that name: ours, `module:object`, or a peer.

    Raises:
        MetaTTTError: `module:object` is not there.
    """
    home = HOMES.get(name, name)
    if ":" not in home:
        from metattt.bench.gpu.others import PeerTimes

        return PeerTimes(name)
    module, _, attribute = home.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ModuleNotFoundError, AttributeError) as error:
        if name in HOMES:
            raise
        raise MetaTTTError(f"{name} is no operation: {error}; give {', '.join(OPERATIONS)} or module:object") from error
