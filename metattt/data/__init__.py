"""Data modules."""

from metattt.data.text import ByteTokenizer, TextData

__all__ = ["ByteTokenizer", "TextData"]
