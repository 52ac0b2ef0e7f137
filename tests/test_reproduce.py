"""`metattt reproduce`: cells that run once, rows tuned on one text and scored on another, and what the report says."""

from __future__ import annotations

import csv
import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from metattt.cli import main
from metattt.composition.choices import choices
from metattt.composition.compose import compose
from metattt.composition.instantiate import instantiate_part
from metattt.errors import MetaTTTError
from metattt.reproduce import cells as cells_module
from metattt.reproduce.base import Claim, Row
from metattt.reproduce.cells import Cell, Result, Runner
from metattt.reproduce.compare import Comparison, bits_per_byte
from metattt.reproduce.curves import Bin, change, ranked
from metattt.reproduce.latency import _growth
from metattt.reproduce.progress import Progress
from metattt.reproduce.quality import Quality
from metattt.reproduce.report import Heading, Report, markdown
from metattt.reproduce.seeds import order, spread, steps_against
from metattt.sweeps.record import read_cell

CLAIMS = sorted(choices("claim"))


def claim_of(name: str) -> Claim:
    claim: Claim = instantiate_part(compose(f"claim={name}", job="reproduce"), "claim")
    return claim


# -- commands that take no time, in the place of real ones -------------------------------------------------------------


def command(name: str, words: Sequence[str], output: str) -> None:
    """Training that is best at lr=0.02, fails for `bad` and hangs for `slow`; an evaluation that knows its seed."""
    given = dict(word.partition("=")[::2] for word in words)
    folder = Path(given["output_dir"].strip("'"))
    with (folder / "runs.txt").open("a") as file:
        file.write(f"{name}\n")
    if given.get("layer") == "bad":
        Path(output).write_text("error: layer=bad is not a layer\n")
        sys.exit(2)
    if given.get("layer") == "slow":
        time.sleep(60)
    if name == "train":
        value = abs(math.log(float(given.get("training.lr", "1")) / 0.02))
        (folder / "metrics.csv").write_text(f"step,train/loss,validation/bits_per_byte\n1,9,\n1,,{value}\n")
        (folder / "seed").write_text(given["seed"])
    else:
        seed = int((Path(given["checkpoint"].strip("'")) / "seed").read_text())
        lines = f"a,1,4,40,{math.log(2) * (1 + seed)},0,{1 + seed}\na,5,8,40,{math.log(2) * (3 + seed)},0,{3 + seed}\n"
        (folder / "by_position.csv").write_text("model,first,last,tokens,loss,perplexity,bits_per_byte\n" + lines)


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    def start(name: str, module: str, words: Sequence[str], output: Path) -> multiprocessing.process.BaseProcess:
        process = multiprocessing.get_context("fork").Process(target=command, args=(name, words, str(output)))
        process.start()
        return process

    monkeypatch.setattr(cells_module, "start", start)
    return another(tmp_path)


def another(folder: Path, jobs: int = 2) -> Runner:
    return Runner(folder, jobs, Progress(9, jobs, 1.0))


class Plain(Comparison):
    def run(self, size, runner):  # type: ignore[no-untyped-def]
        return Report([], {}, [])


def plain(rows: dict[str, list[str]], **size: object) -> Plain:
    return Plain("title", "asked", rows, {"cpu": {"seeds": [0, 1, 2], **size}})


def runs(folder: Path) -> int:
    return sum(len(file.read_text().split()) for file in folder.rglob("runs.txt"))


def test_rows_are_tuned_with_one_seed_and_scored_with_all(runner: Runner) -> None:
    claim = plain({"a": ["layer=a"]}, learning_rates=[0.001, 0.02, 0.5], evaluate=["split=test"])
    size = claim.size("cpu")
    compared = claim.compare(size, runner)
    row = claim.rows(size)[0]
    assert compared.best(row) == 0.02 and not compared.at_the_edge()
    assert [(one.seed, one.learning_rate) for one in compared.scored] == [(0, 0.02), (1, 0.02), (2, 0.02)]
    assert len(runner.results) == claim.count(size) == 3 + 2 + 3 == runs(runner.folder)
    scores = [bits_per_byte(one.test) for one in compared.of(row) if one.test]
    assert scores == pytest.approx([2.0, 3.0, 4.0])


