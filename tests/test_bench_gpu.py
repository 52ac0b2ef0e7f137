"""`metattt bench gpu` loses nothing that was finished, whatever fails: planted operations in real processes, without a
GPU."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from metattt.bench.gpu import benchmark, child, ledger, origin
from metattt.bench.gpu.ledger import Ledger
from metattt.bench.gpu.processes import Ended, in_words, run
from metattt.bench.report import Report
from metattt.cli import main
from metattt.locking import FolderLock

PLANTED = "gpu_bench_for_tests"
FORK = multiprocessing.get_context("fork")  # torch is not imported again


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PLANTED", str(tmp_path / "planted"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr(Report, "no_picture", "no picture is drawn")


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs in this process: what is tested is not how processes end."""

    def here(command: Any, given: Any, **_: Any) -> Ended:
        child.work(given)
        return Ended(0, None, "")

    monkeypatch.setattr(benchmark, "run", here)


def words(folder: Path, stage: str, *names: str, **settings: Any) -> list[str]:
    """The command line: operations in the stages `correctness` and `tuning`, peers in `peers`."""
    subjects = json.dumps([f"{PLANTED}:{name}" for name in names])
    given = {"tokens": 64, "lengths": [16, 32], "num_heads": [2], "programs": [4], "device": "cpu", "stage": stage, "parallel": 1}
    given |= {"peers" if stage == "peers" else "operations": subjects, "limit": 60} | settings
    return ["bench", "gpu", *(f"benchmark.{name}={value}" for name, value in given.items()), f"output_dir={folder}"]


def bench(folder: Path, stage: str, *names: str, code: int = 0, **settings: Any) -> dict[str, Any]:
    """Calls the benchmark, and returns what it has written as JSON."""
    assert main(words(folder, stage, *names, **settings)) == code
    found: dict[str, Any] = json.loads((folder / "gpu" / "interpreter" / "report.json").read_text())
    return found


def called(folder: Path) -> list[str]:
    """What was measured, in order, since the last look."""
    file = folder / "planted"
    lines = [line.split()[0] for line in file.read_text().splitlines()] if file.exists() else []
    file.unlink(missing_ok=True)
    return lines


def results(folder: Path) -> dict[str, dict[str, Any]]:
    _, lines, _ = Ledger(folder / "gpu" / "interpreter" / "results.jsonl").read()
    return {line["key"]: line for line in lines}


def reasons(folder: Path) -> list[str]:
    return [line["reason"] for line in results(folder).values() if line["state"] == "failed"]


TIMES = ["time_16_both", "time_16_forward", "time_32_both", "time_32_forward"]


# -- children that fail ------------------------------------------------------------------------------------------------


def test_a_check_that_raises_is_a_result_and_times_go_on_beside_it(tmp_path: Path) -> None:
    shape = {"head_dim": 32, "mini_batch_size": 16, "dtype": "float32"}  # that of the check that fails: it comes first
    report = bench(tmp_path, "correctness", "raising", "wrong", **shape)
    assert called(tmp_path) == ["check_18", "decode_check"] * 2 + ["check_9"] * 2
    assert reasons(tmp_path) == ["RuntimeError: the planted check"]
    rows = {(row["operation"], row["case"][:9]): row["passed"] for row in report["tables"]["Correctness"]}
    assert rows[f"{PLANTED}:wrong", "length=18"] == "NO" and rows[f"{PLANTED}:raising", "length=9 "] == "yes"
    assert "FAILED their checks: gpu_bench_for_tests:raising, gpu_bench_for_tests:wrong" in report["text"]
    assert [row["registers"] for row in report["tables"]["Kernels"]] == [255, 255]

    report = bench(tmp_path, "peers", "raising", "steady", **shape)
    checks = {(row["operation"].partition(":")[2], row["check"]) for row in report["tables"]["Sequences"]}
    assert checks == {("raising", "FAILED"), ("steady", "not checked")}
    assert len(report["tables"]["Sequences"]) == 8


def test_one_that_hangs_costs_itself_alone(tmp_path: Path) -> None:
    bench(tmp_path, "peers", "hanging", limit=4)
    assert called(tmp_path) == TIMES
    assert reasons(tmp_path) == ["past its limit of 4 s"] and len(results(tmp_path)) == 4


