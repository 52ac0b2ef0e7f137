"""A run is never lost: checkpoints that roll, signals, exact resume, the log, and the rules of a run's folder."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Timer
from refusals_for_tests import refusal
from runs_for_tests import Killed, after_step, assert_equal, column, kill, log, rows, steps, tiny

from metattt.checkpoints import rolling
from metattt.checkpoints.trained import read_checkpoint
from metattt.composition.compose import compose
from metattt.errors import MetaTTTError
from metattt.locking import LOCK, locked
from metattt.sweeps.launch import sweep
from metattt.training import saving
from metattt.training.csv_log import CSVLog
from metattt.training.run import new_folder
from metattt.training.saving import Checkpoints
from metattt.training.text_module import LanguageModeling
from metattt.training.train import train

EIGHT = ("trainer.max_steps=8", "callbacks.checkpoint.every_steps=3")
NO_BEST = "callbacks.checkpoint.best=null"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def eight(corpus: Path, run: Path, *overrides: str) -> Any:
    """The configuration of a run of eight steps, with checkpoints after steps 3 and 6 and at the end."""
    return tiny(corpus, run, *EIGHT, *overrides)


VARIANTS = {
    "plain": (),
    "accumulated": ("trainer.accumulate_grad_batches=2", "trainer.log_every_n_steps=3"),
    "averaged": ("+callbacks.average={_target_: lightning.pytorch.callbacks.EMAWeightAveraging, decay: 0.5}",),
}


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of eight steps, never stopped, that draw random numbers at every step."""
    torch.set_num_threads(1)
    runs = {name: tmp_path_factory.mktemp("undisturbed") / name for name in VARIANTS}
    with pytest.MonkeyPatch.context() as patch:
        draw(patch)
        for name, overrides in VARIANTS.items():
            assert train(eight(corpus, runs[name], *overrides)) == 0
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


