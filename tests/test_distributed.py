"""Two processes on the CPU, started by the command line as a user starts them, against one process with the same batch."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from metattt.compose import compose
from metattt.data.windows import ShuffledBatches, batches_in_order
from metattt.errors import MetaTTTError
from metattt.training.batches import plan_batches
from metattt.training.checkpoint import read_checkpoint
from metattt.training.train import train

TINY = (
    "dim=16", "num_heads=2", "model.num_layers=2", "data.context_length=32", "data.batch_size=4", "trainer.accelerator=cpu",
    "trainer.accumulate_grad_batches=2", "trainer.log_every_n_steps=1", "optimizer.mini_batch_size=8", "training.lr=5e-3",
)  # fmt: skip
TOLERANCE = {"rtol": 0, "atol": 1e-6}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus; one process: `five` steps, the same run gone on with to `resumed` ten, and `ten` steps without a stop."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "corpus").mkdir()
    for index in range(20):
        (folder / "corpus" / f"{index}.txt").write_text(f"document {index}\n" + "alpha beta gamma delta " * 30)
    for name, steps in (("five", 5), ("ten", 10)):
        settings = (*TINY, f"data.path={folder / 'corpus'}", f"output_dir={folder / name}", f"trainer.max_steps={steps}")
        assert train(compose(*settings)) == 0
    shutil.copytree(folder / "five", folder / "resumed")
    assert train(compose(f"resume={folder / 'resumed'}", "trainer.max_steps=10")) == 0
    return folder


def metattt(*overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "metattt.cli", "train", *overrides]
    return subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300)


def assert_same(run: Path, expected: Path) -> None:
    """Parameters, Adam's moments and the log of two runs."""
    found, wanted = read_checkpoint(run), read_checkpoint(expected)
    assert found["global_step"] == wanted["global_step"] == 10
    torch.testing.assert_close(dict(found["state_dict"]), dict(wanted["state_dict"]), **TOLERANCE)
    torch.testing.assert_close(found["optimizer_states"][0]["state"], wanted["optimizer_states"][0]["state"], **TOLERANCE)
    logs = [[line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()] for folder in (run, expected)]
    assert len(logs[0]) == len(logs[1]) > 10
    for row, reference in zip(*logs, strict=True):
        for value, other in zip(row, reference, strict=True):
            assert value == other or float(value) == pytest.approx(float(other), abs=1e-5)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_train_as_one(runs: Path, strategy: str) -> None:
    run = runs / strategy
    settings = (*TINY, f"data.path={runs / 'corpus'}", f"output_dir={run}", "trainer.max_steps=10")
    result = metattt(*settings, f"trainer={strategy}", "trainer.devices=2")
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.count("10 steps of 256 tokens") == 1 and "2 processes" in result.stdout
    assert "Warning" not in result.stderr
    assert_same(run, runs / "ten")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_go_on_with_the_run_of_one(runs: Path, tmp_path: Path, strategy: str) -> None:
    shutil.copytree(runs / "five", tmp_path / "run")
    result = metattt(f"resume={tmp_path / 'run'}", "trainer.max_steps=10", f"trainer={strategy}", "trainer.devices=2")
    assert result.returncode == 0, result.stderr[-2000:]
    assert_same(tmp_path / "run", runs / "resumed")


def test_the_processes_share_every_batch() -> None:
    together = list(ShuffledBatches(10, 6, seed=3, num_batches=5))
    shares = [list(ShuffledBatches(10, 2, 3, 5, rank=rank, world_size=3)) for rank in range(3)]
    assert [[position for part in parts for position in part] for parts in zip(*shares, strict=True)] == together
    assert list(ShuffledBatches(10, 2, 3, 5, start=2, rank=1, world_size=3)) == shares[1][2:]


@pytest.mark.parametrize(("windows", "size", "world_size"), [(10, 3, 1), (10, 3, 2), (7, 2, 3), (1, 4, 2), (12, 3, 2)])
def test_every_process_validates_as_often(windows: int, size: int, world_size: int) -> None:
    shares = [batches_in_order(windows, size, rank, world_size) for rank in range(world_size)]
    assert len({len(share) for share in shares}) == 1
    read = [position for share in shares for batch in share for position in batch if position >= 0]
    assert sorted(read) == list(range(windows))


def test_a_step_has_the_same_tokens_whatever_the_processes() -> None:
    for world_size in (1, 2, 4):
        for batch_size in (1, 3, 8):
            plan = plan_batches(2**19, 2048, batch_size, 1, world_size)
            assert plan.batch_size <= batch_size and plan.batch_size * plan.accumulate * world_size == 256
    assert plan_batches(None, 32, 4, 2, 1) == (4, 2)
    assert plan_batches(None, 32, 4, 2, 2) == (4, 1)
    assert plan_batches(None, 32, 4, 1, 4) == (1, 1)
    with pytest.raises(MetaTTTError, match="set batch_tokens=512"):
        plan_batches(500, 32, 4, 1, 1)
    with pytest.raises(MetaTTTError, match="8 windows per step, which 3 processes cannot share"):
        plan_batches(None, 32, 4, 2, 3)
