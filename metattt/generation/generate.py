"""`metattt generate`: continue a text, streamed to stdout as it is drawn."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from omegaconf import DictConfig

from metattt.checkpoints.naming import OF_TRAINING
from metattt.checkpoints.trained import load_model, open_trained
from metattt.checkpoints.trust import modules
from metattt.composition.settings import NO_CHECKPOINT, pick_device, settings
from metattt.data.tokenizers import tokenizer_of
from metattt.errors import MetaTTTError, NotFinite
from metattt.generation.sampling import generate as sample_tokens
from metattt.generation.text import Continuation, check_text, ends


@dataclass
class GenerateSettings:
    """The keys of `configs/generate.yaml`."""

    checkpoint: str
    prompt: str = ""
    max_new_tokens: int = 256
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    stop: list[str] = field(default_factory=list)
    seed: int | None = None
    tokenizer: str | None = None
    device: str = "auto"
    trust: Any = None


def generate(cfg: DictConfig) -> None:
    """Prints the prompt and its continuation, then one line about the speed on stderr.

    Args:
        cfg: the configuration of the job `generate`.

    Raises:
        MetaTTTError: a checkpoint or a setting that cannot be used; predictions that are not finite.
    """
    chosen = settings(GenerateSettings, cfg, checkpoint=NO_CHECKPOINT)
    trust = modules(chosen.trust)
    found = open_trained(chosen.checkpoint, (*OF_TRAINING, "data"), trust)
    if "vocab_size" not in found.config.model:
        raise MetaTTTError(f"{chosen.checkpoint} is a model for images: metattt generate takes language models")
    check_text(chosen.prompt, "prompt")
    tokenizer = tokenizer_of(chosen.checkpoint, found.tokenizer, found.config.model.vocab_size, chosen.tokenizer)
    text = Continuation(tokenizer, chosen.stop)
    model, _ = load_model(chosen.checkpoint, pick_device(chosen.device), trust)
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
    )
    _write(chosen.prompt)
    started = first = time.perf_counter()
    count = 0
    try:
        for token in tokens:
            if not count:
                first = time.perf_counter()
            count += 1
            _write(text.add(int(token)))
            if text.ended:
                break
    except NotFinite as error:
        _write("\n")
        raise MetaTTTError(f"{chosen.checkpoint}, after {count} tokens: {error}") from error
    ended = time.perf_counter()
    _write(text.finish() + "\n")
    speed = f", then {(count - 1) / (ended - first):.1f} tokens/s" if count > 1 else ""
    print(f"{count} tokens; prompt of {len(ids)} tokens read in {first - started:.2f} s{speed}", file=sys.stderr)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
