"""Models built around a sequence layer."""

from metattt.models.generation import generate
from metattt.models.language_model import LanguageModel

__all__ = ["LanguageModel", "generate"]
