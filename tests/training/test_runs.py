"""A run is never lost: checkpoints that roll, signals, exact resume, the log, and the rules of a run's folder."""

from __future__ import annotations

import csv
import errno
import os
import random
import re
import resource
import shutil
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from metattt.checkpoints import rolling
from metattt.checkpoints.files import find_checkpoint
from metattt.checkpoints.trained import read_checkpoint
from metattt.cli import main
from metattt.composition.compose import compose
from metattt.errors import MetaTTTError
from metattt.locking import LOCK, FolderLock
from metattt.metrics_file import CLOCK
from metattt.training import saving
from metattt.training.callbacks import LossCurve
from metattt.training.csv_log import CSVLog
from metattt.training.run import new_folder
from metattt.training.saving import Checkpoints
from metattt.training.text_module import LanguageModeling
from metattt.training.train import train

TINY = (
    "dim=8", "num_heads=2", "model.num_layers=1", "data.context_length=16", "data.batch_size=2", "trainer.accelerator=cpu",
    "layer=linear_attention", "data.validation_max_bytes=600", "sample=false", "~callbacks.progress", "+trainer.enable_progress_bar=false",
    "trainer.max_steps=8", "trainer.log_every_n_steps=1",
    "callbacks.checkpoint.every_steps=3",
)  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "a.txt"
    file.write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    return file


def tiny(text: Path, folder: Path, *overrides: str) -> DictConfig:
    return compose(*TINY, f"data.path={text}", f"output_dir={folder}", *overrides)


def log(run: Path) -> list[dict[str, str]]:
    """Without the columns of the machine, which no two runs share."""
    with (run / "metrics.csv").open(newline="") as file:
        return [{name: value for name, value in row.items() if name not in CLOCK} for row in csv.DictReader(file)]


def steps(run: Path) -> list[int]:
    return [step for step, _ in rolling.steps(run)]


def assert_same(run: Path, expected: Path) -> None:
    """All that a run is: weights, moments, schedules, generators, counts, curves, and the log."""
    found, wanted = read_checkpoint(run), read_checkpoint(expected)
    for name in wanted.keys() - {"metattt", "loops"}:
        assert_equal(found[name], wanted[name], name)
    assert log(run) == log(expected)


def assert_equal(found: Any, wanted: Any, where: str) -> None:
    """Bit by bit."""
    if isinstance(wanted, torch.Tensor):
        assert torch.equal(found, wanted), where
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


VARIANTS = {
    "plain": (),
    "accumulated": ("trainer.accumulate_grad_batches=2",),
    "logged_now_and_then": ("trainer.log_every_n_steps=3",),
}