@pytest.mark.parametrize(("name", "reason"), [("killed", "killed by SIGKILL"), ("leaving", "its process ended with code 0")])
def test_a_process_that_dies_costs_the_point_that_it_was_at(tmp_path: Path, name: str, reason: str) -> None:
    report = bench(tmp_path, "peers", name)
    assert called(tmp_path) == TIMES and reasons(tmp_path) == [reason]
    assert [row["reason"] for row in report["tables"]["Not measured"]] == [reason]
    assert len(report["tables"]["Sequences"]) == 3

    bench(tmp_path, "peers", name)  # neither what is finished nor what has failed is taken again
    assert called(tmp_path) == []
    bench(tmp_path, "peers", name, retry="true")
    assert called(tmp_path) == TIMES[:1] and reasons(tmp_path) == [reason]


def test_a_job_whose_processes_all_die_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "CHILD", ["sh", "-c", "echo 'no such module' >&2; exit 1"])
    bench(tmp_path, "peers", "steady", lengths="[16, 32, 64]")
    died = "its process ended with code 1: no such module"
    assert reasons(tmp_path) == [died] * 3 + [f"not tried: 3 before it: {died}"] * 3


@pytest.mark.usefixtures("at_once")
def test_results_that_are_not_as_ours_do_not_cost_the_report(tmp_path: Path) -> None:
    bench(tmp_path, "peers", "steady")
    strange = ledger_line("variant", f"{PLANTED}:odd", {"variant": "forward: x"}), ledger_line("time", "odd", {"heads": "many"})
    for line in strange:
        Ledger(tmp_path / "gpu" / "interpreter" / "results.jsonl").append(line)
    report = bench(tmp_path, "peers", "steady")
    assert "the table Best launches could not be made: KeyError" in report["text"]
    assert len(report["tables"]["Sequences"]) == 5


def ledger_line(kind: str, subject: str, case: dict[str, Any]) -> dict[str, Any]:
    return ledger.done({"kind": kind, "subject": subject, "case": case}, {"ms, median": "odd"}, 1.0)


@pytest.mark.usefixtures("at_once")
def test_a_peer_that_does_not_import(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(tmp_path, "peers", peers='["nobody.has.this:peer", "gpu_bench_for_tests:steady"]')) == 0
    assert len(results(tmp_path)) == 8 and len(reasons(tmp_path)) == 4
    assert all("No module named 'nobody'" in reason for reason in reasons(tmp_path))
    assert capsys.readouterr().out.count("No module named 'nobody'") >= 4
    assert main(words(tmp_path, "peers", peers='["fla ttt_linear"]')) == 2
    assert "Did you mean" in capsys.readouterr().err
    assert main(words(tmp_path, "correctness", operations='["nobody.has.this:operation"]')) == 2
    assert "is no operation" in capsys.readouterr().err


def test_checks_at_once(tmp_path: Path) -> None:
    """Each process has its own clock: one that hangs is not kept alive by what the others finish."""
    report = bench(tmp_path, "correctness", "late", "steady", "raising", limit=4, parallel=3)
    assert sorted(called(tmp_path)) == sorted(["check_18", "check_9", "decode_check"] * 3)
    assert sorted(reasons(tmp_path)) == ["RuntimeError: the planted check", "past its limit of 4 s"]
    assert len(report["tables"]["Correctness"]) == 7


# -- parents that are stopped ------------------------------------------------------------------------------------------