@pytest.mark.parametrize(("variant", "number", "step", "hook"), [
    ("plain", signal.SIGINT, 0, "training_step"),
    ("plain", signal.SIGTERM, 3, "training_step"),  # a checkpoint at a validation
    ("plain", signal.SIGUSR1, 6, "training_step"),
    ("plain", signal.SIGTERM, 4, "validation_step"),  # in the middle of one
    ("plain", signal.SIGINT, 6, "validation_step"),  # where a checkpoint was due
    ("accumulated", signal.SIGTERM, 4, "training_step"),
    ("accumulated", signal.SIGINT, 2, "validation_step"),
    ("averaged", signal.SIGTERM, 4, "validation_step"),  # when the averages are in the place of the weights
])  # fmt: skip
def test_a_signal_stops_between_two_steps_and_resume_is_exact(
    variant: str, number: int, step: int, hook: str, corpus: Path, undisturbed: dict[str, Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run, before = tmp_path / "my [a] run", [signal.getsignal(one) for one in SIGNALS]
    draw(monkeypatch)
    original, sent = getattr(LanguageModeling, hook), []

    def interrupted(self: Any, *rest: Any) -> Any:
        if self.global_step == step and not sent:  # in the middle of the step after it
            sent.append(os.kill(os.getpid(), number))
        return original(self, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(LanguageModeling, hook, interrupted)
        assert train(eight(corpus, run, *VARIANTS[variant])) == 128 + number
    reached = step if hook == "validation_step" else step + 1
    said = capsys.readouterr().out
    assert f"stopped at step {reached} ({signal.Signals(number).name})" in said and f"train 'resume={run}'" in said
    assert steps(run)[0] == reached and not (run / LOCK).exists()
    assert [signal.getsignal(one) for one in SIGNALS] == before
    assert train(compose(f"resume={run}")) == 0
    found, wanted = read_checkpoint(run), read_checkpoint(undisturbed[variant])
    for name in wanted.keys() - {"metattt", "loops"}:  # weights, moments, schedules, generators, counts and curves
        assert_equal(found[name], wanted[name], name)
    assert log(run) == log(undisturbed[variant])


def test_averages_are_left_out_on_resuming(
    undisturbed: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on from its weights, not from their averages: to the end of a run that never had any."""
    draw(monkeypatch)
    began = undisturbed["averaged"] / "checkpoints" / "step-00000006"
    assert train(compose(f"resume={began}", f"output_dir={tmp_path / 'run'}", "+callbacks.average=null")) == 0
    found, wanted = (read_checkpoint(one)["state_dict"] for one in (tmp_path / "run", undisturbed["plain"]))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(("step", "kept"), [(2, []), (5, [3]), (8, [6, 3])])
def test_killed_and_resumed(
    step: int, kept: list[int], corpus: Path, undisturbed: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first checkpoint; later; after the last step. The same command may name what a file alone may not."""
    run = tmp_path / "run"
    draw(monkeypatch)
    command = eight(corpus, run, NO_BEST, "resume=auto", "+callbacks.own._target_=lightning.pytorch.callbacks.LambdaCallback")
    with monkeypatch.context() as patch:
        after_step(patch, step)
        with pytest.raises(Killed):
            train(command)
    assert steps(run) == kept
    if not kept:
        refusal(lambda: train(compose(f"resume={run}")), "has no checkpoint yet: start the run again with the same command")
    assert train(command if step != 5 else compose(f"resume={run}", "trust=lightning.pytorch.callbacks")) == 0
    assert log(run) == log(undisturbed["plain"]) and steps(run)[0] == 8
    found, wanted = (read_checkpoint(one)["state_dict"] for one in (run, undisturbed["plain"]))
    assert_equal(found, wanted, "state_dict")


def test_killed_between_the_last_checkpoint_and_the_last_validation(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    settings = ("trainer.val_check_interval=3",)  # not at the last step
    assert train(eight(corpus, whole, *settings)) == 0
    with monkeypatch.context() as patch:
        patch.setattr("lightning.Trainer.validate", kill)
        with pytest.raises(Killed):
            train(eight(corpus, run, *settings))
    assert steps(run)[0] == 8 and log(run) != log(whole)
    assert train(compose(f"resume={run}")) == 0  # it is complete but for that
    assert log(run) == log(whole) and "bits per byte" in capsys.readouterr().out
    assert train(eight(corpus, run, *settings, "resume=auto")) == 0
    assert "is complete at step 8: to train on, add trainer.max_steps" in capsys.readouterr().out
    refusal(lambda: train(compose(f"resume={run}")), "complete at step 8")
    assert log(run) == log(whole)


def validate_with(monkeypatch: pytest.MonkeyPatch, metric: str, *values: float) -> None:
    """Each validation logs the next of these."""
    coming, end = iter(values), LanguageModeling.on_validation_epoch_end

    def validated(self: Any) -> None:
        end(self)
        self.log(f"validation/{metric}", next(coming))

    monkeypatch.setattr(LanguageModeling, "on_validation_epoch_end", validated)


@pytest.mark.parametrize(("metric", "best"), [("made_up", 4), ("made_up_top1", 2)])  # the larger, of an accuracy
def test_the_last_ones_and_the_best_are_kept(
    metric: str, best: int, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (f"callbacks.checkpoint.best=validation/{metric}", "callbacks.checkpoint.every_steps=1")
    with monkeypatch.context() as patch:
        validate_with(patch, metric, 5.0, 2.0, 3.0, 4.0)  # at steps 2, 4, 6 and 8
        assert train(eight(corpus, tmp_path / "run", *settings)) == 0
    assert steps(tmp_path / "run") == [8, 7, best]
    resume = (f"resume={tmp_path / 'run'}", "trainer.max_steps=9", "callbacks.checkpoint.best=validation/loss")
    assert train(compose(*resume)) == 0
    assert steps(tmp_path / "run") == [9, 8]  # losses are not compared with what is another metric
    with pytest.raises(MetaTTTError, match=r"best=validation/nothing is not logged: .* logs .*validation/loss"):
        train(eight(corpus, tmp_path / "other", "callbacks.checkpoint.best=validation/nothing"))


def test_the_validation_after_the_last_step_counts_as_well(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # at steps 3, 6 and 8, where the run ends, and at 9 and 12 of the one that goes on
    validate_with(monkeypatch, "made_up", 5.0, 4.0, 1.0, 2.0, 3.0)
    settings = ("trainer.val_check_interval=3", "callbacks.checkpoint.best=validation/made_up", "callbacks.checkpoint.every_steps=1")
    assert train(eight(corpus, tmp_path / "run", *settings)) == 0
    assert train(compose(f"resume={tmp_path / 'run'}", "trainer.max_steps=12")) == 0
    assert steps(tmp_path / "run") == [12, 11, 8]


def test_minutes_count_as_well_as_steps(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minutes = iter(range(10_000))
    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: 60.0 * next(minutes)))
    settings = (NO_BEST, *(f"callbacks.checkpoint.{one}" for one in ("every_steps=null", "keep=9", "every_minutes=3")))
    assert train(eight(corpus, tmp_path / "run", *settings)) == 0
    assert steps(tmp_path / "run") == [8, 5, 2]  # the clock is asked once a step, and when one was written


# The folder of a run


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "copied"))


def content(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_folder_with_a_run_is_refused(corpus: Path, copied: Path) -> None:
    before = content(copied)
    words = ("holds a run: ", "resume=", "resume=auto", "overwrite=true", "another")
    refusal(lambda: train(eight(corpus, copied)), *words, lines=1)
    assert content(copied) == before
    (copied / "mine.txt").write_text("a note of the user's")
    (copied / "checkpoints" / "notes.txt").write_text("another")
    mine = copied / "checkpoints" / "step-00000001"  # in the pattern, and not ours
    mine.mkdir()
    anew = eight(corpus, copied, "overwrite=true", "trainer.max_steps=1")
    refusal(lambda: train(anew), "holds checkpoints/step-00000001, which does not belong to a run")
    mine.rename(copied / "mine")
    assert train(anew) == 0
    assert steps(copied) == [1] and (copied / "mine").is_dir()
    assert (copied / "mine.txt").is_file() and (copied / "checkpoints" / "notes.txt").is_file()
    assert {row["step"] for row in log(copied)} == {"1"}


@pytest.mark.parametrize(
    ("name", "kind"), [("metrics.csv", "file"), ("run.yaml", "file"), ("metrics.csv", "folder"), ("run.yaml", "link"),
                       ("loss_curve.png", "file")],
)  # fmt: skip
def test_what_is_not_ours_is_never_removed(name: str, kind: str, corpus: Path, tmp_path: Path) -> None:
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
        refusal(partial(train, eight(corpus, run, override)), name)
        assert mine.read_text() == "one,two\n1,2\n" and {file.name for file in run.iterdir()} == {name}


def test_one_run_at_a_time(corpus: Path, copied: Path) -> None:
    with locked(copied, "a training run"):
        for given in (eight(corpus, copied, "overwrite=true"), compose(f"resume={copied}", "trainer.max_steps=9")):
            refusal(partial(train, given), "is in use by process")
    assert train(compose(f"resume={copied}", "trainer.max_steps=9")) == 0  # the lock is given back, also after errors


def test_a_folder_below_home_is_written_as_in_other_commands(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert train(eight(corpus, Path("~/run"), "trainer.max_steps=1")) == 0
    assert steps(tmp_path / "home" / "run") == [1] and not (tmp_path / "~").exists()
    refusal(lambda: sweep("train", ["seed=0,1", "hydra.sweep.dir='~/run'"]), f"{tmp_path / 'home' / 'run'} holds a run")


def test_runs_that_begin_in_one_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("metattt.training.run.time.strftime", lambda _: "now")
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: new_folder("run"), range(8)))
    assert len(set(found)) == 8 and Path("runs/now-run") in found and Path("runs/now-run-8") in found


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
    refusal(lambda: train(compose(f"resume={copied}")), "no checkpoint of ", " can be used, of 2")
    assert steps(copied) == [8, 6]


def test_an_older_one_is_gone_on_from_only_if_it_is_said(copied: Path, finished: Path, tmp_path: Path) -> None:
    older = copied / "checkpoints" / "step-00000006"
    words = ("has later checkpoints than ", " up to step-00000008: ", "overwrite=true")
    refusal(lambda: train(compose(f"resume={older}")), *words, lines=1)
    assert steps(copied) == [8, 6]
    assert train(compose(f"resume={older}", f"output_dir={tmp_path / 'other'}")) == 0
    assert steps(tmp_path / "other") == [8] and steps(copied) == [8, 6]
    assert train(compose(f"resume={older}", "overwrite=true")) == 0
    assert steps(copied) == [8, 6] and log(copied) == log(finished)


@pytest.mark.parametrize(
    "wrong", [("data.path=/nowhere",), ("layer=ttt_mlp", "dim=30"), ("init_from=nowhere",), ("resume={older}", "data.path={other}")]
)
def test_nothing_is_removed_for_a_command_that_cannot_run(wrong: tuple[str, ...], corpus: Path, copied: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    shutil.copy(next(corpus.rglob("*.txt")), tmp_path / "other")
    places = {"older": copied / "checkpoints" / "step-00000006", "other": tmp_path / "other"}
    given = [one.format(**places) for one in wrong]
    before = content(copied)
    refusal(lambda: train(compose(*given, "overwrite=true") if "resume" in given[0] else eight(corpus, copied, "overwrite=true", *given)))
    assert content(copied) == before


def test_files_of_two_runs_stand_apart(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("step,train/loss\n1,2.0\n")
    for override, message in (
        (f"logger.csv.path={tmp_path / 'log.csv'}", "is the log of another run: give another path"),
        (f"logger.csv.path={corpus}", "is no log of a run: give another path"),  # it would be renamed, as /dev/null would
        (f"callbacks.checkpoint.folder={tmp_path}", "a run and its checkpoints have one folder"),
        ("callbacks.loss_curve.path=null", "callbacks.loss_curve.path= is not a path"),  # as soon as the run starts
        ("trainer.max_epochs=2", "a run is counted in steps, set trainer.max_steps="),
        ("trainer.limit_train_batches=3", "data.max_bytes="),
        ("trainer.limit_val_batches=3", "(shards, stream: data.validation_max_tokens)"),
    ):
        refusal(lambda override=override: train(eight(corpus, tmp_path / "run", override)), message)
    assert (tmp_path / "log.csv").read_text().endswith("1,2.0\n")


def test_a_trial_and_what_ends_by_time_go_on(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = partial(eight, corpus, tmp_path / "run", "resume=auto", "trainer.val_check_interval=00:01:00:00")
    assert train(command("+trainer.fast_dev_run=true")) == 0 and steps(tmp_path / "run") == []
    assert "\nbest " not in capsys.readouterr().out  # it is no run, and has no checkpoint
    with pytest.MonkeyPatch.context() as patch:
        after_step(patch, 4, lambda trainer, _: setattr(timer_of(trainer), "_offset", 60.0))
        assert train(command("+trainer.max_time=00:00:01:00")) == 0 and steps(tmp_path / "run")[0] == 4
    assert sum(bool(row["validation/loss"]) for row in log(tmp_path / "run")) == 1  # with its last step, and not again
    assert train(command("+trainer.max_time=00:00:01:00")) == 0 and steps(tmp_path / "run")[0] == 8


def test_a_step_that_the_end_of_the_time_cuts_in_two_begins_again(
    corpus: Path, undisturbed: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    draw(monkeypatch)
    with monkeypatch.context() as patch:
        step = LanguageModeling.training_step

        def last(self: Any, ids: Any, index: int) -> Any:
            if index == 10:  # the first batch of step 6
                timer_of(self.trainer)._offset = 60.0
            return step(self, ids, index)

        patch.setattr(LanguageModeling, "training_step", last)
        assert train(eight(corpus, run, *VARIANTS["accumulated"], "+trainer.max_time=00:00:01:00")) == 0
    assert steps(run)[0] == 5
    assert train(compose(f"resume={run}", "trainer.log_every_n_steps=1")) == 0
    drawn = column(undisturbed["accumulated"], "drawn")
    assert drawn and drawn.items() <= column(run, "drawn").items()


def test_validations_by_time_are_at_the_end_of_steps(corpus: Path, tmp_path: Path) -> None:
    settings = ("trainer.accumulate_grad_batches=2", "trainer.val_check_interval=00:00:00:00", "trainer.max_steps=3")
    assert train(tiny(corpus, tmp_path / "run", *settings)) == 0
    assert [row["step"] for row in log(tmp_path / "run") if row["validation/loss"]] == ["1", "2", "3"]


def timer_of(trainer: Any) -> Timer:
    return next(one for one in trainer.callbacks if isinstance(one, Timer))


def test_a_run_that_was_stopped_early_is_complete(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stop = {"_target_": "lightning.pytorch.callbacks.EarlyStopping", "monitor": "validation/loss", "stopping_threshold": 99.0}
    words = [f"+callbacks.stop.{key}={value}" for key, value in stop.items()]
    words += ["+callbacks.stop.check_on_train_epoch_end=false", "resume=auto"]
    for _ in range(2):
        assert train(eight(corpus, tmp_path / "run", *words)) == 0
    assert "is complete: it was stopped early at step 2; resume=" in capsys.readouterr().out
    assert steps(tmp_path / "run") == [2]


@pytest.mark.parametrize(("content", "kept"), [
    (b"", 0),
    (b"\x00\xff\xfe garbage \n\n,,,\n", 0),
    (b"step,train/loss\n1,2.0\nno number,3.0\n2,1.0\n", 2),
    (b"step,train/loss\n1,2.0\n2,1.0\n3", 2),  # a kill
])  # fmt: skip
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


def test_the_log_is_whole_whenever_it_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.csv"
    first = CSVLog(str(path))
    for step in range(1, 4):
        first.log_metrics({"train/loss": 1 / step}, step)
        assert len(path.read_text().splitlines()) == step + 1  # on its way without being asked
    first.log_metrics({"validation/loss": torch.tensor(0.5)}, 3)
    first.sync()
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", kill)
        with pytest.raises(Killed):
            first.log_metrics({"a_new_column": 1.0}, 4)
        assert path.read_bytes() == before
        with pytest.raises(Killed):
            CSVLog(str(path)).go_on_from(2)
    assert path.read_bytes() == before
    again = CSVLog(str(path))
    again.go_on_from(3, validate_again=True)
    assert [row["step"] for row in rows(path)] == ["1", "2", "3"]
    again.log_metrics({"another": 7}, 4)
    first_row, *_, last = rows(path)
    assert first_row["train/loss"] == "1.0" and last["another"] == "7" and last["train/loss"] == ""


# Disks


def test_a_full_disk_is_one_line_and_the_last_checkpoint_stays(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
            refusal(lambda: train(eight(corpus, run, NO_BEST)), "step-00000006", lines=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert steps(run) == [3]
    assert train(compose(f"resume={run}")) == 0 and steps(run) == [8, 6]
    assert not [file for file in (run / "checkpoints").iterdir() if ".part" in file.name]


def test_what_a_kill_left_half_written_is_removed_and_nothing_else(copied: Path) -> None:
    left = [copied / "metrics.csv.17.part", copied / "run.yaml.4.part"]
    kept = [copied / name for name in ("metrics.csv.part", "notes.17.part", "metrics.csv.17.parts")]
    for file in (*left, *kept):
        file.write_text("half")
    assert train(compose(f"resume={copied}", "trainer.max_steps=9")) == 0
    assert not any(file.exists() for file in left) and all(file.exists() for file in kept)


def test_a_renamed_checkpoint_is_not_gone_on_from(copied: Path, told: Callable[..., str]) -> None:
    """Steps are told by the names: as step 99 it was removed as newer than itself, and then missing."""
    folder = copied / "checkpoints"
    renamed = (folder / "step-00000008").rename(folder / "step-00000099")
    said = told("train", f"resume={copied}", "trainer.max_steps=9")
    assert "is of step 8, and was renamed: give it its name back, step-00000008" in said and renamed.is_dir()
