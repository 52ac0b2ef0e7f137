"""The Triton operations in a layer, and the benchmark of the GPU, on the CPU under Triton's interpreter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from metattt.bench import peers
from metattt.bench.gpu import benchmark, child
from metattt.bench.gpu.operations import Operation
from metattt.bench.gpu.processes import Ended
from metattt.cli import main
from metattt.errors import MetaTTTError
from metattt.kernels.triton.on_gpu import OnGPU
from metattt.kernels.ttt_linear.on_gpu import TTTLinearOnGPU
from metattt.kernels.ttt_mlp.on_gpu import TTTMLPOnGPU
from metattt.layer import TTTLayer
from metattt.learners.linear import Linear
from metattt.learners.mlp import MLP
from metattt.optimizers.gradient_descent import GradientDescent
from metattt.optimizers.momentum import Momentum
from metattt.tasks.reconstruction import Reconstruction
from metattt.testing.specimen import Specimen, compare, cotangent, run, state_distance

pytestmark = pytest.mark.usefixtures("quick_interpreter")

KERNELS = {"linear": (TTTLinearOnGPU, Linear), "mlp": (TTTMLPOnGPU, MLP)}


def interpreted(kernel: type[OnGPU]) -> OnGPU:
    made = kernel()
    made.device = "cpu"
    return made


def through(layer: TTTLayer, kernel: OnGPU) -> TTTLayer:
    layer.plan.kernels, layer.plan.strict = [kernel], True
    return layer


@pytest.mark.parametrize(("bias", "steps"), [(True, "shared"), (False, "none"), (True, "per_head")])
@pytest.mark.parametrize("name", KERNELS)
def test_a_layer_through_the_triton_operation(name: str, bias: bool, steps: Any) -> None:
    kernel, learner = KERNELS[name]
    spec = Specimen(
        lambda: learner(bias=bias),
        lambda: Reconstruction(rope="mini_batch"),
        lambda: GradientDescent(8, token_steps=steps),
        64,
        2,
        {},
        8,
    )
    layer, dual = (
        through(spec.make(dtype=torch.float32), interpreted(kernel)),
        spec.make(dtype=torch.float32, form="dual"),
    )
    x = torch.randn(2, 27, 64, generator=torch.Generator().manual_seed(0))
    for cuts in ([], [5]):
        found, expected = run(layer, x, cuts, grads=True), run(dual, x, cuts, grads=True)
        assert compare(found, expected) < 1e-3
        assert state_distance(dual, found.state, expected.state) < 1e-3
    reset = torch.zeros(2, 27, dtype=torch.bool)
    reset[0, 11] = reset[1, 20] = True
    assert compare(run(layer, x, reset=reset, grads=True), run(dual, x, reset=reset, grads=True)) < 1e-3


@pytest.mark.parametrize("name", KERNELS)
def test_compiled_in_one_graph(name: str) -> None:
    """`torch.compile` sees the operation as one node, with its derivative."""
    kernel, learner = KERNELS[name]
    layer = through(
        TTTLayer(32, 1, Reconstruction(), learner(), GradientDescent(8, token_steps="shared")), interpreted(kernel)
    )
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for length in (19, 23):  # the second time compile leaves the length open
        x = torch.randn(1, length, 32)
        expected = run(layer, x, grads=True)
        tokens = x.clone().requires_grad_()
        y, _ = compiled(tokens)
        torch.testing.assert_close(y, expected.y)
        found = torch.autograd.grad((y * cotangent(y)).sum(), tokens)[0]
        torch.testing.assert_close(found, expected.grads["x"])


@pytest.mark.parametrize("name", KERNELS)
def test_what_it_does_not_take_it_refuses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, learner = KERNELS[name]

    def refused(
        match: str, dim: int = 64, rule: Any = None, dtype: torch.dtype = torch.float32, made: Any = None
    ) -> None:
        layer = TTTLayer(dim, 2, Reconstruction(), made or learner(), rule or GradientDescent(8)).to(dtype)
        with pytest.raises(MetaTTTError, match=match):
            through(layer, interpreted(kernel))(torch.randn(1, 8, dim, dtype=dtype))

    refused("head width 24", dim=48)
    refused("mini_batch_size=4", rule=GradientDescent(4))
    refused("float64", dtype=torch.float64)
    refused("gates other than", rule=Momentum(8, momentum="none", decay="constant"))
    monkeypatch.setattr(kernel, "shared_bytes", lambda self, width, size, dtype: 232_449)
    refused("232,449 bytes of shared memory for head width 32, optimizer.mini_batch_size=8 in float32.* has 232,448")
    if name == "mlp":
        refused("64 hidden units, not 128", made=MLP(expansion=2))


SMALL = {"tokens": 16, "lengths": "[16]", "num_heads": "[1]", "head_dim": 32, "dtype": "float32", "decode_batch": 3}
SMALL |= {"rounds": 1, "device": "cpu", "programs": "[1]", "cases": 1, "parallel": 1}


@pytest.fixture
def benchmarked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Calls the benchmark of the GPU with small sizes, its jobs in this process; returns the tables of its report."""

    def here(command: Any, given: Any, **_: Any) -> Ended:
        child.work(json.loads(json.dumps(given)))
        return Ended(0, None, "")

    def call(**settings: Any) -> dict[str, Any]:
        words = [f"benchmark.{name}={value}" for name, value in (SMALL | settings).items()]
        assert main(["bench", "gpu", *words, f"output_dir={tmp_path}"]) == 0
        tables: dict[str, Any] = json.loads((tmp_path / "gpu" / "interpreter" / "report.json").read_text())["tables"]
        return tables

    monkeypatch.setattr(benchmark, "run", here)
    return call


