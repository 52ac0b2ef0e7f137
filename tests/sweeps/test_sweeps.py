"""Sweeps: runs in folders of their own, through every launcher, killed and continued; and the table of what came out."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from refusals_for_tests import refusal
from runs_for_tests import rows

from metattt.cli import main
from metattt.sweeps.record import LONGEST_NAME, STATUS, Status, folder_name, read_status, write_status
from metattt.sweeps.run import SweptRun
from metattt.sweeps.table import Run, _over_seeds, collect, tell

TINY = (
    "dim=8", "num_heads=2", "model.num_layers=1", "data.context_length=16", "data.batch_size=2", "trainer.accelerator=cpu",
    "data.path=a.txt", "data.validation_max_bytes=300", "sample=false", "~callbacks.loss_curve", "callbacks.checkpoint.every_steps=5",
    "callbacks.inner_health.every=0",
)  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def states(folder: Path) -> dict[str, str]:
    return {run.name: run.state for run in collect(folder)}


def table(folder: Path) -> list[dict[str, str]]:
    return rows(folder / "runs.csv")


# -- what runs ---------------------------------------------------------------------------------------------------------


def test_two_layers_and_two_seeds_killed_and_continued(here: Path) -> None:
    """With joblib, as the issue of every cluster: SIGKILL to the sweep while two runs are under way."""
    command = [sys.executable, "-m", "metattt", "train", "-m", *TINY, "trainer.max_steps=120", "seed=0,1"]
    command += ["layer=linear_attention,retnet", "trainer.val_check_interval=0.5", "hydra.sweep.dir=sweep"]
    command += ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    sweep = here / "sweep"
    with (here / "first.txt").open("w") as output:
        first = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    end = time.monotonic() + 240
    while not list(sweep.glob("*/checkpoints/step-*/*")) and time.monotonic() < end:
        assert first.poll() is None, (here / "first.txt").read_text()
        time.sleep(0.05)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    end = time.monotonic() + 60
    while any(state == "unfinished" for state in states(sweep).values()) and time.monotonic() < end:
        time.sleep(0.1)  # the runs notice, and write checkpoints
    before = states(sweep)
    assert 2 <= len(before) < 4 and "finished" not in before.values()
    assert "stopped" in before.values() and "unfinished" not in before.values()

    command = [word.replace("n_jobs=2", "n_jobs=1") for word in command]
    second = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert second.returncode == 0, second.stdout + second.stderr
    assert set(states(sweep).values()) == {"finished"}
    assert set(states(sweep)) == {f"layer={layer}+seed={seed}" for layer in ("linear_attention", "retnet") for seed in (0, 1)}
    found = table(sweep)
    assert sorted((row["layer"], row["seed"]) for row in found) == [
        ("linear_attention", "0"), ("linear_attention", "1"), ("retnet", "0"), ("retnet", "1"),
    ]  # fmt: skip
    values = [float(row["validation/bits_per_byte"]) for row in found]
    assert values == sorted(values) and len(set(values)) == 4 and all(row["step"] == "120" for row in found)
    stopped = next(name for name, state in before.items() if state == "stopped")
    steps = [row["step"] for row in rows(sweep / stopped / "metrics.csv") if row["train/loss"]]
    assert steps == sorted(set(steps), key=int) and steps[-1] == "120"  # went on: no row twice
    assert (sweep / "runs.png").read_bytes().startswith(b"\x89PNG")
    third = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert third.returncode == 0 and third.stdout.count("finished before") == 4
    assert "->" not in third.stdout.partition("\n")[2]


@pytest.mark.parametrize(("number", "code", "jobs"), [(signal.SIGINT, 130, 2), (signal.SIGINT, 130, 0), (signal.SIGTERM, 143, 0)])
def test_a_signal_waits_for_checkpoints(here: Path, number: int, code: int, jobs: int) -> None:
    """Joblib ends at Ctrl-C what its workers have started: the runs are asked first, and no further one begins. Without it,
    only the sweep gets the signal, as from a scheduler."""
    command = [sys.executable, "-m", "metattt", "train", "-m", *TINY, "trainer.max_steps=4000", "seed=0,1,2"]
    command += ["callbacks.checkpoint.every_steps=3000", "hydra.sweep.dir=sweep"]
    command += ["hydra/launcher=joblib", f"hydra.launcher.n_jobs={jobs}"] if jobs else []
    with (here / "said.txt").open("w") as output:
        sweep = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    end, count = time.monotonic() + 240, jobs or 1
    while len(list((here / "sweep").glob("*/metrics.csv"))) < count and time.monotonic() < end:
        assert sweep.poll() is None, (here / "said.txt").read_text()
        time.sleep(0.05)
    (os.killpg if jobs else os.kill)(sweep.pid, number)
    assert sweep.wait(120 if jobs else 30) == code
    assert states(here / "sweep") == {f"seed={seed}": "stopped" for seed in range(count)}
    assert len(list((here / "sweep").glob("*/checkpoints/step-*/checkpoint.json"))) == count
    assert not list((here / "sweep").glob(".*"))


def test_a_cell_that_fails_does_not_stop_the_others(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "my_learner.py").write_text(
        "from metattt.learners import Learner, Weight\n"
        "class Mine(Learner):\n"
        "    def weights(self, d_in, d_out):\n        return {'w': Weight((d_in, d_out))}\n"
        "    def forward(self, w, x):\n        return w.linear(x, 'w')\n"
    )
    own = ("learner=custom", "learner._target_=my_learner.Mine", "layer=custom")
    command = ["train", "-m", *TINY, *own, "trainer.max_steps=2", "hydra.sweep.dir=sweep"]
    assert main([*command, "data.context_length=100000,16"]) == 1  # TINY names one, too: the last counts
    out = capsys.readouterr().out
    assert states(here / "sweep") == {"data.context_length=100000": "failed", "data.context_length=16": "finished"}
    status = read_status(here / "sweep" / "data.context_length=100000")
    assert status is not None and "100000" in status.message and status.message in out
    assert "not finished: the same command with hydra.sweep.dir=sweep resumes it" in out
    assert main([*command, "data.context_length=16,8"]) == 1  # the grid has grown; one is as it was
    out = capsys.readouterr().out
    assert "data.context_length=16: finished before" in out and "data.context_length=8 finished in" in out
    assert len(states(here / "sweep")) == 3
    # it is a run like any other, and is resumed by itself
    assert main(["train", "resume=sweep/data.context_length=16", "trainer.max_steps=3", "trust=my_learner"]) == 0
    assert main([*command, "trainer.max_steps=9", "data.context_length=16"]) == 2
    assert "with trainer.max_steps=2 and without trainer.max_steps=9" in capsys.readouterr().err.replace("\n", " ")


def test_an_optimiser_goes_on_where_it_was(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "-m", *TINY, "trainer.max_steps=2", "training.lr=interval(0.001,0.1)", "hydra/sweeper=optuna"]
    command += ["hydra.sweeper.n_jobs=1", "hydra.sweep.dir=sweep", "layer=linear_attention"]
    assert main([*command, "hydra.sweeper.n_trials=2"]) == 0
    first = set(states(here / "sweep"))
    assert len(first) == 2 and all(name.startswith("training.lr=0.0") for name in first)
    assert main([*command, "hydra.sweeper.n_trials=3"]) == 0
    assert capsys.readouterr().out.count("finished before") == 2
    assert first < set(states(here / "sweep")) and len(states(here / "sweep")) == 3
    best = OmegaConf.load(here / "sweep" / "optimization_results.yaml")
    assert best.best_value == pytest.approx(float(table(here / "sweep")[0]["validation/loss"]), rel=1e-6)
    assert main([*command, "hydra.sweeper.n_trials=1", "objective=validation/bits_per_byte"]) == 0  # another changes no run
    assert main([*command, "hydra.sweeper.n_trials=1", "hydra.sweep.dir=none", "data.path=none.txt"]) == 1
    assert "none.txt does not exist" in capsys.readouterr().out  # every run failed: the line of each says why


def test_a_finished_run_without_a_value_is_failed(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Optuna takes an exception for a run that failed, and NaN for the end of the sweep."""
    make(here / "a", [(5, "nan")], column="validation/loss", swept=["seed=1"])
    known = SimpleNamespace(runtime=SimpleNamespace(output_dir="a"), overrides=SimpleNamespace(task=["++seed=1"]))
    monkeypatch.setattr("metattt.sweeps.run.HydraConfig.get", lambda: known)
    write_status(here / "a", Status(["++seed=1"], ["metattt train"], "finished"))
    run = partial(SweptRun, "train", [], [], True, "validation/loss", sweeper=os.getpid())
    refusal(lambda: run(raises=True)(OmegaConf.create()), "a has no validation/loss for the sweeper")
    assert math.isnan(run(raises=False)(OmegaConf.create()))
    assert "run     seed=1: finished before\n" in capsys.readouterr().out  # as it was typed


