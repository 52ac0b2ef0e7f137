"""Texts continued by a language model: prompts of any lengths at once, stop strings, and text as it becomes certain."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from metattt.checkpoints.trained import open_trained
from metattt.data.tokenizers import Tokenizer, tokenizer_of
from metattt.errors import MetaTTTError
from metattt.generation.sampling import generate
from metattt.models.language_model import LanguageModel, LanguageModelState
from metattt.nested import count_sequences


def load_tokenizer(path: str | Path, tokenizer: str | None = None, trust: Collection[str] = ()) -> Tokenizer:
    """The tokenizer of a trained language model, for `generate_text`.

    Args:
        path: as for `metattt.load_model`.
        tokenizer: a `tokenizer.json` or a name on the Hugging Face Hub, where the checkpoint does not say.
        trust: modules of yours whose classes the checkpoint may name.

    Raises:
        MetaTTTError: no checkpoint, or one that cannot be read; no tokenizer, or that of another model.
    """
    found = open_trained(path, trust=trust)
    return tokenizer_of(str(path), found.tokenizer, found.config.model.get("vocab_size"), tokenizer)


def ends(tokenizer: Tokenizer) -> list[int]:
    """The tokens that end a text."""
    return [token for token in (tokenizer.separator, tokenizer.end) if token is not None]


class Continuation:
    """The text of one sequence as its tokens arrive.

    Bytes that may yet turn out to be the beginning of a stop string, or are a part of a character, are held back.

    Args:
        tokenizer: turns tokens to text.
        stop: the text ends before the first of these strings.

    Attributes:
        ended: a token that ends texts, or a stop string, has come.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        if (
            not isinstance(stop, Sequence)
            or isinstance(stop, str)
            or not all(isinstance(one, str) and one for one in stop)
        ):
            raise MetaTTTError(f"stop={stop!r} is not allowed: give a list of texts that are not empty, stop=[...]")
        for one in stop:
            check_text(one, "stop")
        self.tokenizer, self.stop = tokenizer, [one.encode() for one in stop]
        self.held = b""  # what may yet be the beginning of a stop string
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.ended = False

    def add(self, token: int) -> str:
        """The text that has become certain with `token`; nothing once the text has ended."""
        if self.ended or token in ends(self.tokenizer):
            return self.finish()
        data = self.held + self.tokenizer.decode([token])
        found = [place for one in self.stop if (place := data.find(one)) >= 0]
        if found:
            self.held, self.ended = b"", True
            return self.decoder.decode(data[: min(found)], final=True)
        held = max((size for one in self.stop for size in range(1, len(one)) if data.endswith(one[:size])), default=0)
        self.held = data[len(data) - held :]
        return self.decoder.decode(data[: len(data) - held])

    def finish(self) -> str:
        """What was held back, when no more tokens come."""
        if self.ended:
            return ""
        data, self.held, self.ended = self.held, b"", True
        return self.decoder.decode(data, final=True)


def check_text(text: object, key: str) -> None:
    """Refuses what cannot be encoded.

    Raises:
        MetaTTTError: no text, or one with characters that stand for none, as from bytes that are not UTF-8.
    """
    if not isinstance(text, str):
        raise MetaTTTError(f"{key}={text!r} is not allowed: it must be a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise MetaTTTError(f"{key} has an invalid character at index {error.start}: give it in UTF-8") from error


def generate_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Sequence[str] = (),
    seed: int | None = None,
    state: LanguageModelState | None = None,
    compiled: bool = False,
) -> list[str]:
    """Continues every prompt; each is read from a separator on, as documents are in training, or as what follows in the
    document that `state` has read.

    Args:
        model: the model, in evaluation mode.
        tokenizer: of the model.
        prompts: texts of any lengths; they are read and continued together, and padding changes nothing.
        max_new_tokens: tokens to generate at most, per prompt.
        temperature: divides the logits; 0 takes the most probable token.
        top_k: draw from the k most probable tokens only.
        top_p: draw from the smallest set of tokens that holds this probability (arXiv 1904.09751).
        stop: a continuation ends before the first of these strings.
        seed: of the draws; None is torch's own state.
        state: of one sequence, which every prompt continues, or of as many as there are prompts; it stays as it is.
        compiled: see `metattt.generation.sampling.generate`.

    Returns:
        The continuations, without prompt and stop string.

    Raises:
        MetaTTTError: no prompts, a setting that is not allowed, or an empty prompt after a state.
    """
    if not isinstance(prompts, Sequence) or isinstance(prompts, str) or not prompts:
        raise MetaTTTError(f"prompts={prompts!r} is not allowed: give a list of at least one text")
    for prompt in prompts:
        check_text(prompt, "prompt")
    texts = [Continuation(tokenizer, stop) for _ in prompts]
    start = [tokenizer.separator] if state is None else []
    rows = [torch.tensor([*start, *map(int, tokenizer.encode(prompt))], dtype=torch.long) for prompt in prompts]
    if not all(map(len, rows)):
        raise MetaTTTError("prompt='' is not allowed after a state: give the text that follows what was read")
    if state is not None and count_sequences(state) == 1:
        state = state.select(torch.zeros(len(rows), dtype=torch.long, device=model.embedding.weight.device))
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left")
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(ids.shape[1]) >= ids.shape[1] - lengths.unsqueeze(1)
    device = model.embedding.weight.device
    drawn: list[list[str]] = [[] for _ in prompts]
    for tokens in generate(
        model, ids.to(device), max_new_tokens, temperature, top_k, top_p, ends(tokenizer), seed, mask.to(device), state,
        compiled,
    ):  # fmt: skip
        for index, token in enumerate(tokens.tolist()):
            drawn[index].append(texts[index].add(token))
        if all(text.ended for text in texts):
            break
    return ["".join(before) + text.finish() for before, text in zip(drawn, texts, strict=True)]
