"""`metattt bench inner` at sizes that take seconds, and its baseline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from metattt.bench import inner
from metattt.bench.inner import Inner, Problem
from metattt.cli import main
from metattt.errors import MetaTTTError
from metattt.testing.specimen import distance

SMALL = {"length": 64, "num_heads": 2, "head_dim": 16, "mini_batch_size": 16, "rounds": 1, "threads": [1]}


def test_what_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"benchmark.{key}={value}" for key, value in SMALL.items()]
    assert main(["bench", "inner", *words, "benchmark.memory_length=0", f"output_dir={tmp_path}"]) == 0, (
        capsys.readouterr().err
    )
    content = json.loads((tmp_path / "inner.json").read_text())
    assert {(row["learner"], row["pass"], row["way"]) for row in content["tables"]["Time"]} == {
        (learner, title, way)
        for learner in ("linear", "mlp")
        for title in ("training", "inference")
        for way in inner.WAYS
    }
    assert {row["T"] for row in content["tables"]["Context length"]} == {16, 32, 64}
    assert (tmp_path / "inner.png").stat().st_size > 0


@pytest.mark.parametrize("learner", ["linear", "mlp"])
def test_all_ways_compute_the_same(learner: str) -> None:
    problem = Problem(learner, 48, 2, 16, 16)
    found = {way: function() for way, function in problem.training().items()}
    assert len(found["fused"]) > 8  # outputs, four views, weights, norm and token steps
    for way in inner.WAYS:
        assert len(found[way]) == len(found["dual"])
        assert max(distance(a, b) for a, b in zip(found[way], found["dual"], strict=True)) < 1e-4, way


def test_a_wrong_way_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    style = inner.published_style
    monkeypatch.setattr(inner, "published_style", lambda q, *rest: style(2 * q, *rest))
    with pytest.raises(MetaTTTError, match="nothing is reported: linear, published style"):
        Inner(**SMALL, memory_length=0).run(lambda line: None)  # type: ignore[arg-type]


def test_peak_memory() -> None:
    found = inner._peak("linear", 512, 2, 32, 16, 1)
    assert found.tensors == pytest.approx(
        (3 + 1 + 1 + 3) * 512 * 64 * 4 / 1e6, rel=0.1
    )  # views, cotangent, outputs, gradients
    assert found.peak > 0 and found.allowed > found.tensors


@pytest.mark.parametrize("change", [{"length": 60}, {"rounds": 0}, {"learners": ["conv"]}, {"threads": [0]}])
def test_settings_that_cannot_be(change: dict[str, object]) -> None:
    with pytest.raises(MetaTTTError, match=r"benchmark\."):
        Inner(**(SMALL | change))  # type: ignore[arg-type]


def test_operations_are_counted() -> None:
    """The count of the generic products' operations at one mini-batch, by hand: 3bd² + 2b²d multiplications and
    additions."""
    problem = Problem("linear", 16, 1, 16, 16)
    assert problem.operations(training=False) == 2 * (3 * 16 * 16 * 16 + 2 * 16 * 16 * 16)
    assert problem.operations(training=True) > 3 * problem.operations(training=False)
    assert torch.is_tensor(problem.cotangent)