# -- what is refused, before anything runs -----------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "expected"), [
    ("layer=ttt_mlp,ttt_mpl", "`ttt_mpl` is not a choice of layer. Did you mean `layer=ttt_mlp`?"),
    ("layer=glob(zz*)", "fits none of the choices of layer: atlas, attention, "),
    ("seed=range(1,0)", "`seed=range(1,0)` is an empty range"),
    ("seed=interval(0,1)", "add hydra/sweeper=optuna, or name values, seed=a,b"),
    ("output_dir=x", "have folders of their own in hydra.sweep.dir=<folder>"),
    ("hydra/sweeper=ax", "`ax` is not a choice of hydra/sweeper"),
    pytest.param("hydra/launcher=joblib hydra.launcher.njobs=2", "Did you mean `hydra.launcher.n_jobs`?", marks=pytest.mark.slow),
    pytest.param(
        "hydra/sweeper=optuna hydra.sweeper.direction=[minimize,maximize]", "is not allowed: choose from minimize, maximize",
        marks=pytest.mark.slow,
    ),
    ("hydra.sweep.dir=run", "hydra.sweep.dir=run holds a run: choose another folder"),
])  # fmt: skip
def test_mistakes(here: Path, words: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "run").mkdir()
    (here / "run" / "run.yaml").touch()
    assert main(["train", "-m", *words.split()]) == 2
    captured = capsys.readouterr()
    assert expected in captured.err and captured.err.count("\n") <= 2 and captured.out == ""
    assert not (here / "multirun").exists()


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, told: Callable[..., str]) -> None:
    monkeypatch.setitem(sys.modules, "hydra_plugins.hydra_joblib_launcher", None)
    said = "needs hydra-joblib-launcher, which is not installed: pip install 'metattt[sweep]'\n"
    assert told("train", "-m", "seed=0,1", "hydra/launcher=joblib") == f"error: hydra/launcher=joblib {said}"


