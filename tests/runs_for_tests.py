"""What tests of runs share: a small run and its text, what it has logged and kept, and ways to end it before its time."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from metattt.checkpoints import rolling
from metattt.composition.compose import compose
from metattt.metrics_file import CLOCK
from metattt.training.callbacks import LossCurve

TINY = (
    "dim=8", "num_heads=2", "model.num_layers=1", "model.ffn_dim=16", "data.context_length=16", "data.batch_size=2",
    "data.validation_max_bytes=600", "layer=linear_attention", "trainer.accelerator=cpu", "trainer.log_every_n_steps=1", "sample=false",
    "~callbacks.progress", "+trainer.enable_progress_bar=false",
)  # fmt: skip
"""The quickest run. Of the tests that need a state with weights, each chooses its layer."""


def write_corpus(folder: Path, documents: int = 20) -> Path:
    """Documents of words that repeat, which a few steps learn something from."""
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(documents):
        words = ["alpha", "beta", "gamma", "delta"][index % 4 :] * 12
        (folder / f"{index:02}.txt").write_text(f"document {index}\n" + " ".join(words))
    return folder


def tiny(corpus: Path, run: Path, *overrides: str) -> DictConfig:
    """The configuration of a quick run."""
    return compose(*TINY, f"data.path={corpus}", f"output_dir={run}", *overrides)


def rows(file: Path) -> list[dict[str, str]]:
    """Of a table on the disk."""
    with file.open(newline="", encoding="utf-8") as opened:
        return list(csv.DictReader(opened))


def log(run: Path) -> list[dict[str, str]]:
    """Its rows, without the columns of the machine, which no two runs share."""
    return [{name: value for name, value in row.items() if name not in CLOCK} for row in rows(run / "metrics.csv")]


def column(run: Path, name: str) -> dict[int, float]:
    """What a run has logged, by step."""
    return {int(row["step"]): float(row[name]) for row in rows(run / "metrics.csv") if row.get(name)}


def steps(run: Path) -> list[int]:
    """Of its checkpoints, the newest first."""
    return [step for step, _ in rolling.steps(run)]


class Killed(BaseException):
    """Ends a run at once, as nothing that a run expects does."""


def kill(*_: Any, **__: Any) -> None:
    raise Killed


def after_step(monkeypatch: pytest.MonkeyPatch, step: int, action: Callable[..., Any] = kill) -> None:
    """Calls `action(trainer, module)` at the end of a step, before anything is written of it."""
    original = LossCurve.on_train_batch_end

    def then(self: Any, trainer: Any, module: Any, *rest: Any) -> None:
        original(self, trainer, module, *rest)
        if trainer.global_step == step:
            action(trainer, module)

    monkeypatch.setattr(LossCurve, "on_train_batch_end", then)


def assert_equal(found: Any, wanted: Any, where: str = "") -> None:
    """Bit by bit and type by type, through dictionaries and lists."""
    assert type(found) is type(wanted), where
    if isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype and torch.equal(found, wanted), where
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for name, value in wanted.items():
            assert_equal(found[name], value, f"{where}.{name}")
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), where
        for number, value in enumerate(wanted):
            assert_equal(found[number], value, f"{where}.{number}")
    else:
        assert found == wanted, where
