"""Optional dependencies. Each is in an extra of `pip install metattt`; the error for a missing one names the extra."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from metattt.errors import MetaTTTError

DISTRIBUTIONS = {
    "sklearn": "scikit-learn",
    "PIL": "Pillow",
    "hydra_plugins.hydra_joblib_launcher": "hydra-joblib-launcher",
    "hydra_plugins.hydra_submitit_launcher": "hydra-submitit-launcher",
    "hydra_plugins.hydra_optuna_sweeper": "hydra-optuna-sweeper",
}
"""Names of distributions that differ from the names to import."""


class MissingExtra(MetaTTTError, ImportError):
    """A library that is not installed; the message names the extra that brings it."""


def need(library: str, *, extra: str, what: str) -> ModuleType:
    """The module `library`, imported now.

    Args:
        library: name of the module, `timm` or `timm.data`.
        extra: the extra of `pyproject.toml` that installs it.
        what: the feature that needs it: the message begins with it.

    Raises:
        MissingExtra: it is not installed, or a library that it needs itself is not.
    """
    try:
        return importlib.import_module(library)
    except ModuleNotFoundError as error:
        package = library if library in DISTRIBUTIONS else (error.name or library).partition(".")[0]
        if _is_there(package):  # installed, but broken
            raise
        raise MissingExtra(_line(package, extra, what)) from error


def absence(library: str, *, extra: str, what: str) -> str | None:
    """The message that `need` would raise; None if `library` is installed. Nothing is imported."""
    return None if _is_there(library) else _line(library, extra, what)


def _is_there(library: str) -> bool:
    try:
        return importlib.util.find_spec(library) is not None
    except ModuleNotFoundError:  # not even the package that it is in
        return False


def _line(library: str, extra: str, what: str) -> str:
    package = library if library in DISTRIBUTIONS else library.partition(".")[0]
    name = DISTRIBUTIONS.get(package, package)
    return f"{what} needs {name}, which is not installed: pip install 'metattt[{extra}]'"