# -- records and names -------------------------------------------------------------------------------------------------


def test_names_of_folders() -> None:
    assert folder_name("layer=ttt_mlp+seed=0") == "layer=ttt_mlp+seed=0"
    assert folder_name("data.path='a.txt'") == "data.path=a.txt"
    assert folder_name("++learner.width=2+seed=0") == "learner.width=2+seed=0" == folder_name("learner.width=2+++seed=0")
    names = [folder_name(f"data.path='{path}'") for path in ("/a/b", "/a_b", "a/b", "../a", "é b")]
    assert len(set(names)) == 5 and not any("/" in name for name in names)
    long = [folder_name("x=" + "1" * 300 + str(number)) for number in range(2)]
    assert len(set(long)) == 2 and all(len(name) <= LONGEST_NAME for name in long)
    wide = [folder_name("prompt=" + "漢" * 100 + str(number)) for number in range(2)]  # three bytes each
    assert all(len(name.encode()) <= 255 for name in wide) and len(set(wide)) == 2
    assert folder_name(kept := "prompt=" + "漢" * 82) == kept  # 253 bytes
    assert folder_name("") == "run"


def test_records_are_read_back_and_damaged_ones_refused(tmp_path: Path) -> None:
    status = Status(["seed=0"], ["dim=8"], "failed", "why", 1.5)
    assert read_status(tmp_path) is None
    write_status(tmp_path, status)
    assert read_status(tmp_path) == status
    good = json.loads((tmp_path / STATUS).read_text())
    others: list[dict[str, object]] = [{"version": 2}, {"more": 2}, {"swept": 5}, {"fixed": [1]}, {"seconds": "long"}]
    for damaged in ("", "[]", "{", *(json.dumps(good | other) for other in others)):
        (tmp_path / STATUS).write_text(damaged)
        refusal(lambda: read_status(tmp_path), STATUS)


