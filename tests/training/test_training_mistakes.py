"""Mistakes that show only when a run begins cost a line and exit code 2; and what a run's folder is called and says."""

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from omegaconf import OmegaConf
from runs_for_tests import TINY, write_corpus

from metattt.cli import main


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with some text in it, and a file in the place of a folder."""
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "text")
    (tmp_path / "file").write_text("")
    return tmp_path


@pytest.mark.parametrize(("given", "expected"), [
    ("training=timm", "TimmRecipe is for images: set training=adamw"),
    ("model.vocab_size=256", "set model.vocab_size=257"),
    ("trainer.max_steps=0", "trainer.max_steps=0 is not allowed: it must be at least 1: a run is counted in steps"),
    ("trainer.accumulate_grad_batches=0", "trainer.accumulate_grad_batches=0 is not allowed: it must be at least 1"),
    ("trainer.val_check_interval=1.5", "val_check_interval=1.5 is not allowed: it must be above 0 and at most 1"),
    ("trainer.val_check_interval=-1", "val_check_interval=-1 is not allowed: it must be at least 1: give steps"),
    ("trainer.use_distributed_sampler=true", "use_distributed_sampler=true is not allowed: the data divides itself"),
    ("output_dir=file", "output_dir=file cannot be used: it is a file"),
    ("training.betas=[0.9,1.5]", "training.betas[1]=1.5 is not allowed: it must be at least 0 and below 1"),
    ("training=timm training.optimizer=adamW2", "training.optimizer=adamW2 is not an optimizer of timm"),
    ("resume=auto output_dir=null", "add output_dir=<folder>"),
    ("resume=auto overwrite=true", "give one of them"),
    ("resume=nothing", "does not exist"),
    ("+callbacks.x={_target_:lightning.pytorch.callbacks.StochasticWeightAveraging,swa_lrs:0.1}", "averages once per epoch"),
    ("+callbacks.x={_target_:lightning.pytorch.callbacks.WeightAveraging} trainer.precision=bf16-true", "precision=bf16-mixed"),
    ("+callbacks.x={_target_:lightning.pytorch.callbacks.GradientAccumulationScheduler,scheduling:{0:2}}", "it counts epochs"),
])  # fmt: skip
def test_one_line(given: str, expected: str, here: Path, told: Callable[..., str]) -> None:
    before = set(here.iterdir())
    error = told("train", *TINY, "trainer.max_steps=1", "data.path=text", "output_dir=run", *given.split())
    assert expected in error and error.count("\n") == 1
    assert not list(here.rglob("step-*")) and set(here.iterdir()) <= before | {here / "run"}


@pytest.mark.parametrize("name", ["LOCAL_RANK", "NODE_RANK"])
def test_a_rank_that_another_run_has_left(name: str, here: Path, told: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    error = told("train", *TINY, "trainer.max_steps=1", "data.path=text", "output_dir=run")
    assert f"{name}=1 in the environment" in error and not list(here.rglob("step-*"))


def test_a_full_disk(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    said = "FakeTensor from user code: no line of interest", "vjp does not support saved tensor hooks"
    compiler, hooks = (compile(f"raise RuntimeError('{one}')", "torch/_dynamo/utils.py", "exec") for one in said)
    for fault, expected in (
        (OSError(errno.ENOSPC, "No space left on device", "run/metrics.csv"), "run/metrics.csv: No space left on device: free some"),
        (OSError(errno.EFBIG, "File too large"), "error: run: File too large: the limit is that of `ulimit -f`"),  # as a write says it
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), "error: current folder: No such file"),  # as os.getcwd says it
        (RuntimeError("InvalidCxxCompiler: No working C++ compiler found"), "install one, or name it in CXX, or set compile=false"),
        (OSError(errno.EACCES, "Denied", "a\nerror: b"), "error: a\n       error: b: Denied"),  # no other error
        (RuntimeError("No API key. Use `wandb login` to log in."), "error: W&B has no key: run `wandb login`, or set logger"),
        (lambda *call, **more: exec(hooks), "set compile=false, or model.checkpoint_blocks=false: RuntimeError: vjp"),
        (lambda *call, **more: exec(compiler), "cannot run this model, set compile=false: RuntimeError: FakeTensor; the traceback is in"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr("lightning.Trainer.save_checkpoint", Mock(side_effect=fault))
            assert main(["train", *TINY, "trainer.max_steps=1", "data.path=text", "output_dir=run", "overwrite=true"]) == 2
        error = capsys.readouterr().err
        assert f"error: {error.rpartition('error: ')[2]}" in error and expected in error and "Traceback" not in error


@pytest.mark.parametrize(("given", "name"), [(["layer=custom", "learner=mlp"], "mlp"), (["name=my run"], "my run")])
def test_the_folder_of_a_run(given: list[str], name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = [one for one in TINY if "layer" not in one and "progress" not in one]
    assert main(["train", *small, "trainer.max_steps=1", "data.path=text", *given, "~callbacks", "~logger"]) == 0
    (folder,) = (here / "runs").iterdir()
    assert folder.name.endswith(f"-{name}")
    saved = OmegaConf.load(folder / "run.yaml")
    assert (folder / "run.yaml").read_text().startswith("# metattt ")
    assert saved.name == name and saved.output_dir == f"runs/{folder.name}" and saved.dim == 8
    assert "${" not in (folder / "run.yaml").read_text()
    capsys.readouterr()
    assert main(["eval", f"checkpoint={folder}"]) == 0  # it is a run's folder, whatever else lies in it
    shutil.rmtree(folder / "checkpoints" / "step-00000001")
    assert main(["eval", f"checkpoint={folder}"]) == 2
    assert "holds no checkpoints" in capsys.readouterr().err
