"""Runs that many tests look at, made once."""

from pathlib import Path

import pytest
import torch
from runs_for_tests import tiny, write_corpus

from metattt.training.train import train


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


@pytest.fixture(scope="session")
def finished(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps with TTT-Linear, never stopped. It is looked at, and copied to be changed."""
    torch.set_num_threads(1)
    run = tmp_path_factory.mktemp("finished") / "run"
    size = ("dim=16", "data.context_length=32", "data.batch_size=4", "layer=ttt_linear", "optimizer.mini_batch_size=8")
    settings = ("training.lr=5e-3", "trainer.max_steps=8")
    kept = ("callbacks.checkpoint.every_steps=3", "callbacks.checkpoint.best=null", "trainer.val_check_interval=2")
    assert train(tiny(corpus, run, *size, *settings, *kept)) == 0
    return run