# -- the table ---------------------------------------------------------------------------------------------------------


def make(folder: Path, rows: list[tuple[int, Any]], column: str = "validation/bits_per_byte", **status: Any) -> None:
    folder.mkdir(parents=True)
    lines = [f"step,train/loss,{column}", "1,9.5,", *(f"{step},,{value}" for step, value in rows)]
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    if status:
        write_status(folder, Status(status["swept"], [], status.get("state", "finished"), status.get("message", "")))


def test_the_table_is_sorted_and_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "a", [(5, 1.0), (10, 3.0)], swept=["layer=[/a,/b]", "seed=0"])
    make(tmp_path / "b", [(5, 4.0), (10, 2.0)], swept=["layer=[b,c]", "seed=0"])
    make(tmp_path / "c", [(5, 1.5), (10, "nan")], swept=["layer=[/a,/b]", "seed=1"])
    make(tmp_path / "d", [], swept=["layer=[b,c]", "seed=1"], state="failed", message="it broke")
    make(tmp_path / "e", [(10, 2.5)], swept=["layer=[b,c]", "seed=2"])
    make(tmp_path / "f", [(1, 0.1)], swept=["layer=[b,c]", "seed=3"], state="failed")  # an early value is no result
    assert tell(tmp_path) == 2
    rows = table(tmp_path)
    assert [(row["layer"], row["seed"]) for row in rows[:3]] == [("[b,c]", "0"), ("[b,c]", "2"), ("[/a,/b]", "0")]
    assert [float(row["validation/bits_per_byte"]) for row in rows[:3]] == [2.0, 2.5, 3.0]  # the last, not the best
    assert {row["state"] for row in rows[3:]} == {"finished", "failed"}
    out = capsys.readouterr().out
    assert "d: failed: it broke" in out and "deviation" in out and "[/a,/b]" in out and "[b,c]" in out
    text = (tmp_path / "runs.md").read_text()
    assert "| layer | seed | state | step | validation/bits_per_byte |" in text and "| [b,c] | 2.2500 | 0.3536 | 2 |" in text
    assert (tmp_path / "runs.png").stat().st_size > 5000
    for name, value in (("FORCE_COLOR", "1"), ("COLUMNS", "50")):  # a narrow terminal
        monkeypatch.setenv(name, value)
    assert tell(tmp_path, "train/loss") == 2
    narrow = capsys.readouterr().out
    assert "terminal: bits_per_byte\n" in narrow and "9.5000" in narrow and "…" not in narrow


