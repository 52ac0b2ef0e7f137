"""The parts of `metattt bench gpu` that need neither a GPU nor another process: plans, tools' outputs, tables."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from metattt.bench import peers
from metattt.bench.gpu import ledger, plan, tools
from metattt.bench.gpu.operations import Operation, poisoned, what_it_sets
from metattt.bench.gpu.plan import Point, Settings, jobs
from metattt.bench.gpu.processes import Ended
from metattt.bench.gpu.resources import compiled_kernels
from metattt.bench.gpu.summary import summarise
from metattt.bench.gpu.tuned import entries, tables, winners
from metattt.bench.report import Report
from metattt.bench.run import _show
from metattt.bench.timing import on_device

SETTINGS = Settings(
    ["ttt_linear", "ttt_mlp"], list(peers.ON_A_GPU), 32768, [1024, 32768], [32, 12], 64, 16, "bfloat16", 512, [1024, 32], 20,
    None, "cuda",
)  # fmt: skip


def points(stage: str, results: Any = ()) -> list[Point]:
    return [point for job in jobs(stage, SETTINGS, list(results), print) for point in job.points]


def line(kind: str, subject: str, case: dict[str, Any], **found: Any) -> dict[str, Any]:
    return ledger.done({"kind": kind, "subject": subject, "case": case}, found, 1.0)


def test_what_the_stages_measure() -> None:
    checks = points("correctness")
    assert len({point.key for point in checks}) == len(checks)
    timed = [point.case for point in checks if point.subject == "ttt_mlp" and point.kind == plan.CHECK]
    assert len(timed) == len(plan.CASES) and all((case["width"], case["size"]) == (64, 16) for case in timed[:4])
    assert all(point.case["size"] == 16 and point.case["width"] == 64 for point in checks[:20])
    tooled = [(point.subject, point.case["operation"], point.case.get("tool")) for point in checks if point.kind == plan.TOOL]
    assert tooled == [
        (name, operation, tool)
        for operation in SETTINGS.operations
        for name, tool in (("compute-sanitizer", "memcheck"), ("compute-sanitizer", "racecheck"))
        for _ in ("short", "long")
    ] + [("ncu", operation, None) for operation in SETTINGS.operations]
    alone = {job.alone for job in jobs("correctness", SETTINGS, [], print) if not job.name.startswith("stall reasons")}
    assert alone == {False} and all(job.alone for job in jobs("times", SETTINGS, [], print))
    assert [len(job.points) for job in jobs("times", SETTINGS, [], print)] == [1, 10, 10]
    assert [job.name for job in jobs("peers", SETTINGS, [], print)] == [f"times of {name}" for name in peers.ON_A_GPU]
    lengths = {(point.subject, point.case["length"]) for point in points("tuning")}
    assert lengths == {(name, length) for name in SETTINGS.operations for length in (1024, 32768)}  # of 1024 and 32 programs
    assert [point.case["turn"] for point in points("final")] == [1, 2] * 4


def test_kernels_that_do_not_import_do_not_end_the_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    variants = Operation.variants

    def broken(self: Operation, case: Any) -> Any:
        if self.name == "ttt_linear":
            raise ImportError("no such kernel")
        return variants(self, case)

    monkeypatch.setattr(Operation, "variants", broken)
    said: list[str] = []
    assert [job.name for job in jobs("tuning", SETTINGS, [], said.append)] == ["tuning of ttt_mlp"]
    assert said == ["ttt_linear has no other launches to try: ImportError: no such kernel"]


def _variant(name: str, programs: int, ratio: float, most: float | None = None) -> dict[str, Any]:
    case = {"variant": name, **SETTINGS.case(32, 32768 * 32 // programs)}
    ratios = {"times used, least": ratio, "times used, median": ratio, "times used, most": most or ratio}
    sets = {"TABLE": {f"{name} {programs}": [4, 128]}, "SEGMENT": 16}
    return line("variant", "ttt_linear", case, **{"ms, median": ratio, "used, ms, median": 1.0, "sets": sets, **ratios})


def test_the_best_launches() -> None:
    results = [
        _variant("forward: a", 1024, 0.9), _variant("forward: b", 1024, 0.8), _variant("backward: a", 1024, 1.2),
        _variant("forward: a", 32, 0.7, most=1.01), _variant("backward: c", 32, 0.6),
    ]  # fmt: skip
    best = entries(results)
    assert [(one["programs"], one["part"], one["best"], one["tried"]) for one in best] == [
        (1024, "forward", "forward: b", 2), (1024, "backward", None, 1), (32, "forward", None, 1), (32, "backward", "backward: c", 1),
    ]  # fmt: skip
    assert tables(best) == {"ttt_linear": {"TABLE": {"forward: b 1024": [4, 128], "backward: c 32": [4, 128]}}}
    case = SETTINGS.case(12, 32768)
    assert winners(results, "ttt_linear", case, 12) == ["backward: c"]
    assert winners(results, "ttt_linear", case, 384) == ["forward: b"]
    assert winners(results, "ttt_mlp", case, 12) == winners(results, "ttt_linear", case | {"width": 32}, 12) == []


def test_the_last_stage_takes_winners_and_the_best_peers() -> None:
    case = {"pass": "forward + backward", **SETTINGS.case(32, 1024)}
    took = {"torch attention, flash": 2.0, "torch attention, cudnn": 1.5, "fla delta_rule": 3.0}
    results = [line("time", name, case, **{"ms, median": ms}) for name, ms in took.items()]
    results += [_variant("forward: b", 1024, 0.8), _variant("backward: c", 32, 0.6)]
    results.append(line("time", "fla gated_delta_rule", case | {"pass": "forward"}, **{"ms, median": 0.1}))
    first, *_, last = points("final", results)
    assert first.case["peers"] == ["torch attention, cudnn", "fla delta_rule"] and last.case["peers"] == []
    assert first.case["launches"] == {"ttt_linear": ["forward: b"], "ttt_mlp": []}
    assert last.case["launches"]["ttt_linear"] == ["backward: c"]


def test_what_a_change_of_the_launch_sets() -> None:
    module = Operation("ttt_mlp").module("tuning")
    case = SETTINGS.case(32, 1024)
    for name in ("ttt_linear", "ttt_mlp"):
        module = Operation(name).module("tuning")
        before = {key: dict(value) if isinstance(value, dict) else value for key, value in vars(module).items() if key.isupper()}
        for change in Operation(name).variants(case).values():
            assert what_it_sets(module, change)
        assert {key: value for key, value in vars(module).items() if key.isupper()} == before
    made = ModuleType("tuning")
    made.TABLE, made.SEGMENT = {("forward", 64): 1, "other": 2}, 64  # type: ignore[attr-defined]

    def change() -> Any:
        made.TABLE["forward", 64] = 3  # type: ignore[attr-defined]
        return lambda: made.TABLE.update({("forward", 64): 1})  # type: ignore[attr-defined]

    assert what_it_sets(made, change) == {"TABLE": {"forward 64": 3}}


def test_memory_is_poisoned() -> None:
    with poisoned():
        assert torch.empty(1000).isnan().all() and torch.zeros(3).new_empty(1000).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


WAITS = ("barrier", "barrier_not_issued", "long_scoreboard")
REASONS = (f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio" for name in WAITS)
STALLS = f"""==PROF== Connected to process 7
"ID","Process ID","Kernel Name","{'","'.join(REASONS)}"
"","","","inst","inst","inst"
"0","7","backward_kernel","1,002.25","9","0.5"
"1","7","segment_kernel","0","9","n/a"
"""


def test_stall_reasons() -> None:
    assert tools.stalls(STALLS.splitlines()) == [
        {"kernel": "backward_kernel", "stalls": {"barrier": 1002.25, "long_scoreboard": 0.5}},
        {"kernel": "segment_kernel", "stalls": {"barrier": 0.0}},
    ]
    found = tools.ncu.read(Ended(1, None, "==ERROR== ERR_NVGPUCTRPERM\n"))
    assert not found["ran"] and found["outcome"] == "its process ended with code 1: ==ERROR== ERR_NVGPUCTRPERM"
    report = summarise({}, [line("tool", "ncu", {"operation": "ttt_linear"}, **tools.ncu.read(Ended(0, None, STALLS)))], [], {}, "x")
    assert [row["waits for"] for row in report.tables["Stall reasons (warps that wait, for each instruction that is issued)"]] == [
        "barrier", "long_scoreboard", "barrier",
    ]  # fmt: skip


def test_which_kernels_are_looked_at() -> None:
    for operation in ("ttt_linear", "ttt_mlp"):
        names = tools.kernel_names(operation)
        assert {"forward_kernel", "backward_kernel", "decode_kernel"} <= set(names)
        options = tools.ncu.options({"operation": operation})
        pattern = next(word for word in options if word.startswith("regex:")).removeprefix("regex:")
        assert all(re.search(pattern, name) for name in names) and not re.search(pattern, "vectorized_elementwise_kernel")
        assert options[options.index("--clock-control") + 1] == "none"


def test_what_the_sanitizer_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clean = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
    assert tools.sanitizer.read(Ended(0, None, clean)) == {"outcome": "ERROR SUMMARY: 0 errors", "ran": True, "passed": True}
    assert not tools.sanitizer.read(Ended(9, None, clean.replace("0 e", "3 e")))["passed"]
    refused = tools.sanitizer.read(Ended(0, None, "Device not supported\n"))
    assert not refused["ran"] and not refused["passed"]
    assert tools.sanitizer.read(Ended(-9, "limit", ""))["outcome"] == "past its limit of 85 s"

    case = {"tool": "memcheck", "operation": "ttt_linear", "length": 9, "width": 32, "size": 16, "dtype": "float32"}
    monkeypatch.setenv("PATH", str(tmp_path))
    absent = tools.sanitizer.measure("tool", case, "cuda")
    assert absent == {"outcome": "compute-sanitizer is not installed", "ran": False}
    report = summarise({}, [line("tool", "compute-sanitizer", case, **absent)], [], {}, "x")
    assert report.tables["Tools"][0]["passed"] == "–"

    program = tmp_path / "compute-sanitizer"
    program.write_text('#!/bin/sh\necho "========= ERROR SUMMARY: 0 errors of $*"\n')
    program.chmod(0o755)
    found = tools.sanitizer.measure("tool", case, "cuda")
    assert found["passed"] and "--tool memcheck" in found["outcome"]
    assert found["outcome"].endswith("-m metattt.bench.gpu.small ttt_linear 9 32 16 float32 cuda")


def test_registers_of_the_kernels_that_were_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(registers: int | None, shared: int) -> SimpleNamespace:
        metadata = SimpleNamespace(name="forward_kernel", num_warps=4, shared=shared)
        return SimpleNamespace(n_regs=registers, n_spills=None if registers is None else 118, metadata=metadata)

    kernels = {"a": compiled(255, 17), "b": compiled(255, 17), "c": compiled(255, 18), "not loaded": compiled(None, 1)}
    module = ModuleType("planted_package.forward")
    module.kernel = module.again = SimpleNamespace(  # type: ignore[attr-defined]
        device_caches={0: (kernels, {})}, __module__="planted_package.forward"
    )
    monkeypatch.setitem(sys.modules, "planted_package.forward", module)
    row = {"kernel": "forward.forward_kernel", "warps": 4, "registers": 255, "stack": 472, "shared": 17}
    assert compiled_kernels("planted_package") == [row, row | {"shared": 18}]
    assert compiled_kernels("planted") == []


def test_peers_choose_their_launches_anew_for_every_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    class Autotuner:
        def __init__(self) -> None:
            self.cache, self.configs = {"shape": 1}, [1, 2]

    class Heuristics:
        def __init__(self, fn: Any):
            self.fn = fn

    for kind in (Autotuner, Heuristics):
        kind.__module__ = "triton.runtime.autotuner"
    wrapped = Heuristics(Autotuner())
    module = ModuleType("planted_library.ops")
    module.kernel, module.other = wrapped, SimpleNamespace(cache={"a": 1}, configs=[1])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "planted_library.ops", module)
    assert peers.forget_autotuning("planted_library") == 1 and wrapped.fn.cache == {}
    assert module.other.cache and peers.forget_autotuning("planted_library") == 0


def test_fla_with_and_without_its_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As its modules are written: the operation calls `norm_residual` of its own module at its end."""
    module = ModuleType("fla.ops.ttt.fused_chunk")
    source = """
def norm_residual(x, weight, bias, eps):
    return x + 1
def fused_chunk_ttt_linear(q, k, v, w, b, eta, scale, chunk_size):
    return norm_residual(q * scale, w, b, 1e-6), None, None
"""
    exec(source, vars(module))
    for name in ("fla", "fla.ops", "fla.ops.ttt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    whole, bare = (peers.peer(f"fla ttt_linear{part}, fused", 16) for part in ("", " without norm"))
    inputs = whole.inputs((1, 4, 2, 8), torch.float32, "cpu")
    torch.testing.assert_close(whole.call(*inputs), inputs[0] + 1)
    torch.testing.assert_close(bare.call(*inputs), inputs[0])
    torch.testing.assert_close(whole.call(*inputs), inputs[0] + 1)


def test_attention_by_a_backend_of_its_own() -> None:
    plain, flash = (peers.peer(name, 16) for name in ("torch attention", "torch attention, flash"))
    inputs = plain.inputs((2, 9, 3, 8), torch.float32, "cpu")
    torch.testing.assert_close(flash.call(*inputs), plain.call(*inputs))
    with pytest.raises(RuntimeError):  # cuDNN has none for the CPU: it is not replaced by another in silence
        peers.peer("torch attention, cudnn", 16).call(*inputs)
    assert [one.name for one in peers.peers(16)][:1] == ["torch attention"]


def test_times_on_the_cpu_stand_for_both() -> None:
    calls: list[str] = []
    took = on_device({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 3, "cpu", warmup=1)
    assert "".join(calls) == "abababab" and len(took["a"].device) == 3 and took["a"].device == took["a"].host


def test_an_empty_table_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    _show(Console(), Report("t", "", {"Nothing here": []}, [], {}))
    out = capsys.readouterr().out
    assert "Nothing here" in out and "(no rows)" in out
