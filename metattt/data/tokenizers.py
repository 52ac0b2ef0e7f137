"""Tokenizers: bytes, or any fast tokenizer of Hugging Face from a name or a file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metattt.data.text import ByteTokenizer
from metattt.data.windows import Tokenizer
from metattt.errors import MetaTTTError
from metattt.extras import need

TOKENIZER = "tokenizer.json"
STARTS = ("<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "[BOS]", "[CLS]")
ENDS = ("</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>", "<|im_end|>", "[EOS]", "[SEP]")


class FileTokenizer:
    """A tokenizer of the `tokenizers` library, from its JSON text.

    A document starts with the token of beginning (or else that of end) and ends with the token of end, where there are
    two. What looks like a special token in the text is text.

    Args:
        content: the text of a tokenizer.json.
        name: where it is from, for messages.

    Raises:
        MetaTTTError: the library is not installed, the text is no tokenizer, or it has none of the special tokens.
    """

    def __init__(self, content: str, name: str):
        library = _library()
        try:
            self.tokenizer = library.Tokenizer.from_str(content)
        except Exception as error:  # the library raises Exception itself
            raise MetaTTTError(f"tokenizer={name} is not a tokenizer of the tokenizers library: {error}") from error
        self.tokenizer.encode_special_tokens = True
        self.content = content
        start, end = (_first(self.tokenizer, names) for names in (STARTS, ENDS))
        separator = end if start is None else start
        if separator is None:
            raise MetaTTTError(
                f"tokenizer={name} has no token for the start or end of a document: {', '.join(STARTS + ENDS)}"
            )
        self.vocab_size: int = max(self.tokenizer.get_vocab().values()) + 1
        self.separator: int = separator
        self.end: int | None = end if start is not None else None

    @cached_property
    def texts(self) -> list[bytes]:
        """What each token stands for; nothing, for special tokens."""
        special = {number for number, token in self.tokenizer.get_added_tokens_decoder().items() if token.special}
        decoder = json.dumps(json.loads(self.content).get("decoder"))
        read = (
            _bytes_of_characters
            if "ByteLevel" in decoder
            else _word_piece
            if "WordPiece" in decoder
            else _sentence_piece
        )
        texts = [b""] * self.vocab_size
        for token, number in self.tokenizer.get_vocab().items():
            texts[number] = b"" if number in special else read(token)
        return texts

    @property
    def token_bytes(self) -> Tensor:
        """`[V]` bytes of text that each token stands for."""
        return torch.tensor([len(text) for text in self.texts])

    def encode(self, text: str | bytes) -> np.ndarray:
        """Token ids of a text, uint32, without special tokens."""
        string = text.decode(errors="replace") if isinstance(text, bytes) else text
        return np.array(self.tokenizer.encode(string, add_special_tokens=False).ids, np.uint32)

    def decode(self, ids: Sequence[int]) -> bytes:
        """The text of the tokens as UTF-8, without special tokens and those that a model has beyond ours; it may end in
        a character."""
        return b"".join(self.texts[number] for number in ids if number < self.vocab_size)


def load_tokenizer(name: str) -> ByteTokenizer | FileTokenizer:
    """`bytes`; a tokenizer.json or the folder that holds it; or the name of one on the Hugging Face Hub.

    Raises:
        MetaTTTError: a tokenizer that cannot be found or read.
    """
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name).expanduser()
    file = path / TOKENIZER if path.is_dir() else path
    if file.is_file():
        return FileTokenizer(file.read_text(encoding="utf-8"), name)
    if path.is_absolute() or name.startswith((".", "~")) or path.suffix == ".json":
        raise MetaTTTError(
            f"tokenizer={name} does not exist: give bytes, a {TOKENIZER} or a name on the Hugging Face Hub"
        )
    try:
        found = _library().Tokenizer.from_pretrained(name)
    except MetaTTTError:
        raise
    except Exception as error:  # no network, no such name, or no permission: the library raises Exception itself
        reason = str(error).strip().splitlines()[0]
        raise MetaTTTError(f"tokenizer={name} cannot be fetched from the Hugging Face Hub: {reason}") from error
    return FileTokenizer(found.to_str(), name)


def tokenizer_of(
    model: str, content: str | None, vocab_size: int, given: str | None = None
) -> ByteTokenizer | FileTokenizer:
    """The tokenizer of a trained model.

    Args:
        model: the model's name, for messages.
        content: `bytes`, or the text of its tokenizer.json; None: not known.
        vocab_size: V, of the model.
        given: what the user says instead, as for `load_tokenizer`.

    Raises:
        MetaTTTError: it cannot be read, has more tokens than the model, or there is none and the model's are not bytes.
    """
    if given is not None:
        found = load_tokenizer(given)
    elif content == "bytes" or (content is None and vocab_size == ByteTokenizer.vocab_size):
        found = ByteTokenizer()
    elif content is not None:
        found = FileTokenizer(content, f"{model}/{TOKENIZER}")
    else:
        raise MetaTTTError(
            f"{model} has {vocab_size} tokens, and no {TOKENIZER} says which: "
            f"add tokenizer=<its {TOKENIZER}, or a name on the Hugging Face Hub>"
        )
    if found.vocab_size > vocab_size:
        raise MetaTTTError(
            f"the tokenizer has {found.vocab_size} tokens and {model} {vocab_size}: it is of another model, set tokenizer="
        )
    return found


def fingerprint(tokenizer: Tokenizer) -> dict[str, Any]:
    """What identifies a tokenizer: plain data for a manifest."""
    kind = {"kind": "bytes"}
    if isinstance(tokenizer, FileTokenizer):
        kind = {"kind": TOKENIZER, "sha256": hashlib.sha256(tokenizer.content.encode()).hexdigest()}
    return {**kind, "vocab_size": tokenizer.vocab_size, "separator": tokenizer.separator, "end": tokenizer.end}


def _first(tokenizer: Any, names: Sequence[str]) -> int | None:
    return next((number for name in names if (number := tokenizer.token_to_id(name)) is not None), None)


def _bytes_of_characters(token: str) -> bytes:
    """Byte-level BPE writes every byte as a character: the printable ones as themselves, the others from U+0100 on."""
    return b"".join(bytes([_BYTES[character]]) if character in _BYTES else character.encode() for character in token)


def _byte_characters() -> dict[str, int]:
    printable = {byte for low, high in ((0x21, 0x7E), (0xA1, 0xAC), (0xAE, 0xFF)) for byte in range(low, high + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_characters()


def _word_piece(token: str) -> bytes:
    return (token.removeprefix("##") if token.startswith("##") else f" {token}").encode()


def _sentence_piece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()


def _library() -> Any:
    return need("tokenizers", extra="text", what="a tokenizer other than bytes")
