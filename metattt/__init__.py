"""MetaTTT: sequence layers whose hidden state is a model that learns while it reads."""

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from metattt.errors import MetaTTTError

if TYPE_CHECKING:
    from metattt import learners, models, optimizers, tasks
    from metattt.adaptation.adapter import Adapter
    from metattt.adaptation.attach import attach
    from metattt.checkpoints.trained import load_model
    from metattt.composition.compose import build
    from metattt.generation.text import load_tokenizer
    from metattt.layer import TTTLayer
    from metattt.state import State

try:
    __version__ = version("metattt")
except PackageNotFoundError:  # run from a checkout that was never installed
    __version__ = "0+unknown"

__all__ = [
    "Adapter", "MetaTTTError", "State", "TTTLayer", "__version__", "attach", "build", "learners", "load_model",
    "load_tokenizer", "models", "optimizers", "tasks",
]  # fmt: skip

_HOMES = {
    "Adapter": "metattt.adaptation.adapter",
    "State": "metattt.state",
    "TTTLayer": "metattt.layer",
    "attach": "metattt.adaptation.attach",
    "build": "metattt.composition.compose",
    "load_model": "metattt.checkpoints.trained",
    "load_tokenizer": "metattt.generation.text",
}
_PACKAGES = ("bidirectional", "combined", "learners", "models", "optimizers", "tasks", "testing")


def __getattr__(name: str) -> Any:
    """Imported when first asked for, so that `metattt --help` does not wait for torch."""
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
