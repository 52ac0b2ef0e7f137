"""Tokenizers: bytes, or any fast tokenizer of Hugging Face from a name or a file."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metattt.composition.messages import first_line
from metattt.data.manifest import TOKENIZER
from metattt.errors import MetaTTTError
from metattt.io import inside, path_of, read_text
from metattt.optional import need

log = logging.getLogger(__name__)

MOST_BYTES = 2**27  # of a tokenizer.json; those of 256,000 tokens have a quarter of it
STARTS = ("<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "[BOS]", "[CLS]")
ENDS = ("</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>", "<|im_end|>", "[EOS]", "[SEP]")
RARE = ("<｜begin▁of▁sentence｜>", "<BOS_TOKEN>", "<|bos|>"), ("<｜end▁of▁sentence｜>", "<EOS_TOKEN>", "<|eos|>")
"""Starts and ends of tokenizers that have none of these."""
PROBE = "Why does memory grow, when I train?\n\n(No: it's 2.5 <b>x</b> as  large; isn't it!)"


def _bounds(special: Mapping[str, int], vocabulary: Mapping[str, int]) -> tuple[int | None, int | None]:
    """The tokens before and after a document; None: there is none."""
    start = end = None
    for known, names in itertools.product((special, vocabulary), ((STARTS, ENDS), RARE)):
        start, end = (next((known[name] for name in one if name in known), None) for one in names)
        if start is not None or end is not None:
            break
    return start, end


class Tokenizer:
    """Text to tokens and back.

    Attributes:
        vocab_size: V, number of ids.
        separator: the token before every document.
        end: the token after every document, if there is one.
        content: the text of its tokenizer.json; None: tokens are bytes.
    """

    vocab_size: int
    separator: int
    end: int | None = None
    content: str | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """What tells it from other tokenizers: plain data."""
        kind = {"kind": "bytes"} if self.content is None else {"kind": TOKENIZER, "sha256": _sha256(self.content)}
        return {**kind, "vocab_size": self.vocab_size, "separator": self.separator, "end": self.end}

    def equals(self, other: Tokenizer) -> bool:
        """Whether both make the same tokens of every text. Their files may differ in what is not used here: what is put
        around a text, cutting and padding."""
        return self.identity == other.identity or self._encoding == other._encoding

    @property
    def _encoding(self) -> Any:
        """All that decides about the tokens of a document: plain data."""
        return self.identity

    @property
    def token_bytes(self) -> Tensor:
        """`[V]` bytes of text that each token stands for; 0 for all, with a warning, where that cannot be known."""
        raise NotImplementedError

    def encode(self, text: str | bytes) -> np.ndarray:
        """Token ids of a text, without a separator; a text that it cannot encode raises a MetaTTTError."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> bytes:
        """The text of the tokens as UTF-8, which may end in a character; separators, and tokens that a model has beyond
        these, stand for none."""
        raise NotImplementedError


def document_tokens(tokenizer: Tokenizer, text: bytes, dtype: Any = np.int64) -> np.ndarray:
    """A document as tokens of a type of number: the separator, the text, and the token of end if there is one."""
    end = [] if tokenizer.end is None else [tokenizer.end]
    return np.concatenate([[tokenizer.separator], tokenizer.encode(text), end], dtype=dtype, casting="unsafe")


class ByteTokenizer(Tokenizer):
    """Bytes are the tokens; token 256 separates documents, and comes before each of them. Bytes of the command line
    that are no text count as bytes."""

    vocab_size = 257
    separator = 256

    @property
    def token_bytes(self) -> Tensor:
        return torch.tensor([1] * 256 + [0])

    def encode(self, text: str | bytes) -> np.ndarray:
        try:
            data = text.encode(errors="surrogateescape") if isinstance(text, str) else text
        except UnicodeEncodeError as error:
            raise MetaTTTError(f"a text holds half a surrogate pair at character {error.start}") from error
        return np.frombuffer(data, np.uint8).astype(np.uint16)

    def decode(self, ids: Sequence[int]) -> bytes:
        return bytes(token for token in ids if token < 256)


class FileTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library, from its JSON text.

    A document starts with the token of beginning (or else that of end) and ends with the token of end, where there are
    two; ordinary tokens of their names count only where no special one has such a name. What looks like a special token
    in the text is text. Texts are never cut or padded, whatever the file says.

    Args:
        content: the text of a tokenizer.json.
        name: where it is from, for messages.

    Raises:
        MetaTTTError: the library is not installed, the text is no tokenizer, it has none of the special tokens, or it
            draws lots (dropout).
    """

    def __init__(self, content: str, name: str):
        library = _library()
        self.content, self.name = content, name
        with _in_one_line(f"tokenizer={name} is not a tokenizer of the tokenizers library"):
            parsed = json.loads(content)
            self._read = _reader(parsed)
            self.tokenizer = library.Tokenizer.from_str(content)
            added = self.tokenizer.get_added_tokens_decoder().items()
            special = {token.content: number for number, token in added if token.special}
            start, end = _bounds(special, self.tokenizer.get_vocab())
            self._special = set(special.values())
            if "merges" not in parsed["model"]:
                self.tokenizer = library.Tokenizer.from_str(_hidden(parsed, special))
            self.tokenizer.encode_special_tokens = True
            self.tokenizer.no_truncation()
            self.tokenizer.no_padding()
        if parsed["model"].get("dropout"):
            raise MetaTTTError(f"tokenizer={name} is random (dropout): set model.dropout to null in it")
        separator = end if start is None else start
        if separator is None:
            names = ", ".join((*STARTS, *ENDS, *RARE[0], *RARE[1]))
            raise MetaTTTError(f"tokenizer={name} has no token for the start or end of a document: {names}")
        self.vocab_size: int = max(self.tokenizer.get_vocab().values()) + 1
        self.separator: int = separator
        self.end: int | None = end if start is not None else None

    @cached_property
    def texts(self) -> list[bytes]:
        """What each token stands for; nothing, for special tokens."""
        texts = [b""] * self.vocab_size
        added = self.tokenizer.get_added_tokens_decoder() if self._read is _bytes_of_characters else {}
        for token, number in self.tokenizer.get_vocab().items():
            read = str.encode if number in added else self._read  # what was added is found in the text as it is
            texts[number] = b"" if number in self._special else read(token)
        return texts

    @cached_property
    def token_bytes(self) -> Tensor:
        try:
            found = self.decode(self.encode(PROBE).tolist()).decode(errors="replace")
        except MetaTTTError:
            found = ""
        if found.strip().lower() == PROBE.lower():
            return torch.tensor([len(text) for text in self.texts])
        log.warning("tokenizer=%s does not keep every character of a text: there are no bits per byte", self.name)
        return torch.zeros(self.vocab_size, dtype=torch.int64)

    @cached_property
    def _encoding(self) -> Any:
        made = json.loads(_library().Tokenizer.from_str(self.content).to_str())
        added = [token for token in made["added_tokens"] if not token["special"]]
        parts = [made[key] for key in ("normalizer", "pre_tokenizer", "model", "decoder")]
        return [*parts, added, self.vocab_size, self.separator, self.end]

    def encode(self, text: str | bytes) -> np.ndarray:
        string = text.decode(errors="replace") if isinstance(text, bytes) else text
        with _in_one_line(f"tokenizer={self.name} cannot encode a text"):
            ids = self.tokenizer.encode(string, add_special_tokens=False).ids
        return np.array(ids, np.uint32)

    def decode(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.texts[number] for number in ids if number < self.vocab_size)


def load_tokenizer(name: str) -> ByteTokenizer | FileTokenizer:
    """`bytes`; a tokenizer.json or the folder that holds it; or the name of one on the Hugging Face Hub.

    Raises:
        MetaTTTError: a tokenizer that cannot be found or read.
    """
    if name == "bytes":
        return ByteTokenizer()
    path = path_of(name, "tokenizer")
    file = path / TOKENIZER if path.is_dir() else path
    if file.is_file():
        return FileTokenizer(read_text(file, MOST_BYTES), name)
    if path.is_absolute() or name.startswith((".", "~")) or path.suffix == ".json":
        raise MetaTTTError(
            f"tokenizer={name} does not exist: give bytes, a {TOKENIZER} or a name on the Hugging Face Hub"
        )
    library = _library()
    with _in_one_line(f"tokenizer={name} cannot be fetched from the Hugging Face Hub"):
        found = library.Tokenizer.from_pretrained(name).to_str()
    return FileTokenizer(found, name)


def read_tokenizer(folder: Path, known: Mapping[str, Any]) -> ByteTokenizer | FileTokenizer:
    """The tokenizer of a folder that `metattt prepare` wrote, compared with what the manifest says of it (`known`).

    Raises:
        MetaTTTError: it is missing or another.
    """
    if known.get("kind") == "bytes":
        return ByteTokenizer()
    content = read_text(inside(folder, TOKENIZER), MOST_BYTES)
    if _sha256(content) != known.get("sha256"):
        raise MetaTTTError(f"{folder / TOKENIZER} is not the tokenizer of these tokens: it has been changed")
    found = FileTokenizer(content, str(folder / TOKENIZER))
    found.separator, found.end = known.get("separator", found.separator), known.get("end", found.end)
    return found  # with the tokens around documents that were written


EVERY_BYTE = "".join(map(chr, (*range(0x800), *range(0x800, 0xD800, 0x40), *range(0x10000, 0x110000, 0x1000)))).encode()
"""A text with all bytes that occur in texts."""


def tokenizer_of(
    model: str, content: str | None, vocab_size: int | None, given: str | None = None
) -> ByteTokenizer | FileTokenizer:
    """The tokenizer of a trained model.

    Args:
        model: the model's name, for messages.
        content: `bytes`, or the text of its tokenizer.json; None: not known.
        vocab_size: V, of the model; None: it reads images.
        given: what the user says instead, as for `load_tokenizer`.

    Raises:
        MetaTTTError: it cannot be read, has more tokens than the model, or there is none and the model's are not bytes.
    """
    if vocab_size is None:
        raise MetaTTTError(f"{model} is a model for images: give a language model")
    if given is not None:
        found = load_tokenizer(given)
    elif content == "bytes" or (content is None and vocab_size == ByteTokenizer.vocab_size):
        found = ByteTokenizer()
    elif content is not None:
        found = FileTokenizer(content, f"{model}/{TOKENIZER}")
        if found.vocab_size == ByteTokenizer.vocab_size and found.encode(EVERY_BYTE).tolist() == list(EVERY_BYTE):
            found = ByteTokenizer()  # as an export of a model of bytes writes them for Transformers
    else:
        raise MetaTTTError(
            f"{model} has {vocab_size} tokens, and no {TOKENIZER} says which: "
            f"add tokenizer=<its {TOKENIZER}, or a name on the Hugging Face Hub>"
        )
    if found.vocab_size > vocab_size:
        raise MetaTTTError(
            f"the tokenizer has {found.vocab_size} tokens and {model} {vocab_size}: it is of another model (set "
            "tokenizer=), or this one was trained on something else than text"
        )
    return found


def _sha256(content: str) -> str:
    return hashlib.sha256(content.encode(errors="surrogatepass")).hexdigest()


@contextmanager
def _in_one_line(message: str) -> Iterator[None]:
    """What the library raises becomes one line: Exception itself, and where it breaks a BaseException."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise MetaTTTError(f"{message}: {first_line(error)}") from error