def test_any_folder_of_runs(tmp_path: Path, told: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "runs" / "first", [(3, 0.5)], "validation/top1")
    make(tmp_path / "red" / "\x1b[31m", [(3, 0.5)], "validation/\x9b", swept=["\x07=\x07"], message="\x1b]0;")
    make(tmp_path / "runs" / "later" / "second", [(3, 0.75)], "validation/top1")
    (tmp_path / "runs" / "first" / "checkpoints").mkdir()
    (tmp_path / "runs" / "runs.png").symlink_to(tmp_path / "elsewhere")
    assert main(["runs", str(tmp_path / "red")]) == 0 and not {"\x1b", "\x9b", "\x07"} & set(capsys.readouterr().out)
    assert not {"\x1b", "\x9b"} & set((tmp_path / "red" / "runs.md").read_text())
    assert "no checkpoint: a\\x1b[31m does not exist" in told("eval", "checkpoint=a\x1b[31m")
    assert main(["runs", str(tmp_path / "runs")]) == 0 and "damaged" not in capsys.readouterr().out
    assert [row["run"] for row in table(tmp_path / "runs")] == ["later/second", "first"]  # the larger is better
    assert main(["runs", str(tmp_path / "runs"), "descending=false", f"output_dir={tmp_path / 'out'}"]) == 0
    assert [row["run"] for row in table(tmp_path / "out")] == ["first", "later/second"]
    assert main(["runs", str(tmp_path / "runs"), "sort=train/loss"]) == 0 and not (tmp_path / "elsewhere").exists()
    (tmp_path / "runs" / "first" / "metrics.csv").write_text("\0\0\n")
    assert tell(tmp_path / "runs") == 0 and "\nfirst: metrics.csv is damaged (its first line " in capsys.readouterr().out
    for row, better in enumerate((10.0, 20.0)):
        make(tmp_path / "views" / str(row), [(3, better)], "validation/psnr_4")
    assert tell(tmp_path / "views") == 0 and [one["run"] for one in table(tmp_path / "views")] == ["1", "0"]
    for words, expected in (
        ([], "metattt runs <folder"), ([str(tmp_path / "nowhere")], "is not a folder"), ([str(tmp_path / "out")], "holds no runs"),
        ([str(tmp_path / "runs"), "sort=loss"], "sort=loss is not allowed: choose from validation/top1, train/loss."),
    ):  # fmt: skip
        assert expected in told("runs", *words)


def test_differences_are_paired_by_seed() -> None:
    """What a seed does to all variants is not in them."""
    cells = [("a", "0", 1.0), ("b", "0", 1.1), ("a", "1", 2.0), ("b", "1", 2.3), ("b", "2", 9.0), ("c", "5", 4.0)]
    found = [Run(f"{x}{s}", "finished", {"layer": x, "seed": s}, [{"step": "1", "validation/loss": str(v)}]) for x, s, v in cells]
    rows = _over_seeds(found, ["layer", "seed"], "validation/loss")
    assert [row["difference to the first, by seed"] for row in rows] == ["", "", "+0.2000 ± 0.1414"]
    assert [row["layer"] for row in rows] == ["a", "c", "b"]  # by their means, not by their luckiest seeds
    small = [run._replace(rows=[{"step": "1", "validation/loss": "2.5e-05"}]) for run in found[:1]]
    assert [*_over_seeds(small, ["seed"], "validation/loss")[0].values()] == ["2.5e-05", "", "1"]  # seeds alone: no difference
    assert _over_seeds([*found, Run("d", "finished", {"layer": "a"}, found[0].rows)], ["layer", "seed"], "validation/loss") == rows
    lost = [run._replace(rows=[{"step": "1", "validation/loss": "inf"}]) for run in found[1:3]]  # diverged: not better for it
    rows = _over_seeds([found[0], *lost, found[3]], ["layer", "seed"], "validation/loss")
    assert [row["mean validation/loss"] for row in rows] == ["inf", "inf"]
    longer = found[0]._replace(fixed=("trainer.max_steps=10",))  # of another sweep in the same folder
    assert _over_seeds([*found, longer], ["layer", "seed"], "validation/loss") == []


def test_large_figures_have_no_exponent() -> None:
    run = Run("a", "", {}, [{"step": "1", "train/tokens_per_second": "12110.512"}])
    assert run.texts(["train/tokens_per_second"]) == ["12111"]
    assert run.texts(["train/tokens_per_second"], 8) == ["12110.512"]