def test_finished_cells_are_not_run_again_and_changed_ones_are(runner: Runner) -> None:
    claim = plain({"a": ["layer=a"]}, evaluate=["split=test"])
    size = claim.size("cpu")
    claim.compare(size, runner)
    assert runs(runner.folder) == 6
    again = another(runner.folder)
    assert len(claim.compare(size, again).of(claim.rows(size)[0])) == 3 and runs(runner.folder) == 6
    changed = claim.size("cpu")._replace(overrides=("dim=8",))
    claim.compare(changed, another(runner.folder))
    assert runs(runner.folder) == 12


def test_a_cell_whose_configuration_has_changed_runs_again(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same overrides, but a file that they are composed of is another now: finished or not, nothing of it is kept."""
    claim = plain({"a": ["layer=ttt_mlp"]}, evaluate=["split=test"])
    size = claim.size("cpu")
    claim.compare(size, runner)
    claim.compare(size, another(runner.folder))
    assert runs(runner.folder) == 6
    for folder in runner.folder.iterdir():
        (folder / "old").touch()
    monkeypatch.setattr(cells_module, "compose", lambda *words, job: OmegaConf.create({"changed": [job, *words]}))
    again = another(runner.folder)
    claim.compare(size, again)
    assert runs(runner.folder) == 6 == len(again.results) and not list(runner.folder.rglob("old"))


@pytest.mark.parametrize("how", ["gone", "half", "junk"])
@pytest.mark.parametrize("file", ["metrics.csv", "eval-*/by_position.csv", "cell.json", "eval-*/cell.json"])
def test_a_cell_whose_files_are_damaged_is_named_and_runs_again(
    file: str, how: str, runner: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    claim = plain({"a": ["layer=a"]}, evaluate=["split=test"])
    size = claim.size("cpu")
    first = [bits_per_byte(one.test) for one in claim.compare(size, runner).scored if one.test]
    (target,) = [found for run in runner.folder.glob("*seed=1*") for found in run.glob(file)]
    content = target.read_bytes()
    if how == "gone":
        target.unlink()
    else:
        target.write_bytes(content[: len(content) // 2] if how == "half" else b"\x00\xff{")
    again = another(runner.folder)
    compared = claim.compare(size, again)
    assert [bits_per_byte(one.test) for one in compared.scored if one.test] == first and not compared.failures()
    assert f"{target} is not as it was written: run again" in capsys.readouterr().out.replace("\n", "")
    assert target.read_bytes().startswith(content[:9])


def test_a_cell_that_fails_stops_no_other_and_is_tried_again(runner: Runner) -> None:
    claim = plain({"bad": ["layer=bad"], "good": ["layer=good"]}, learning_rates=[0.01, 0.02], evaluate=["split=test"])
    size = claim.size("cpu")
    compared = claim.compare(size, runner)
    bad, good = claim.rows(size)
    assert len(compared.of(good)) == 3 and not compared.of(bad) and compared.best(bad) is None
    assert any("layer=bad is not a layer" in line for line in compared.failures())
    assert any("has not finished" in line for line in compared.failures())  # its evaluation
    before = runs(runner.folder)
    claim.compare(size, another(runner.folder))
    assert runs(runner.folder) == before + 2  # the two learning rates of the bad one


def test_a_cell_that_was_killed_runs_again_in_an_empty_folder(runner: Runner) -> None:
    train = Cell("a", "train", ("layer=a", "seed=0"))
    test = Cell("a test", "eval", ("split=test",), train)
    folder = runner.folder / test.place
    folder.mkdir(parents=True)
    cells_module.write_cell(folder, cells_module.Record(["split=test"], ["eval"], "running"))
    (folder / "by_position-2.csv").write_text("half")
    results = runner.run([test, train])  # the test waits for its run
    record = read_cell(folder)
    assert all(one.finished for one in results) and record is not None
    assert record.state == "finished" and record.swept == ["split=test"] and not (folder / "by_position-2.csv").exists()


def test_ctrl_c_stops_the_cells_and_says_so(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells_module, "GRACE_SECONDS", 0.1)
    cell = Cell("slow", "train", ("layer=slow", "seed=0"))
    monkeypatch.setattr(runner.progress, "look", lambda running: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        runner.run([cell])
    record = read_cell(runner.folder / cell.place)
    assert record is not None and record.state == "stopped" and not runner.results


def test_cells_with_other_overrides_have_other_folders() -> None:
    cells = [Cell("a", "train", ("x=1",)), Cell("a", "train", ("x=2",)), Cell("a", "train", ("x=1", "y=1"))]
    tests = [Cell("a test", "eval", ("split=test",), cell) for cell in cells]
    assert len({cell.place for cell in cells + tests}) == 6
    assert all(test.place.parent == cell.place for cell, test in zip(cells, tests, strict=True))


# -- what is said of figures -------------------------------------------------------------------------------------------


def test_an_order_is_one_that_every_seed_shows() -> None:
    assert order([1.0, 1.1], [1.2, 1.3]) == "better" == order([3.0], [2.0], lower_is_better=False)
    assert order([1.2, 1.3], [1.0, 1.1]) == "worse"
    assert order([1.0, 1.25], [1.2, 1.3]) == "within the spread" and order([], [1.0]) == "not known"
    assert spread([1.0, 2.0]) == "1.500 ± 0.707" and spread([1.0]) == "1.000" and spread([]) == "–"


def test_steps_are_told_as_they_came_out() -> None:
    reported = {"a": 16.0, "b": 15.0, "c": 15.0, "d": 14.0, "e": 13.0}
    values = {"a": [3.0, 3.1], "b": [2.0, 2.1], "c": [2.05, 2.0], "d": [2.5, 2.6], "e": []}
    told = "\n".join(steps_against(values, reported))
    assert "As in the paper, 2 of 4 steps: `a` → `b` (better); `b` → `c`" in told
    assert "Against the paper, 1 of 4 steps: `c` → `d` (worse)" in told and "Not known, for want of figures, 1 of 4" in told
    turned = "\n".join(steps_against({"a": [1.0], "b": [2.0]}, {"a": 60.0, "b": 70.0}, lower_is_better=False))
    assert turned.startswith("As in the paper, 1 of 1 steps")


def test_curves_are_told_as_they_came_out() -> None:
    curves = [[Bin(1, 4, 3.0), Bin(5, 8, 2.0 + seed)] for seed in (0.0, 0.1)]
    assert change(curves, 4, 8).startswith("falls (3.000 ± 0.000 to 2.050") and change(curves, 4, 16) == "not known"
    assert change([curves[0], [Bin(1, 4, 1.0), Bin(5, 8, 2.0)]], 4, 8).startswith("differs between seeds")
    assert ranked({"x": [2.0, 2.1], "y": [1.0, 1.1], "z": [2.05, 2.2]}).startswith("`y` 1.050 ± 0.071 < `x`")
    assert "≈ `z`" in ranked({"x": [2.0, 2.1], "y": [1.0, 1.1], "z": [2.05, 2.2]})
    assert _growth({"decoding": {"a": [(8, 2.0), (4, 1.0)]}}) == [
        "Decoding, time per token with 8 tokens over that with 4: `a` 2.00 times."
    ]


def test_the_report_names_what_failed() -> None:
    heading = Heading("x", "cpu", "Title", "asked", "metattt reproduce x size=cpu", 3, 90.0, 1)
    text = markdown(heading, Report(["seen"], {"t": [{"a": 1}]}, [], failed=["row: why"]), None)
    assert "- row: why" in text and "`metattt reproduce x size=cpu`" in text and "1.5 minutes" in text and "threads 1" in text


def test_quality_sorts_layers_and_names_those_far_behind(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metattt.reproduce.quality.parameters", lambda run: 7)
    monkeypatch.setattr("metattt.reproduce.quality.bits_per_byte", lambda test: {"gla": 2.0, "lact": 3.0}.get(layer(test), 2.5))

    def layer(test: Result) -> str:
        return test.cell.name.partition(" ")[0]

    rows = {"lact": ["layer=lact"], "linear": ["layer=linear"], "gla": ["layer=gla"], "bad": ["layer=bad"]}
    sizes = {"cpu": {"minutes": 1, "evaluate": ["split=test"], "seeds": [0, 1], "learning_rates": [1e-3, 2e-2]}}
    claim = Quality("Title", "asked", rows, sizes, baseline="linear")
    report = claim.run(claim.size("cpu"), runner)
    (table,) = report.tables.values()
    assert [row["layer"] for row in table] == ["`gla`", "`linear`", "`lact`"]
    assert [row["times linear"] for row in table] == ["0.800", "1.000", "1.200"] and table[0]["learning rate"] == "0.02"
    assert "More than 10% behind `linear`: `lact` (1.200 times)." in report.seen
    assert "Without a figure, at no learning rate: `bad`." in report.seen
    assert report.failed[0].endswith("layer=bad is not a layer")
    with pytest.raises(MetaTTTError, match="baseline=nope"):
        Quality("Title", "asked", rows, sizes, baseline="nope")


# -- the claims that there are -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CLAIMS)
def test_every_row_composes_and_is_not_reported_on_what_it_was_chosen_on(name: str) -> None:
    claim = claim_of(name)
    two_cores = math.inf if name == "quality" else 2 * 30  # minutes; quality is no paper's claim, and has all layers
    one_gpu = 8 * 10 if name in ("recall", "in_context") else 10  # of these it takes eight small models at a time
    for most, size in zip((2, two_cores, one_gpu), map(claim.size, ("smoke", "cpu", "gpu")), strict=True):
        rows = claim.rows(size)
        assert claim.count(size) >= len(rows) and 0 < size.minutes <= most
        if not isinstance(claim, Comparison):
            continue
        assert size.name == "smoke" or len(size.seeds) >= 3
        for row in rows if size.name == "cpu" else ():
            cell = claim.training(size, row, 1, next(iter(size.learning_rates), None))
            data = compose(*cell.overrides, job="train").data
            if str(data._target_).endswith("TextData"):  # one split for all seeds
                assert data.test_fraction > 0 and data.split_seed == 0 and data.seed == 1
                assert "split=test" in size.evaluate and claim.objective.startswith("validation/")


def test_a_claim_from_the_command_to_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "reproduce", "table1", "size=smoke", "claim.sizes.smoke.rows=[learnable_lr]", "claim.sizes.smoke.seeds=[1]",
        f"cells_dir={tmp_path / 'cells'}", f"output_dir={tmp_path / 'results'}",
    ]  # fmt: skip
    assert main(words) == 0
    assert "cell    2/2 learnable_lr lr=0.003 seed=1 test finished in" in capsys.readouterr().out
    folder = tmp_path / "results" / "table1"
    assert {file.name for file in folder.iterdir()} == {"smoke.md", "smoke.csv", "smoke.png"}
    text = (folder / "smoke.md").read_text()
    with (folder / "smoke.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["row"] for row in rows] == ["learnable_lr"] and 5 < float(rows[0]["test_bits_per_byte"]) < 9
    assert f"{float(rows[0]['test_bits_per_byte']):.3f}" in text and "arXiv 2407.04620" in text
    assert main(words) == 0 and "seed=1 test finished before, done" in capsys.readouterr().out
    assert (folder / "smoke.md").read_text() == text


def test_the_list_of_claims(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce"]) == 0
    output = capsys.readouterr().out
    assert all(f"\n{name} " in f"\n{output}" for name in CLAIMS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "nothing"),
        (["table1", "size=huge"], "size=huge is not allowed: choose from smoke, cpu, gpu"),
        (["table1", "jobs=0"], "jobs=0"),
        (["table1", "claim.sizes.cpu.seeds=[]"], "claim.sizes.cpu.seeds=[] is not allowed"),
        (["table1", "claim.sizes.cpu.seeds=[0,0]"], "all different"),
        (["table1", "size=smoke", "claim.sizes.smoke.rows=[nope]"], "nope"),
        (["table1", "claim.sizes.cpu.learning_rates=fast"], "learning_rates=fast is not allowed"),
        (["table1", "+claim.sizes.cpu.seed=[1]"], "seed"),
        (["table1", "claim.sizes.cpu.minutes=long"], "minutes=long is not a number"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [f"cells_dir={tmp_path / 'cells'}", f"output_dir={tmp_path / 'results'}"]
    assert main(["reproduce", *words, *folders]) == 2
    said = capsys.readouterr().err
    assert message in said and len(said.splitlines()) <= 2


def test_rows_need_overrides() -> None:
    with pytest.raises(MetaTTTError, match=r"claim\.rows\.a\.overrides=x is not allowed"):
        plain({"a": {"overrides": "x"}}).rows(plain({"a": []}).size("cpu"))  # type: ignore[dict-item]
    assert plain({"a": ["x=1"]}).rows(plain({"a": []}).size("cpu")) == [Row("a", ("x=1",), None)]