def _hidden(parsed: Mapping[str, Any], special: Mapping[str, int]) -> str:
    """A tokenizer.json whose special tokens have names that are in no text: a model without merges (Unigram, WordLevel,
    WordPiece) finds a piece of text in its vocabulary, special tokens too."""
    names, model = {name: f"\ufdd0{name}" for name in special}, dict(parsed["model"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(piece, piece): number for piece, number in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if "unk_token" in model:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    added = [{**one, "content": names.get(one["content"], one["content"])} for one in parsed.get("added_tokens", ())]
    return json.dumps({**parsed, "model": model, "added_tokens": added})


_PRINTABLE = [byte for low, high in ((0x21, 0x7E), (0xA1, 0xAC), (0xAE, 0xFF)) for byte in range(low, high + 1)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + index): byte for index, byte in enumerate(_OTHERS)}
"""Character -> the byte that it stands for in tokens of byte-level BPE: a printable one for itself, the others are from
U+0100 on."""


def _bytes_of_characters(token: str) -> bytes:
    return b"".join(bytes([BYTES[character]]) if character in BYTES else character.encode() for character in token)


def _reader(parsed: Mapping[str, Any]) -> Callable[[str], bytes]:
    """What makes bytes of a token, as the decoder of a tokenizer.json does, or as its pre-tokenizer undone."""
    part = parsed.get("decoder") or parsed.get("pre_tokenizer") or {"type": None}
    parts = {one["type"]: one for one in part.get("decoders", part.get("pretokenizers", [part]))}
    if "ByteLevel" in parts:
        return _bytes_of_characters
    prefix = parts["WordPiece"]["prefix"] if "WordPiece" in parts else None
    suffix = parts.get("BPEDecoder", {}).get("suffix") or " "
    space = parts.get("Metaspace", {}).get("replacement", "▁")

    def read(token: str) -> bytes:
        if byte := re.fullmatch("<0x([0-9A-Fa-f]{2})>", token):
            return bytes.fromhex(byte[1])
        if prefix is not None:
            return (token.removeprefix(prefix) if token.startswith(prefix) else f" {token}").encode()
        return re.sub(rf"{re.escape(suffix)}\Z", " ", token).replace(space, " ").encode()

    return read


def _library() -> Any:
    return need("tokenizers", extra="text", what="a tokenizer other than bytes")
