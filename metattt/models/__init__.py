"""Models built around a sequence layer."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from metattt.models.end_to_end import EndToEnd
    from metattt.models.language_model import LanguageModel
    from metattt.models.published import from_published, to_published

__all__ = ["EndToEnd", "LanguageModel", "from_published", "to_published"]

_HOMES = {
    "EndToEnd": "metattt.models.end_to_end",
    "LanguageModel": "metattt.models.language_model",
}


def __getattr__(name: str) -> Any:
    """Imported when first asked for: `import metattt` meets this package and does not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, "metattt.models.published")), name)