def test_the_gpu_benchmark_without_a_gpu(
    benchmarked: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All stages with the real operations, and peers of which one is not there."""
    segment: dict[str, Any] = {"forward: segments of 16": lambda: tables_set("ttt_linear", "SEGMENT", 16)}
    monkeypatch.setattr(Operation, "variants", lambda self, case: segment)
    benchmarked(stage="correctness", operations="[ttt_mlp]")
    tables = benchmarked(operations="[ttt_linear]", peers='["torch attention", "torch attention, flash", "fla delta_rule"]')
    assert {path.name for path in (tmp_path / "gpu" / "interpreter").iterdir()} == {
        "results.jsonl", "tuning.json", "report.md", "report.json", "report.png",
    }  # fmt: skip
    checked = {(row["operation"], row["part"].partition(",")[0]): row["passed"] for row in tables["Correctness"]}
    both = ("ttt_linear", "ttt_mlp")
    parts = ("outputs", "final state", "gradients")
    assert checked == {
        **{(name, part): "yes" for name in both for part in parts},
        **{(f"{name}_decode", "outputs and state"): "yes" for name in both},
    }
    rows = tables["Sequences"]
    assert {(row["operation"], row["check"]) for row in rows} == {
        ("ttt_linear", "passed"), ("torch attention", "–"), ("torch attention, flash", "–"),
    }  # fmt: skip
    assert {row["pass"] for row in rows} == {"forward + backward", "forward"} and all(row["ms, least"] > 0 for row in rows)
    ours = [row for row in rows if row["operation"] == "ttt_linear"]
    assert all(row["times ttt_linear"] == 1 and row["share of copy bandwidth"] > 0 for row in ours)
    assert [(row["operation"], row["sequences"], row["check"]) for row in tables["Decoding"]] == [("ttt_linear", 3, "passed")]
    assert [row["operation"] for row in tables["Launches"]] == ["ttt_linear"]
    turns = [(row["operation"].partition(",")[0], row["turn"]) for row in tables["In turn"]]
    assert turns == [(name, turn) for turn in (1, 2) for name in ("ttt_linear", "torch attention")]  # the faster of two ways
    if peers.missing() is not None:
        assert [(row["subject"], row["results"]) for row in tables["Not measured"]] == [("fla delta_rule", 2)]


def tables_set(operation: str, name: str, value: int) -> Callable[[], None]:
    """A change of a constant of an operation's `tuning`."""
    module = Operation(operation).module("tuning")
    before = getattr(module, name)
    setattr(module, name, value)
    return lambda: setattr(module, name, before)


def test_a_wrong_operation_is_timed_and_marked(
    benchmarked: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("metattt.bench.gpu.operations.relative", lambda found, expected: float("nan"))
    benchmarked(stage="correctness", operations="[ttt_linear]")
    tables = benchmarked(stage="times", operations="[ttt_linear]")
    assert {row["check"] for row in tables["Sequences"]} == {"FAILED"}
    assert [row["check"] for row in tables["Decoding"]] == ["passed"]  # by an error of its own
    nan = [row for row in tables["Correctness"] if row["passed"] == "NO"]
    assert len(nan) == 3 and all(row["error"] != row["error"] for row in nan)


def test_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(["bench", "gpu"]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert main(["bench", "gpu", "benchmark.device=cpu"]) == 2
    assert "set TRITON_INTERPRET=1" in capsys.readouterr().err
