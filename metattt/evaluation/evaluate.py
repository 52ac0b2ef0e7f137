"""`metattt eval`: loss, perplexity and bits per byte of a checkpoint on a text."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import hydra
import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader

from metattt.data.text import Split, TextData
from metattt.errors import MetaTTTError
from metattt.evaluation.settings import pick_device, settings
from metattt.models.language_model import LanguageModel
from metattt.training.checkpoint import load_model


@dataclass
class EvalData:
    """Text to evaluate on. None: as in training."""

    path: Any = None
    text_key: str | None = None
    context_length: int | None = None
    batch_size: int | None = None
    validation_max_bytes: int | None = None


@dataclass
class EvalSettings:
    """The keys of `configs/eval.yaml`."""

    checkpoint: str
    split: str = "validation"
    device: str = "auto"
    data: EvalData = field(default_factory=EvalData)


class Scores(NamedTuple):
    """Sums over the predicted tokens of a text: their cross-entropy (nats), their number, and the bytes that they stand for."""

    nats: float
    tokens: int
    bytes: int

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """Per token."""
        return math.exp(min(self.loss, 700.0))  # a double ends near exp(709)

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes


def evaluate(cfg: DictConfig) -> Scores:
    """Prints the scores of a checkpoint as a table, and returns them.

    Args:
        cfg: the configuration of the job `eval`.

    Raises:
        MetaTTTError: a checkpoint, a text or a setting that cannot be used.
    """
    chosen = settings(EvalSettings, cfg)
    if chosen.split not in ("train", "validation", "all"):
        raise MetaTTTError(f"split={chosen.split} is not allowed: use train, validation or all")
    split: Split = chosen.split  # type: ignore[assignment]
    model, config = load_model(chosen.checkpoint, pick_device(chosen.device))
    changes = {key: value for key, value in vars(chosen.data).items() if value is not None}
    data: TextData = hydra.utils.instantiate({**config.data, **changes}, _convert_="all")
    scores = score(model, data.loader(split), data.tokenizer.token_bytes, progress=True)
    table = Table(title=f"{split} text of {data.path or 'the Python standard library'}", title_justify="left")
    for name in ("tokens", "loss (nats per token)", "perplexity (per token)", "bits per byte"):
        table.add_column(name, justify="right")
    table.add_row(f"{scores.tokens:,}", f"{scores.loss:.4f}", f"{scores.perplexity:.4f}", f"{scores.bits_per_byte:.4f}")
    Console(highlight=False, soft_wrap=True).print(table)
    return scores


def score(model: LanguageModel, loader: DataLoader[Tensor], token_bytes: Tensor, progress: bool = False) -> Scores:
    """Scores a model on windows `[B, T + 1]`: every token but the first of each is predicted from those before it.

    Args:
        model: the model, in evaluation mode.
        loader: batches of windows.
        token_bytes: `[V]` bytes that each token stands for.
        progress: show a progress bar on a terminal (stderr).
    """
    device = next(model.parameters()).device
    nats, tokens, num_bytes = 0.0, 0, 0
    console = Console(stderr=True)
    for batch in track(loader, "evaluating", console=console, transient=True, disable=not (progress and console.is_terminal)):
        ids = batch.to(device)
        labels = ids[:, 1:]
        with torch.inference_mode():
            logits = model(ids[:, :-1]).float()
            nats += F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").item()
        tokens += labels.numel()
        num_bytes += int(token_bytes[batch[:, 1:]].sum())
    return Scores(nats, tokens, num_bytes)
