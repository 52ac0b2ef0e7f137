"""A small byte-level tokenizer, trained on the texts of a folder."""

from pathlib import Path

import pytest


def trained_tokenizer(corpus: Path, file: Path) -> None:
    """Writes a tokenizer.json of about 400 tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train([str(one) for one in corpus.glob("*.txt")], trainer)
    tokenizer.save(str(file))
