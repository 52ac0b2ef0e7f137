"""Libraries that only some uses need. Each is in an extra of `pip install metattt`; an absent one is one line that
names it."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from metattt.errors import MetaTTTError

DISTRIBUTIONS = {"sklearn": "scikit-learn", "PIL": "Pillow"}
"""Names to install, where they are not those to import."""


class MissingExtra(MetaTTTError, ImportError):
    """A library that is not installed; the message names the extra that brings it."""


def need(library: str, *, extra: str, what: str) -> ModuleType:
    """The module `library`, imported now.

    Args:
        library: name of the module, `timm` or `timm.data`.
        extra: the extra of `pyproject.toml` that brings it.
        what: what needs it: the message begins with it.

    Raises:
        MissingExtra: it is not installed, or a library that it needs itself is not.
    """
    try:
        return importlib.import_module(library)
    except ModuleNotFoundError as error:
        package = (error.name or library).partition(".")[0]
        if importlib.util.find_spec(package) is not None:  # it is there, but not as it should be
            raise
        raise MissingExtra(_line(package, extra, what)) from error


def absence(library: str, *, extra: str, what: str) -> str | None:
    """The line that `need` would raise, for what can be done without `library`; None if it is installed. Nothing is
    imported."""
    return None if importlib.util.find_spec(library) is not None else _line(library, extra, what)


def _line(library: str, extra: str, what: str) -> str:
    package = library.partition(".")[0]
    name = DISTRIBUTIONS.get(package, package)
    return f"{what} needs {name}, which is not installed: pip install 'metattt[{extra}]'"
