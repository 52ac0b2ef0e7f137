"""Models built around a sequence layer."""

from metattt.models.convert import load_pretrained
from metattt.models.generation import generate
from metattt.models.language_model import LanguageModel
from metattt.models.mttt import mttt_from_published
from metattt.models.published import from_jax, from_published, to_jax, to_published
from metattt.models.text_generation import generate_text

__all__ = [
    "LanguageModel",
    "from_jax",
    "from_published",
    "generate",
    "generate_text",
    "load_pretrained",
    "mttt_from_published",
    "to_jax",
    "to_published",
]
