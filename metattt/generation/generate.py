"""`metattt generate`: continue a text, streamed to stdout as it is drawn."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from metattt.checkpoints.record import OF_TRAINING, modules
from metattt.checkpoints.trained import load_model, open_trained
from metattt.composition.settings import NO_CHECKPOINT, pick_device, settings
from metattt.data.tokenizers import Tokenizer, tokenizer_of
from metattt.errors import MetaTTTError, NotFinite, printable
from metattt.generation.sampling import generate as sample_tokens
from metattt.generation.text import Continuation, check_text, ends, generate_text
from metattt.io import parse, path_of, read_text
from metattt.models.language_model import LanguageModel


def generate(cfg: DictConfig) -> None:
    """Prints the prompt and its continuation, then one line about the speed on stderr; or answers a file of prompts
    with lines of JSON.

    Raises:
        MetaTTTError: a checkpoint or a setting that cannot be used; predictions that are not finite.
    """
    chosen = settings(cfg, checkpoint=NO_CHECKPOINT)
    trust = modules(chosen.trust)
    found = open_trained(chosen.checkpoint, (*OF_TRAINING, "data"), trust)
    vocab_size = found.config.model.get("vocab_size")
    tokenizer = tokenizer_of(chosen.checkpoint, found.tokenizer, vocab_size, chosen.tokenizer)
    if chosen.output is not None and chosen.prompts is None:
        raise MetaTTTError("output= takes the answers to prompts=<a file>: give that, or redirect standard output")
    prompts = None if chosen.prompts is None else read_prompts(chosen)
    if chosen.prompt == "-":
        chosen.prompt = _standard_input("prompt").removesuffix("\n")
    check_text(chosen.prompt, "prompt")
    text = Continuation(tokenizer, chosen.stop)
    model, _ = load_model(chosen.checkpoint, pick_device(chosen.device), trust)
    if prompts is not None:
        _answer(chosen, prompts, model, tokenizer)
        return
    ids = [tokenizer.separator, *tokenizer.encode(chosen.prompt).tolist()]
    tokens = sample_tokens(
        model,
        torch.tensor([ids], device=next(model.parameters()).device),
        chosen.max_new_tokens,
        chosen.temperature,
        chosen.top_k,
        chosen.top_p,
        stop=ends(tokenizer),
        seed=chosen.seed,
        compiled=chosen.compile,
    )
    shown: Any = printable if sys.stdout.isatty() else str  # a file gets the text as it is
    print(shown(chosen.prompt), end="", flush=True)
    started = first = time.perf_counter()
    count = 0
    try:
        for token in tokens:
            if not count:
                first = time.perf_counter()
            count += 1
            print(shown(text.add(int(token))), end="", flush=True)
            if text.ended:
                break
    except NotFinite as error:
        print(flush=True)
        raise MetaTTTError(f"{chosen.checkpoint}, after {count} tokens: {error}") from error
    ended = time.perf_counter()
    print(shown(text.finish()), flush=True)
    speed = f", then {(count - 1) / (ended - first):.1f} tokens/s" if count > 1 else ""
    print(f"{count} tokens; prompt of {len(ids)} tokens read in {first - started:.2f} s{speed}", file=sys.stderr)


def read_prompts(chosen: Any) -> list[str]:
    """The prompts of a file, or of standard input: one a line, or the texts under `prompt` in a jsonl file.

    Raises:
        MetaTTTError: a file that cannot be read or holds no prompts, settings that do not go together.
    """
    if chosen.prompt:
        raise MetaTTTError("prompt= and prompts= exclude each other: give one of them")
    if chosen.output is not None and Path(chosen.output).expanduser().exists():
        raise MetaTTTError(f"output={chosen.output} exists: choose a new file")
    if chosen.prompts == "-":
        lines, jsonl = _standard_input("prompts").split("\n"), False
    else:
        file = path_of(chosen.prompts, "prompts")
        lines, jsonl = read_text(file).split("\n"), file.suffix == ".jsonl"
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = parse(line, f"{chosen.prompts}:{number}") if jsonl else line
        text = row.get("prompt") if isinstance(row, dict) else row if jsonl else line.removesuffix("\r")
        if not isinstance(text, str):
            raise MetaTTTError(f"{chosen.prompts}:{number} has no text under `prompt`")
        check_text(text, f"{chosen.prompts}:{number}")
        found.append(text)
    if not found:
        raise MetaTTTError(f"prompts={chosen.prompts} holds no prompts: give one a line")
    return found


def _standard_input(key: str) -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise MetaTTTError(f"{key}=-: what was read is not UTF-8, at byte {error.start}") from error


def _answer(chosen: Any, prompts: list[str], model: LanguageModel, tokenizer: Tokenizer) -> None:
    """A line of JSON for every prompt, in their order, as soon as it is there."""
    target = contextlib.nullcontext(sys.stdout)
    if chosen.output is not None:
        target = Path(chosen.output).expanduser().open("x", encoding="utf-8")  # type: ignore[assignment]
    with target as file:
        unicode = str(getattr(file, "encoding", None)).lower().startswith("utf")
        for start in range(0, len(prompts), chosen.batch_size):
            batch = prompts[start : start + chosen.batch_size]
            seed = None if chosen.seed is None else chosen.seed + start  # else every batch would be drawn alike
            texts = generate_text(
                model, tokenizer, batch, chosen.max_new_tokens, chosen.temperature, chosen.top_k, chosen.top_p,
                chosen.stop, seed, compiled=chosen.compile,
            )  # fmt: skip
            for prompt, text in zip(batch, texts, strict=True):
                file.write(json.dumps({"prompt": prompt, "text": text}, ensure_ascii=not unicode) + "\n")
            file.flush()