@pytest.fixture(scope="module")
def undisturbed(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of eight steps, never stopped, that draw random numbers at every step."""
    torch.set_num_threads(1)
    runs = {name: tmp_path_factory.mktemp("undisturbed") / name for name in VARIANTS}
    with pytest.MonkeyPatch.context() as patch:
        draw(patch)
        for name, overrides in VARIANTS.items():
            assert train(tiny(text, runs[name], *overrides)) == 0
    return runs


def draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every training and validation step draws from every generator, and logs it."""
    step, validation = LanguageModeling.training_step, LanguageModeling.validation_step

    def training(self: Any, ids: Any, index: int) -> Any:
        self.log("drawn", torch.rand(()) + float(np.random.rand()) + random.random() + np.random.normal())
        return step(self, ids, index)

    def validating(self: Any, ids: Any, index: int) -> None:
        random.random(), torch.rand(()), np.random.rand()
        validation(self, ids, index)

    monkeypatch.setattr(LanguageModeling, "training_step", training)
    monkeypatch.setattr(LanguageModeling, "validation_step", validating)


def send(monkeypatch: pytest.MonkeyPatch, number: int, step: int, hook: str = "training_step") -> None:
    """Sends this process a signal in the middle of the step after `step`."""
    original = getattr(LanguageModeling, hook)
    sent: list[int] = []

    def interrupted(self: Any, *rest: Any) -> Any:
        if self.global_step == step and not sent:
            sent.append(step)
            os.kill(os.getpid(), number)
        return original(self, *rest)

    monkeypatch.setattr(LanguageModeling, hook, interrupted)


@pytest.mark.parametrize(
    ("variant", "number", "step", "hook"),
    [
        ("plain", signal.SIGINT, 0, "training_step"),
        ("plain", signal.SIGTERM, 3, "training_step"),  # a checkpoint at a validation
        ("plain", signal.SIGUSR1, 6, "training_step"),
        ("plain", signal.SIGTERM, 4, "validation_step"),  # in the middle of one
        ("plain", signal.SIGINT, 6, "validation_step"),  # where a checkpoint was due
        ("accumulated", signal.SIGTERM, 4, "training_step"),
        ("accumulated", signal.SIGINT, 2, "validation_step"),
        ("logged_now_and_then", signal.SIGTERM, 3, "training_step"),
        ("logged_now_and_then", signal.SIGTERM, 4, "training_step"),
    ],
)
def test_a_signal_stops_between_two_steps_and_resume_is_exact(
    variant: str, number: int, step: int, hook: str, text: Path, undisturbed: dict[str, Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run, before = tmp_path / "run", [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    draw(monkeypatch)
    with monkeypatch.context() as patch:
        send(patch, number, step, hook)
        assert train(tiny(text, run, *VARIANTS[variant])) == 128 + number
    reached = step if hook == "validation_step" else step + 1
    said = capsys.readouterr().out
    assert f"stopped at step {reached} ({signal.Signals(number).name})" in said and f"train resume={run}" in said
    assert steps(run)[0] == reached and not (run / LOCK).exists()
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == before
    assert train(compose(f"resume={run}")) == 0
    assert_same(run, undisturbed[variant])


def test_a_run_in_a_thread_has_no_handlers(text: Path, tmp_path: Path) -> None:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(train(tiny(text, tmp_path / "run", "trainer.max_steps=1"))))
    thread.start()
    thread.join()
    assert codes == [0]


class Killed(BaseException):
    """Ends a run at once, as nothing that a run expects does."""


def kill_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    original = LossCurve.on_train_batch_end

    def killed(self: Any, trainer: Any, *rest: Any) -> None:
        original(self, trainer, *rest)
        if trainer.global_step == step:
            raise Killed

    monkeypatch.setattr(LossCurve, "on_train_batch_end", killed)


@pytest.mark.parametrize("step", [2, 5, 8])
@pytest.mark.parametrize("resume", ["auto", "folder"])
def test_killed_and_resumed_with_the_same_command(
    step: int, resume: str, text: Path, undisturbed: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first checkpoint; later; after the last step."""
    run = tmp_path / "run"
    draw(monkeypatch)
    command = tiny(text, run, "callbacks.checkpoint.best=null", "resume=auto")
    with monkeypatch.context() as patch:
        kill_at(patch, step)
        with pytest.raises(Killed):
            train(command)
    kept = {2: [], 5: [3], 8: [6, 3]}[step]
    assert steps(run) == kept
    assert train(command if resume == "auto" else compose(f"resume={run}")) == 0
    assert log(run) == log(undisturbed["plain"]) and steps(run)[0] == 8
    found, wanted = (read_checkpoint(one)["state_dict"] for one in (run, undisturbed["plain"]))
    assert all(torch.equal(value, found[name]) for name, value in wanted.items())


def test_killed_between_the_last_checkpoint_and_the_last_validation(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    settings = ("trainer.val_check_interval=3",)  # not at the last step
    assert train(tiny(text, whole, *settings)) == 0

    def killed(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("lightning.Trainer.validate", killed)
        with pytest.raises(Killed):
            train(tiny(text, run, *settings))
    assert steps(run)[0] == 8 and log(run) != log(whole)
    assert train(compose(f"resume={run}")) == 0  # it is complete but for that
    assert log(run) == log(whole) and "bits per byte" in capsys.readouterr().out
    assert train(tiny(text, run, *settings, "resume=auto")) == 0
    assert "is complete at step 8: to train on, add trainer.max_steps" in capsys.readouterr().out
    with pytest.raises(MetaTTTError, match="complete at step 8"):
        train(compose(f"resume={run}"))
    assert log(run) == log(whole)


def test_the_last_ones_and_the_best_are_kept(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([5.0, 2.0, 3.0, 4.0])  # at steps 2, 4, 6 and 8
    end = LanguageModeling.on_validation_epoch_end

    def validated(self: Any) -> None:
        end(self)
        self.log("validation/made_up", next(losses))

    settings = ("callbacks.checkpoint.best=validation/made_up", "callbacks.checkpoint.every_steps=1")
    with monkeypatch.context() as patch:
        patch.setattr(LanguageModeling, "on_validation_epoch_end", validated)
        assert train(tiny(text, tmp_path / "run", *settings)) == 0
    assert steps(tmp_path / "run") == [8, 7, 4]
    with pytest.raises(
        MetaTTTError, match=r"best=validation/nothing is not logged: the validation logs .*validation/loss"
    ):
        train(tiny(text, tmp_path / "other", "callbacks.checkpoint.best=validation/nothing"))


def test_minutes_count_as_well_as_steps(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minutes = iter(range(10_000))
    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: 60.0 * next(minutes)))
    settings = (
        "callbacks.checkpoint.every_steps=null",
        "callbacks.checkpoint.best=null",
        "callbacks.checkpoint.keep=9",
    )
    assert train(tiny(text, tmp_path / "run", *settings, "callbacks.checkpoint.every_minutes=3")) == 0
    assert steps(tmp_path / "run") == [8, 7, 5, 3]  # the clock is asked once a step, and three times while it writes


@pytest.mark.parametrize("given", ["every_steps=0", "every_minutes=0", "every_minutes=nan", "keep=0"])
def test_numbers_of_checkpoints(given: str, text: Path, tmp_path: Path) -> None:
    with pytest.raises(MetaTTTError, match=rf"callbacks.checkpoint.{given.split('=')[0]}=.* is not allowed"):
        train(tiny(text, tmp_path / "run", f"callbacks.checkpoint.{given}"))


# The folder of a run


@pytest.fixture(scope="module")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    torch.set_num_threads(1)
    assert train(tiny(text, run, "callbacks.checkpoint.best=null")) == 0
    return run


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "copied"))


def test_a_folder_with_a_run_is_refused(text: Path, copied: Path) -> None:
    before = {file: file.read_bytes() for file in copied.rglob("*") if file.is_file()}
    with pytest.raises(
        MetaTTTError, match=r"holds a run: .*resume=.*resume=auto.*overwrite=true.*another folder"
    ) as said:
        train(tiny(text, copied))
    assert "\n" not in str(said.value)
    assert {file: file.read_bytes() for file in copied.rglob("*") if file.is_file()} == before
    (copied / "mine.txt").write_text("a note of the user's")
    (copied / "checkpoints" / "notes.txt").write_text("another")
    mine = copied / "checkpoints" / "step-00000001"  # in the pattern, and not ours
    mine.mkdir()
    with pytest.raises(MetaTTTError, match=r"overwrite=true: checkpoints/step-00000001 .* is not of a run"):
        train(tiny(text, copied, "overwrite=true", "trainer.max_steps=1"))
    mine.rename(copied / "mine")
    assert train(tiny(text, copied, "overwrite=true", "trainer.max_steps=1")) == 0
    assert steps(copied) == [1] and (copied / "mine").is_dir()
    assert (copied / "mine.txt").is_file() and (copied / "checkpoints" / "notes.txt").is_file()
    assert {row["step"] for row in log(copied)} == {"1"}


@pytest.mark.parametrize("name", ["metrics.csv", "run.yaml", "loss_curve.png"])
@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_is_not_ours_is_never_removed(name: str, kind: str, text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    mine = tmp_path / "mine" if kind == "link" else run / name
    if kind == "folder":
        mine.mkdir()
        mine = mine / "thesis.txt"
    mine.write_text("one,two\n1,2\n")
    if kind == "link":
        (run / name).symlink_to(mine)
    for override in ("overwrite=false", "overwrite=true"):
        if name == "loss_curve.png" and override == "overwrite=true":
            continue  # a picture is written over then
        with pytest.raises(MetaTTTError, match=name):
            train(tiny(text, run, override))
        assert mine.read_text() == "one,two\n1,2\n" and {file.name for file in run.iterdir()} == {name}


def test_pruning_and_clearing_follow_no_link(copied: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (copied / "checkpoints").rename(elsewhere)
    (copied / "checkpoints").symlink_to(elsewhere)
    before = sorted(elsewhere.iterdir())
    rolling.prune(copied, 1)
    rolling.remove_newer(copied, -1)
    assert sorted(elsewhere.iterdir()) == before and find_checkpoint(copied).name == "step-00000008"
    (copied / "checkpoints").unlink()
    (copied / "checkpoints").mkdir()
    for number, path in enumerate(before):
        (copied / "checkpoints" / f"step-{number:08}").symlink_to(path)
    rolling.prune(copied, 1)
    assert sorted(elsewhere.iterdir()) == before and len(rolling.steps(copied)) == len(before)


def test_one_run_at_a_time(text: Path, copied: Path) -> None:
    with FolderLock(copied, "a training run"):
        for given in (tiny(text, copied, "overwrite=true"), compose(f"resume={copied}", "trainer.max_steps=9")):
            with pytest.raises(MetaTTTError, match="is in use by process"):
                train(given)
    assert (
        train(compose(f"resume={copied}", "trainer.max_steps=9")) == 0
    )  # and the lock is given back, also after errors


def test_runs_that_begin_in_one_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("metattt.training.run.time.strftime", lambda _: "now")
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(new_folder("run"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 8 and Path("runs/now-run") in found and Path("runs/now-run-8") in found


def test_words_that_do_not_go_together(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", *TINY, f"data.path={text}"]
    for given, expected in (
        (["resume="], "`resume=''` has no value"),
        (["output_dir="], "`output_dir=''` has no value"),
        (["resume=auto"], "add output_dir=<folder>"),
        (["resume=auto", "overwrite=true", f"output_dir={tmp_path}/run"], "give one of them"),
        ([f"resume={tmp_path}/nothing"], "does not exist"),
        ([f"resume={tmp_path}"], "no checkpoint"),
    ):
        assert main([*command, *given]) == 2
        error = capsys.readouterr().err
        assert expected in error and error.count("\n") == 1, error
    assert not (tmp_path / "run").exists()


def test_a_run_that_was_begun_goes_on_with_its_own_configuration(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        kill_at(patch, 2)
        with pytest.raises(Killed):
            train(tiny(text, run, "training.lr=1e-4"))
    with pytest.raises(MetaTTTError, match="holds a run"):
        train(tiny(text, run))  # its log has a row
    run.rename(tmp_path / "moved")
    with pytest.raises(MetaTTTError, match="dim=16 would change the run"):
        train(compose(f"resume={tmp_path / 'moved'}", "dim=16"))
    assert train(compose(f"resume={tmp_path / 'moved'}", "trainer.max_steps=3")) == 0
    assert "begins again" in capsys.readouterr().out and not run.exists()
    assert steps(tmp_path / "moved")[0] == 3
    assert read_checkpoint(tmp_path / "moved")["metattt"]["config"]["training"]["lr"] == 1e-4


# Damage


def damage(checkpoint: Path) -> None:
    file = next(checkpoint.glob("model*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100] + bytes(100))


def test_the_newest_good_one_is_taken_and_said(
    copied: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest, older = (path for _, path in rolling.steps(copied))
    damage(newest)
    assert train(compose(f"resume={copied}")) == 0
    output = capsys.readouterr()
    assert "damaged: step-00000008" in output.out + output.err and "step-00000006 is taken" in output.out + output.err
    assert steps(copied) == [8, 6] and (copied / "checkpoints" / "step-00000008.damaged-1").is_dir()
    assert log(copied) == log(finished)
    for path in (newest, older):
        damage(path)
    with pytest.raises(MetaTTTError, match=r"no checkpoint of .* can be used, of 2"):
        train(compose(f"resume={copied}"))
    assert steps(copied) == [8, 6]


def test_an_older_one_is_gone_on_from_only_if_it_is_said(copied: Path, finished: Path, tmp_path: Path) -> None:
    older = copied / "checkpoints" / "step-00000006"
    with pytest.raises(MetaTTTError, match=r"has gone on from .* to step-00000008: .*overwrite=true") as said:
        train(compose(f"resume={older}"))
    assert "\n" not in str(said.value) and steps(copied) == [8, 6]
    assert train(compose(f"resume={older}", f"output_dir={tmp_path / 'other'}")) == 0
    assert steps(tmp_path / "other") == [8] and steps(copied) == [8, 6]
    assert train(compose(f"resume={older}", "overwrite=true")) == 0
    assert steps(copied) == [8, 6] and log(copied) == log(finished)


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        (b"", 0),
        (b"\x00\xff\xfe garbage \n\n,,,\n", 0),
        (b"step,train/loss\n1,2.0\nno number,3.0\n2,1.0\n", 2),
        (b"step,train/loss\n1,2.0\n2,1.0\n3", 2),  # a kill
    ],
)
def test_a_damaged_log_does_not_keep_a_run_from_going_on(
    content: bytes, kept: int, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copied / "metrics.csv").write_bytes(content)
    assert train(compose(f"resume={copied}", "trainer.max_steps=9")) == 0
    said = capsys.readouterr().out
    rows = log(copied)
    assert sum(bool(row["train/loss"]) for row in rows) == kept + 1 and rows[-1]["step"] == "9"
    aside = copied / "metrics.csv.damaged-1"
    assert aside.exists() == ("was damaged" in said) == (b"garbage" in content or b"no number" in content)
    assert not aside.exists() or aside.read_bytes() == content


def test_a_folder_in_the_place_of_a_log_is_set_aside(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv" / "inside").mkdir(parents=True)
    note = CSVLog(str(tmp_path / "metrics.csv")).go_on_from(3)
    assert note is not None and "it is not a file" in note and (tmp_path / "metrics.csv.damaged-1" / "inside").is_dir()


def test_the_log_is_whole_whenever_it_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.csv"
    first = CSVLog(str(path))
    for step in range(1, 4):
        first.log_metrics({"train/loss": 1 / step}, step)
        assert len(path.read_text().splitlines()) == step + 1  # on its way without being asked
    first.log_metrics({"validation/loss": torch.tensor(0.5)}, 3)
    first.sync()
    before = path.read_bytes()

    def killed(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(Killed):
            first.log_metrics({"a_new_column": 1.0}, 4)
        assert path.read_bytes() == before
        with pytest.raises(Killed):
            CSVLog(str(path)).go_on_from(2)
    assert path.read_bytes() == before
    again = CSVLog(str(path))
    again.go_on_from(3, validate_again=True)
    assert [row["step"] for row in csv.DictReader(path.open())] == ["1", "2", "3"]
    again.log_metrics({"another": 7}, 4)
    rows = list(csv.DictReader(path.open()))
    assert rows[0]["train/loss"] == "1.0" and rows[3]["another"] == "7" and rows[3]["train/loss"] == ""


def test_lightnings_own_log_can_be_chosen(text: Path, tmp_path: Path) -> None:
    own = (
        "~logger.csv", "+logger.own._target_=lightning.pytorch.loggers.CSVLogger", f"+logger.own.save_dir={tmp_path}/logs",
        "+logger.own.name=x", "+logger.own.version=y",
    )  # fmt: skip
    assert train(tiny(text, tmp_path / "run", *own)) == 0
    with (tmp_path / "logs" / "x" / "y" / "metrics.csv").open(newline="") as file:
        assert [row["step"] for row in csv.DictReader(file) if row["train/loss"]] == [str(step) for step in range(1, 9)]


# What the command line says counts, also where it equals a default


@pytest.mark.parametrize("given", ["trainer.devices=1", "trainer.max_steps=320"])
def test_an_explicit_value_counts_though_it_is_the_default(
    given: str, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from metattt.training.resume import resumed

    saved = OmegaConf.create(OmegaConf.to_container(compose("trainer.devices=2", "trainer.max_steps=8")))
    cfg, _ = resumed(compose(f"resume={finished}", given), saved)  # type: ignore[arg-type]
    key, _, value = given.partition("=")
    assert str(OmegaConf.select(cfg, key)) == value
    other = "max_steps" if "devices" in given else "devices"
    assert cfg.trainer[other] == {"max_steps": 8, "devices": 2}[other]


def test_an_explicit_value_of_the_model_is_refused_though_it_is_the_default(finished: Path) -> None:
    with pytest.raises(MetaTTTError, match="dim=128 would change the run"):
        train(compose(f"resume={finished}", "dim=128", "trainer.max_steps=9"))


# Disks


def test_a_full_disk_is_one_line_and_the_last_checkpoint_stays(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The limit on the size of a file stands for a full disk: writing fails half way."""
    run = tmp_path / "run"
    original, before = Checkpoints._save, resource.getrlimit(resource.RLIMIT_FSIZE)

    def full(self: Checkpoints, trainer: Any, **rest: Any) -> None:
        if trainer.global_step == 6:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        original(self, trainer, **rest)

    try:
        with monkeypatch.context() as patch:
            patch.setattr(Checkpoints, "_save", full)
            arguments = [*TINY, f"data.path={text}", f"output_dir={run}", "callbacks.checkpoint.best=null"]
            assert main(["train", *arguments]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "step-00000006" in error, error
    assert steps(run) == [3]
    assert train(compose(f"resume={run}")) == 0 and steps(run) == [8, 6]
    assert not [file for file in (run / "checkpoints").iterdir() if ".part" in file.name]


def test_what_a_kill_left_half_written_is_removed_and_nothing_else(text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(compose(*TINY, f"data.path={text}", f"output_dir={run}")) == 0
    left = [run / "metrics.csv.17.part", run / "run.yaml.4.part"]
    kept = [run / "metrics.csv.part", run / "notes.17.part", run / "metrics.csv.17.parts"]
    for file in (*left, *kept):
        file.write_text("half")
    assert train(compose(f"resume={run}", "trainer.max_steps=9")) == 0
    assert not any(file.exists() for file in left) and all(file.exists() for file in kept)


def test_a_log_that_cannot_be_written_is_one_line(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(self: CSVLog, *_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(self.path))

    monkeypatch.setattr(CSVLog, "sync", full)
    assert main(["train", *TINY, f"data.path={text}", f"output_dir={tmp_path}/run"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "metrics.csv: No space left on device" in error


def test_a_folder_that_cannot_be_written(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nobody/may")):
        assert main(["train", *TINY, f"data.path={text}", f"output_dir={folder}"]) == 2
        error = capsys.readouterr().err
        assert re.fullmatch(rf"error: output_dir={folder} cannot be used: .*\n", error), error


def test_a_renamed_checkpoint_is_not_gone_on_from(
    undisturbed: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps are told by the names: as step 99 it was removed as newer than itself, and then missing."""
    run = shutil.copytree(undisturbed["plain"], tmp_path / "run")
    renamed = run / "checkpoints" / "step-00000099"
    (run / "checkpoints" / "step-00000008").rename(renamed)
    assert main(["train", f"resume={run}", "trainer.max_steps=9"]) == 2
    assert "is of step 8, and was renamed: give it its name back, step-00000008" in capsys.readouterr().err
    assert renamed.is_dir()
