"""Models built around a sequence layer."""

from metattt.models.language_model import LanguageModel
from metattt.models.mttt import mttt_from_published
from metattt.models.published import from_jax, from_published, to_jax, to_published

__all__ = ["LanguageModel", "from_jax", "from_published", "mttt_from_published", "to_jax", "to_published"]