def until(what: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def _in_a_process(arguments: list[str]) -> None:
    sys.exit(main(arguments))


@pytest.fixture
def at_work(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Starts a benchmark, and returns it when it is at a point that waits."""
    (tmp_path / "planted.wait").touch()
    started = []

    def start(at: str, *arguments: Any, **settings: Any) -> Any:
        process = FORK.Process(target=_in_a_process, args=(words(tmp_path, *arguments, **settings),))
        process.start()
        started.append(process)
        planted = tmp_path / "planted"
        until(lambda: planted.exists() and at in planted.read_text())
        return process

    yield start
    for process in started:
        process.kill()
        process.join()


def _is_there(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_benchmark_that_is_stopped_goes_on_where_it_was(tmp_path: Path, at_work: Any, number: signal.Signals) -> None:
    working = at_work("time_32_both", "peers", "waiting")
    measuring = int((tmp_path / "planted").read_text().split()[-1])
    os.kill(working.pid, number)
    working.join(30)
    assert working.exitcode == {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}[number]
    until(lambda: not _is_there(measuring), 10)  # no orphan is left on the card
    assert called(tmp_path) == TIMES[:3] and len(results(tmp_path)) == 2
    report = tmp_path / "gpu" / "interpreter" / "report.json"
    if number == signal.SIGKILL:
        assert not report.exists()
        assert main(words(tmp_path, "report")) == 0
    else:
        assert "stopped before the end" in report.read_text()
    assert len(json.loads(report.read_text())["tables"]["Sequences"]) == 2

    (tmp_path / "planted.wait").unlink()
    done = results(tmp_path)
    bench(tmp_path, "peers", "waiting")
    assert called(tmp_path) == TIMES[2:] and len(results(tmp_path)) == 4
    assert {key: results(tmp_path)[key] for key in done} == done


def test_a_benchmark_that_checks_at_once_is_stopped(tmp_path: Path, at_work: Any) -> None:
    working = at_work("decode_check", "correctness", "waiting", "waiting_too", parallel=2)
    until(lambda: (tmp_path / "planted").read_text().count("decode_check") == 2)
    measuring = [int(line.split()[1]) for line in (tmp_path / "planted").read_text().splitlines()]
    os.kill(working.pid, signal.SIGTERM)
    working.join(30)
    assert working.exitcode == 143 and reasons(tmp_path) == []
    until(lambda: not any(map(_is_there, measuring)), 10)
    assert "check_9" not in called(tmp_path)  # what had not begun did not begin
    assert (tmp_path / "gpu" / "interpreter" / "report.json").exists()


def test_one_benchmark_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "gpu" / "interpreter"
    folder.mkdir(parents=True)
    with FolderLock(folder, "another"):
        assert main(words(tmp_path, "peers", "steady")) == 2
    assert "is in use by process" in capsys.readouterr().err


def test_what_there_was_no_time_for_is_left_to_the_next_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "planted.wait").touch()
    report = bench(tmp_path, "peers", "waiting", "steady", budget=5)
    assert "6 results of stage=peers are left out for time" in report["text"]
    assert "NO RESULT" not in capsys.readouterr().out and reasons(tmp_path) == []
    (tmp_path / "planted.wait").unlink()
    called(tmp_path)
    report = bench(tmp_path, "peers", "waiting", "steady", budget="null")
    assert called(tmp_path) == TIMES[2:] + TIMES and "left out" not in report["text"]


def test_a_process_is_killed_with_all_that_it_began(tmp_path: Path) -> None:
    file = tmp_path / "child"
    ended = run(["sh", "-c", f"sleep 600 & echo $! > {file}; echo said; exit 3"], limit=60)
    assert (ended.code, in_words(ended, 60)) == (3, "its process ended with code 3: said")
    until(lambda: not _is_there(int(file.read_text())), 10)
    ended = run(["sh", "-c", "kill -SEGV $$"], limit=60)
    assert in_words(ended, 60) == "killed by SIGSEGV"


# -- the file of results -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("at_once")
def test_a_torn_line_and_junk_cost_themselves_alone(tmp_path: Path) -> None:
    bench(tmp_path, "peers", "steady")
    file = tmp_path / "gpu" / "interpreter" / "results.jsonl"
    whole, first = file.read_bytes(), results(tmp_path)
    lines = whole.splitlines(keepends=True)
    called(tmp_path)

    file.write_bytes(b"".join(lines[:-1]) + lines[-1][:-9])  # killed while it wrote
    report = bench(tmp_path, "peers", "steady")
    assert called(tmp_path) == TIMES[3:] and set(results(tmp_path)) == set(first)
    assert "1 lines of" in report["text"] and len(report["tables"]["Sequences"]) == 4

    other = json.loads(lines[1]) | {"key": "of something else"}
    junk = [b"\xff\xfe\0\n", b"null\n", b"[1]\n", b'{"key": 1}\n', b"[" * 10**5 + b"\n", json.dumps(other).encode() + b"\n"]
    file.write_bytes(lines[0] + b"".join(a + b for a, b in zip(lines[1:], junk, strict=False)) + b"".join(junk))
    assert set(results(tmp_path)) == set(first)
    assert "10 lines of" in bench(tmp_path, "peers", "steady")["text"] and called(tmp_path) == []


def test_a_file_cut_anywhere_can_be_read_and_added_to(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    results_of = Ledger(file)
    results_of.begin({"code": "a", "card": "b"})
    points = [{"kind": "time", "subject": f"ü{number}", "case": {"length": number}} for number in range(3)]
    for point in points:
        results_of.append(benchmark.failed(point, "for a reason", float("inf")) | {"seconds": 1.0, "found": {"x": float("nan")}})
    whole = file.read_bytes()
    assert results_of.read() == ({"code": "a", "card": "b"}, [json.loads(line) for line in whole.splitlines()[1:]], 0)
    for cut in range(len(whole)):
        file.write_bytes(whole[:cut])
        facts, there, junk = results_of.read()
        lines = whole[: cut + 1].count(b"\n")  # a line of which only the end is missing is whole
        assert (len(there), junk) == (max(0, lines - 1), int(b"\n" not in whole[max(0, cut - 1) : cut + 1] and cut > 0))
        results_of.append(benchmark.failed(points[-1], "again", 0.0))
        facts, there, _ = results_of.read()
        assert there[-1]["reason"] == "again" and facts == ({"code": "a", "card": "b"} if lines else {})


@pytest.mark.usefixtures("at_once")
def test_other_code_or_another_card_starts_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench(tmp_path, "peers", "steady")
    folder = tmp_path / "gpu" / "interpreter"
    first = (folder / "results.jsonl").read_bytes()
    capsys.readouterr()
    for number, code in enumerate(("changed", "again"), 1):
        monkeypatch.setattr(origin, "digest", lambda code=code: code)
        called(tmp_path)
        report = bench(tmp_path, "peers", "steady")
        assert called(tmp_path) == TIMES and len(report["tables"]["Sequences"]) == 4
        out = capsys.readouterr().out
        assert out.count("starting anew (code ") == 1 and f"results-{number}.jsonl" in out
    assert (folder / "results-1.jsonl").read_bytes() == first
    monkeypatch.undo()
    assert origin.digest() == origin.digest() != "changed"


def test_reports_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(tmp_path, "report")) == 2
    assert "has results of no card" in capsys.readouterr().err
    for card in ("nvidia-a", "nvidia-b"):
        folder = tmp_path / "gpu" / card
        folder.mkdir(parents=True)
        Ledger(folder / "results.jsonl").begin({"card": card.upper(), "code": "c"})
    assert main(words(tmp_path, "report")) == 2
    assert "has results of nvidia-a, nvidia-b" in capsys.readouterr().err
    assert main(words(tmp_path, "report", card="nvidia-b", device="cuda")) == 0
    written = (tmp_path / "gpu" / "nvidia-b" / "report.md").read_text()
    assert "Triton kernels on NVIDIA-B" in written and "0 results" in written
    assert main(words(tmp_path, "report", card="../x")) == 2


@pytest.mark.usefixtures("at_once")
def test_all_stages_with_an_operation_of_ones_own(tmp_path: Path) -> None:
    report = bench(tmp_path, "all", "steady", peers="[]", num_heads="[4]")
    best = report["tables"]["Best launches"]
    assert [(row["programs"], row["best"]) for row in best] == [(4, "forward: faster")]
    written = json.loads((tmp_path / "gpu" / "interpreter" / "tuning.json").read_text())
    assert written["tables"] == {f"{PLANTED}:steady": {"TABLE": {"forward: faster": [4, None]}}}
    final = [line for line in results(tmp_path).values() if line["kind"] == "in turn"]
    assert len(final) == 4 and all(line["case"]["launches"] == {f"{PLANTED}:steady": ["forward: faster"]} for line in final)
    assert all("has no attribute 'way'" in line["found"]["failed"][f"{PLANTED}:steady"] for line in final)
