"""The scripts of `benchmarks/` and `metattt bench`, at sizes that take seconds: what they check, write and skip."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import adapt
import claims
import gpu
import pytest
import report
import speed
import torch
from comparisons import jobs
from comparisons.comparison import Claim, Row, order, ranked, spread, steps_against
from comparisons.jobs import Job, Result, Runner
from comparisons.rows import rows
from refusals_for_tests import refusal
from report import markdown_table

from metattt import MetaTTTError, bench, build
from metattt.cli import main
from metattt.composition.compose import compose
from metattt.kernels.cpu.native_scan import NativeForm
from metattt.optimizers import GradientDescent

SMALL = {
    "layer": "layers=[ttt_linear,mttt_linear,attention] lengths=[32,64] dim=32 num_heads=2 rounds=1",
    "model": "overrides=[preset=tiny] layers=[ttt_linear,attention] lengths=[16,32] tokens=2 rounds=1 compile=false",
}


@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_checks_measures_and_writes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = report.environment()
    monkeypatch.setattr(report, "environment", lambda: here | {"device": "a card"})  # which this run does not use
    assert speed.main([name, *SMALL[name].split(), "device=cpu", f"output_dir={tmp_path}"]) == 0
    content = json.loads((tmp_path / f"{name}.json").read_text())
    assert content["checks"] and all(one["error"] <= one["bound"] for one in content["checks"])
    assert all(content["tables"].values()) and content["environment"] == here | {"device": "cpu"}
    page = (tmp_path / f"{name}.md").read_text()
    assert all(f"## {title}" in page for title in content["tables"]) and "Checked before anything was timed" in page


@pytest.mark.parametrize(("words", "expected"), [
    (["nobody"], "benchmark=nobody is not allowed"),
    (["layer", "lengths=64"], "lengths: "),
    (["layer", "lengths=[0]"], "integers from 1 on"),
    (["model", "lengths=[31]"], "multiples of 16"),
    (["table1", "sizes.cpu.seeds=0"], "table1.yaml cannot be read at sizes.cpu.seeds"),
    (["table1", "sizes.cpu.seeds=[0,0]"], "sizes.cpu.seeds=[0, 0] is not allowed"),
    (["table1", "nobody=1"], "settings are size, jobs"),
    (["models=[a]", "texts=nowhere"], "texts=nowhere is not allowed: give a folder"),
])  # fmt: skip
def test_a_mistake_is_one_line(words: list[str], expected: str, tmp_path: Path) -> None:
    script = {"table1": claims, "models=[a]": adapt}.get(words[0], speed)
    refusal(lambda: script.main([*words, f"output_dir={tmp_path}"] if len(words) > 1 else words), expected)


# -- what is wrong is not timed ----------------------------------------------------------------------------------------


def test_a_wrong_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def off(self: Any, call: Any, forward: Any = NativeForm.forward) -> Any:
        found = forward(self, call)
        found[0].mul_(1.01)
        return found

    monkeypatch.setattr(NativeForm, "forward", off)
    with pytest.raises(MetaTTTError, match="nothing is reported: ttt_linear, fused and dual"):
        speed.main(["layer", *SMALL["layer"].split(), f"output_dir={tmp_path}"])
    assert not list(tmp_path.iterdir())
    with pytest.raises(SystemExit):
        main(["bench", "dim=64", "length=32", "rounds=1"])
    said = capsys.readouterr().out
    assert "FAIL" in said and "nothing is timed" in said and "one token" not in said


# -- metattt bench -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", [
    "layer=ttt_linear", "layer=mttt_linear", "layer=mamba2_mixer", "layer=vittt",
    "layer=custom learner=mlp optimizer.mini_batch_size=null",
])  # fmt: skip
def test_any_layer_is_checked_and_timed(chosen: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *chosen.split(), "dim=64", "length=36", "rounds=1"]) == 0
    said = capsys.readouterr().out
    assert "FAIL" not in said and "forward + backward" in said
    if chosen == "layer=ttt_linear":
        assert "dual and primal" in said and "fused and dual" in said and "one call and two" in said


def test_a_timed_backward_pass_reaches_the_tokens() -> None:
    layer, needs = build("ttt_linear", dim=16, num_heads=2), list[bool]()
    layer.register_forward_pre_hook(lambda _, given: needs.append(given[0].requires_grad))
    bench.times({"auto": layer}, 16, 1, 1, torch.device("cpu"))
    assert sum(needs) == 2  # the first warms up


class Forgets(GradientDescent):
    """Step sizes that grow from token to token, from 0 on in every call."""

    def gates(self, x: Any, state: Any, ctx: Any) -> Any:
        gates, state = super().gates(x, state, ctx)
        return gates._replace(eta=gates.eta * torch.arange(x.shape[1])), state


@pytest.mark.parametrize("size", [1, 256])
def test_what_a_benchmark_of_any_layer_checks(size: int, capsys: pytest.CaptureFixture[str]) -> None:
    forgets = f"layer=custom optimizer._target_={__name__}.Forgets optimizer=custom optimizer.mini_batch_size={size}"
    with pytest.raises(SystemExit):
        main(["bench", *forgets.split(), "dim=16", "num_heads=2", "length=8"])
    assert ("ends within the 203 checked" in capsys.readouterr().out) == (size == 256)


# -- claims ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(file.stem for file in claims.CONFIGS.glob("*.yaml")))
def test_every_row_composes_and_is_not_reported_on_what_it_was_chosen_on(name: str) -> None:
    for size in ("smoke", "cpu", "gpu"):
        claim = claims.read(name, size)[1]
        assert claim.rows and claim.minutes and (size == "smoke" or len(claim.seeds) >= 3)
        for row in claim.rows:
            for words in (claim.conditions or {"": []}).values():
                cfg = compose(*row.overrides, *words, *claim.overrides)
                assert cfg.data.get("test_fraction", 1) > 0 and "split=test" in claim.evaluate


def test_a_claim_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["table1", "size=smoke", "sizes.smoke.rows=[learnable_lr]", "sizes.smoke.seeds=[1]"]
    words.append(f"runs_dir={tmp_path / 'jobs'}")
    assert claims.main([*words, f"output_dir={tmp_path / 'first'}"]) == 0
    assert "job 2/2 learnable_lr lr=0.003 seed=1 test: finished in" in capsys.readouterr().out
    monkeypatch.setattr(jobs.subprocess, "Popen", None)
    assert claims.main([*words, f"output_dir={tmp_path / 'again'}"]) == 0
    assert "job 2/2 learnable_lr lr=0.003 seed=1 test: finished before" in capsys.readouterr().out
    first, again = ((tmp_path / name / "table1" / "smoke.csv").read_text() for name in ("first", "again"))
    assert first == again and "learnable_lr,1,0.003" in first
    told = (tmp_path / "first/table1/smoke.md").read_text()
    assert "python benchmarks/claims.py table1 size=smoke 'sizes.smoke.rows=[learnable_lr]'" in told


def test_a_cell_runs_again_if_it_failed_or_its_configuration_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    began: list[str] = []

    class Process:
        """A job in this process: training succeeds unless it is told not to."""

        def __init__(self, words: Sequence[str], stdout: Any, **_: Any):
            began.append(words[4])
            self.code = int("fail=true" in words)
            stdout.write("Traceback\nerror: it fails\n")

        def wait(self) -> int:
            return self.code

    monkeypatch.setattr(jobs.subprocess, "Popen", Process)
    monkeypatch.setattr(Job, "composed", "one")
    good, bad = Job("good", "train", ("dim=8",)), Job("bad", "train", ("fail=true",))
    both = [good, bad, Job("bad test", "eval", ("split=test",), bad)]
    found = Runner(tmp_path, 1, 3, said.append).run(both)
    assert [one.finished for one in found] == [True, False, False]
    assert found[1].message == "exit code 1: error: it fails"
    assert found[2].message == "bad has not finished" and began == ["train", "train"]
    Runner(tmp_path, 1, 3, said.append).run(both)
    assert began == ["train"] * 3 and said[3] == "job 1/3 good: finished before"
    monkeypatch.setattr(Job, "composed", "another")
    Runner(tmp_path, 1, 1, said.append).run([good])
    assert began == ["train"] * 4
    record = tmp_path / bad.place / jobs.RECORD
    record.write_text(json.dumps({"composed": "another", "spent": 100.0}))  # of a try that was stopped
    assert Runner(tmp_path, 1, 1, said.append).run([bad])[0].seconds >= 100 and json.loads(record.read_text())["spent"] >= 100
    assert Job("a", "train", ("dim=8",)).place != Job("a", "train", ("dim=16",)).place
    monkeypatch.undo()  # what its words made stays where they cannot be composed any more
    wrong = Job("wrong", "train", ("nobody=1",))
    kept = tmp_path / wrong.place / "kept"
    kept.mkdir(parents=True)
    assert "nobody" in Runner(tmp_path, 1, 1, said.append).run([wrong])[0].message and kept.is_dir()


class Canned(Runner):
    """In the place of the processes: every job is finished, with the files that `files` makes of it; without any it has failed."""

    def __init__(self, folder: Path, files: Callable[[Job], dict[str, str]]):
        super().__init__(folder, 1, 0, lambda line: None)
        self.files, self.asked = files, list[Job]()

    def run(self, jobs: Sequence[Job]) -> list[Result]:
        self.asked += jobs
        found = []
        for job in jobs:
            folder, files = self.folder / job.place, self.files(job)
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (folder / name).write_text(text)
            found.append(Result(job, folder, bool(files), "" if files else "no such layer", 1.0))
        return found


def test_rows_are_sorted_compared_with_a_baseline_and_failures_named(tmp_path: Path) -> None:
    chosen = [Row(name, (f"layer={name}",), None) for name in ("lact", "linear", "half", "gla", "bad")]
    options = {"best_first": True, "baseline": "linear", "behind": 1.1}
    claim = Claim(
        name="x", size="cpu", title="Title", asked="asked", rows=chosen, evaluate=["split=test"], seeds=[0, 1],
        learning_rates=[1e-3, 2e-2], options=options,
    )  # fmt: skip
    scores = {"gla": 2.0, "linear": 2.5, "lact": 3.0, "half": 1.0}  # half: the best, but for a seed that has failed

    def files(job: Job) -> dict[str, str]:
        score = scores.get(job.name.partition(" ")[0]) if job.name[:4] != "half" or "seed=0" in job.name else None
        log = f"step,train/loss,validation/bits_per_byte\n1,,{score}\n"
        return {"metrics.csv": log, "by_position.csv": f"first,last,tokens,loss,bits_per_byte\n1,4,4,1.0,{score}\n"} if score else {}

    report = rows(claim, Canned(tmp_path, files))
    (table,) = report.tables.values()
    assert [row["row"] for row in table] == ["`gla`", "`linear`", "`lact`", "`half`", "`bad`"]
    assert [row["times linear"] for row in table] == ["0.800", "1.000", "1.200", "nan", "–"]
    assert "More than 10% behind `linear`: `lact` (1.200 times)." in report.text and "`bad`" in report.text
    assert any("did not finish: no such layer" in line for line in report.notes) and len(report.records) == 8


def test_orders_are_told_as_they_came_out() -> None:
    assert order([1.0, 1.1], [1.2, 1.3]) == "better" == order([3.0, 4.0], [2.0, 1.0], lower_is_better=False)
    assert order([1.2, 1.3], [1.0, 1.1]) == "worse" and order([math.nan, 3.0], [1.0, 2.0]) == "worse"
    assert order([1.0, 1.25], [1.2, 1.3]) == "within the spread" == order([1.0, math.nan], [1.2, 1.3])
    assert order([], [1.0]) == "not known" == order([1.0], [2.0])  # one seed tells nothing
    assert spread([1.0, 2.0]) == "1.500 ± 0.707" and spread([1.0]) == "1.000" and spread([]) == "–"
    assert ranked({"x": [math.nan, 1.0], "y": [2.0, 3.0], "z": [1.0]}) == "`z` 1.000, `y` 2.500 ± 0.707 ≈ `x` nan ± nan"
    reported = {"a": 16.0, "b": 15.0, "c": 15.0, "d": 14.0, "e": 13.0}
    values = {"a": [3.0, 3.1], "b": [2.0, 2.1], "c": [2.05, 2.0], "d": [2.5, 2.6], "e": []}
    told = "\n".join(steps_against(values, reported))
    assert "As in the paper, 2 of 4 steps: `a` → `b` (better); `b` → `c`" in told
    assert "Against the paper, 1 of 4 steps: `c` → `d` (worse)" in told
    assert "Not known, for want of figures, 1 of 4" in told
    assert ranked({"x": [2.0, 2.1], "y": [1.0, 1.1], "z": [2.05, 2.2]}) == "`y` 1.050 ± 0.071 < `x` 2.050 ± 0.071 ≈ `z` 2.125 ± 0.106"


def test_cells_of_a_table() -> None:
    assert bench._told([1.2344, 0.01, 0.9997]) == "1,000 (10 to 1,234)"
    lines = markdown_table([{"a": 999.7, "b": True, "c": 2}, {"a": None, "b": False, "c": 12345.6}])
    assert lines[2:] == ["| 1000 | True | 2 |", "| – | False | 12346 |"]


# -- the script for a GPU ----------------------------------------------------------------------------------------------


def test_a_crash_costs_one_line_and_what_is_there_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points: list[gpu.Point] = [("time", "a", {"length": n}) for n in range(4)]
    asked: list[list[int]] = []

    def run(words: list[str], **_: Any) -> Any:
        todo = json.loads(words[-1])
        asked.append([point[2]["length"] for point in todo])
        if todo[0][2]["length"] == 2:
            return SimpleNamespace(returncode=-11, stdout="", stderr="Segmentation fault\n")
        if len(asked) == 1:  # it dies after its second result
            return SimpleNamespace(returncode=1, stdout="".join(line(one) for one in todo[:2]), stderr="")
        raise subprocess.TimeoutExpired(words, 1, output=line(todo[0]).encode())

    def line(point: list[Any]) -> str:
        found = dict(zip(("kind", "subject", "case"), point, strict=True)) | {"found": {"ms, median": 1.0}}
        return json.dumps(found) + "\n"

    monkeypatch.setattr(gpu.subprocess, "run", run)
    file = tmp_path / "results.jsonl"
    gpu.Results(file).take(points, gpu.Settings(), 1e12)
    assert asked == [[0, 1, 2, 3], [2, 3], [3]]
    lines = [json.loads(one) for one in file.read_text().splitlines()]
    assert ["failed" in one for one in lines] == [False, False, True, False] and "Segmentation" in lines[2]["failed"]
    file.write_text(file.read_text() + '{"kind": "ti')  # the machine went away
    gpu.Results(file).take(points, gpu.Settings(), 1e12)
    assert len(asked) == 3
    gpu.Results(file).take(points, gpu.Settings(retry=True), 1e12)
    assert asked[3] == [2]
    monkeypatch.setattr(gpu.subprocess, "run", lambda words, **_: SimpleNamespace(
        returncode=0, stdout=line(json.loads(words[-1])[0]), stderr=""))  # fmt: skip
    gpu.Results(file).take(points, gpu.Settings(retry=True), 1e12)
    assert [one["found"] for one in gpu.Results(file).lines] == [{"ms, median": 1.0}] * 4  # nothing of the first try is left


def test_the_interpreter_says_cpu_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu, "environment", lambda: {"device": "a GPU"})
    monkeypatch.setattr(gpu, "measure", lambda *point: {})
    for device, said in (("cpu", "cpu"), ("cuda", "a GPU")):
        gpu.measuring(device, [("time", "ttt_linear", {})])
        assert json.loads(capsys.readouterr().out)["on"] == {"device": said}


def test_the_stages_run_in_the_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    small = "device=cpu tokens=16 lengths=[16] num_heads=[1] head_dim=32 dtype=float32 decode_batch=2 programs=[1]"
    words = [*small.split(), "operations=[ttt_linear]"]
    words += ["peers=['torch attention','fla delta_rule']", f"output_dir={tmp_path}", "parallel=1"]
    for stage in ("correctness", "times", "peers"):
        assert gpu.main([stage, *words]) == 0
    tables = json.loads((tmp_path / "gpu/interpreter/report.json").read_text())["tables"]
    assert {row["passed"] for row in (*tables["check"], *tables["decode check"])} == {True}
    assert {"ttt_linear", "torch attention"} <= {row["subject"] for row in tables["time"]} and tables["decode"]
    monkeypatch.setattr(report, "environment", lambda: {"device": "another", "torch": "0.1"})  # of the machine that makes the page
    assert gpu.main(["report", "card=interpreter", f"output_dir={tmp_path}"]) == 0
    assert "another" not in (page := (tmp_path / "gpu/interpreter/report.md").read_text()) and f"torch {torch.__version__}" in page
