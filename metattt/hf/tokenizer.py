"""Our tokenizers for Transformers: the same ids for a text, a separator before it, and the same text for ids."""

from __future__ import annotations

from typing import Any

from metattt.data.text import ByteTokenizer
from metattt.data.tokenizers import BYTES, FileTokenizer
from metattt.generation.text import ends
from metattt.optional import need

SEPARATOR = "<|endoftext|>"  # the name of token 256 of the bytes


def to_transformers(tokenizer: ByteTokenizer | FileTokenizer) -> Any:
    """A `PreTrainedTokenizerFast`.

    A text gets the separator before it, as documents in training and prompts of `metattt generate`. What looks like a
    special token in a text is text, unless the model finds whole pieces in its vocabulary (Unigram, WordPiece,
    WordLevel) and has special ones there. Prompts of different lengths are padded on the left.

    Args:
        tokenizer: of the model.
    """
    transformers = need("transformers", extra="hf", what="metattt.hf")
    library = need("tokenizers", extra="hf", what="metattt.hf")
    made = _bytes(library) if isinstance(tokenizer, ByteTokenizer) else library.Tokenizer.from_str(tokenizer.content)
    made.no_truncation()
    made.no_padding()
    made.encode_special_tokens = True
    start = made.id_to_token(tokenizer.separator)
    made.post_processor = library.processors.TemplateProcessing(
        single=f"{start} $A", pair=f"{start} $A {start} $B", special_tokens=[(start, tokenizer.separator)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token=start,
        eos_token=made.id_to_token(ends(tokenizer)[-1]),
        pad_token=start,
        padding_side="left",
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def _bytes(library: Any) -> Any:
    """Bytes as tokens: byte b has id b, the separator 256."""
    made = library.Tokenizer(library.models.BPE(vocab=dict(BYTES), merges=[]))
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = library.decoders.ByteLevel()
    made.add_special_tokens([library.AddedToken(SEPARATOR, special=True, normalized=False)])
    return made
