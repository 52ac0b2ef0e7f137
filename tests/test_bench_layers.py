"""`metattt bench layer` and `metattt bench model`, tiny, and what they refuse."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from metattt.bench.ceilings import Ceilings, ceilings
from metattt.bench.layer import ATTENTION, LayerBenchmark, PeerLayer
from metattt.bench.model import ModelBenchmark
from metattt.bench.peers import Peer, peers
from metattt.bench.report import Report
from metattt.cli import main
from metattt.errors import MetaTTTError

SMALL = {"lengths": [24, 48], "dim": 16, "num_heads": 2, "rounds": 2, "device": "cpu"}


@pytest.fixture(autouse=True)
def small_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    def few(device: torch.device, dtype: torch.dtype) -> Ceilings:
        return ceilings(device, dtype, size=64, repeats=2)

    monkeypatch.setattr("metattt.bench.layer.ceilings", few)
    monkeypatch.setattr("metattt.bench.model.ceilings", few)


def silent(line: str) -> None:
    pass


def test_whole_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [f"benchmark.{key}={value}".replace(" ", "") for key, value in SMALL.items()]
    assert (
        main(["bench", "layer", "benchmark.layers=[delta_net,linear_attention]", *sizes, f"output_dir={tmp_path}"]) == 0
    )
    assert "not installed" in (tmp_path / "layer.md").read_text()
    content = json.loads((tmp_path / "layer.json").read_text())
    rows = content["tables"]["Time"]
    ways = {(row["layer"], row["form"]) for row in rows}
    assert ways == {("delta_net", "dual"), ("linear_attention", "dual"), (ATTENTION, "")}
    assert len(rows) == 3 * 2 * 2  # lengths, passes
    assert all(row["share of ceiling"] > 0 and row["ms, least"] <= row["ms, median"] <= row["ms, most"] for row in rows)
    assert {row["layer"] for row in content["tables"][f"Times as long as {ATTENTION}"]} == {
        "delta_net",
        "linear_attention",
    }
    assert all(check["error"] <= check["bound"] for check in content["checks"]) and len(content["checks"]) == 3
    assert (tmp_path / "layer.png").stat().st_size > 1000
    capsys.readouterr()


def test_forms_of_one_layer_are_compared_and_slow_ways_stop() -> None:
    report = LayerBenchmark(["ttt_linear", "attention"], ["dual", "primal", "fused"], **SMALL | {"limit": 0.0}).run(
        silent
    )  # type: ignore[arg-type]
    names = [check.name for check in report.checks]
    for form in ("dual", "primal"):
        assert f"ttt_linear, {form} and fused, outputs and gradients, fp32" in names
    against = report.tables["Times as long as another form"]
    assert {(row["form"], row["against"]) for row in against} == {("primal", "dual"), ("fused", "dual")}
    assert {(row["layer"], row["T"]) for row in report.tables["Time"]} == {
        ("ttt_linear", 24),
        ("attention", 24),
        (ATTENTION, 24),
        (ATTENTION, 48),
    }
    assert {row["form"] for row in report.tables["Time"] if row["layer"] == "attention"} == {"scan"}


def test_a_layer_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = PeerLayer.forward
    monkeypatch.setattr(PeerLayer, "forward", lambda self, x: (1.001 * forward(self, x)[0], None))
    with pytest.raises(MetaTTTError, match="nothing is reported: torch attention"):
        LayerBenchmark(["delta_net"], ["auto"], **SMALL).run(silent)  # type: ignore[arg-type]


def test_operations_of_other_libraries_get_their_other_inputs() -> None:
    def gated(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        torch.testing.assert_close(k.norm(dim=-1), torch.ones(k.shape[:-1]))
        return v * gate

    peer = Peer(
        "gated",
        gated,
        lambda shape, dtype, device: [*torch.randn(3, *shape), torch.rand(*shape[:3], 1).requires_grad_()],
    )
    layer = PeerLayer(peer, 16, 2)
    for length in (5, 9):
        assert layer(torch.randn(2, length, 16))[0].shape == (2, length, 16)
    assert peers(16)[0].name == ATTENTION


@pytest.fixture(scope="module")
def report() -> Report:
    sizes = {
        "train_length": 20,
        "contexts": [48, 16],
        "decode_tokens": 3,
        "rounds": 2,
        "decode_rounds": 2,
        "device": "cpu",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("metattt.bench.model.ceilings", lambda device, dtype: ceilings(device, dtype, 64, 2))
        overrides = ["model.vocab_size=61", "dim=16"]
        return ModelBenchmark("tiny", ["ttt_linear", "attention"], overrides, **sizes).run(silent)  # type: ignore[arg-type]


def test_models(report: Report, tmp_path: Path) -> None:
    assert [check.name for check in report.checks] == [
        "ttt_linear, form=fused and dual, loss and gradients, fp32",
        "ttt_linear, prefill with decoding and one call, logits, fp32",
        "attention, prefill with decoding and one call, logits, fp32",
    ]
    assert {row["layer"]: row["T"] for row in report.tables["Training"]} == {"ttt_linear": 20, "attention": 20}
    assert [(row["layer"], row["T"]) for row in report.tables["Prefill"]] == [
        ("ttt_linear", 16),
        ("attention", 16),
        ("ttt_linear", 48),
        ("attention", 48),
    ]
    state = {(row["layer"], row["after tokens"]): row["state, MB"] for row in report.tables["Decoding"]}
    assert state["ttt_linear", 16] == state["ttt_linear", 48]
    assert state["attention", 16] < state["attention", 48]
    growth = report.tables["Decoding, times as long as after 16 tokens"]
    assert [row["after tokens"] for row in growth] == [48, 48] and all(
        row["at most 1.1"] in ("yes", "no") for row in growth
    )
    versus = report.tables["Times as long as attention"]
    assert [row["what"] for row in versus] == ["training", "prefill", "prefill", "decoding", "decoding"]
    assert all(
        row["share of ceiling"] > 0 for title in ("Training", "Prefill", "Decoding") for row in report.tables[title]
    )
    assert [path.name for path in report.write(tmp_path, "model")] == ["model.md", "model.json", "model.png"]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("benchmark.layers=[delta]", "delta_net"),
        ("benchmark.layers=[]", "one layer|lists need an entry"),
        ("benchmark.rounds=0", "at least 1"),
        ("benchmark.device=tpu", "device=tpu is not available"),
    ],
)
@pytest.mark.parametrize("name", ["layer", "model"])
def test_what_is_refused(name: str, setting: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", name, setting]) == 2
    assert re.search(said, capsys.readouterr().err)


def test_ceilings() -> None:
    found = ceilings(torch.device("cpu"), torch.float32, size=64, repeats=2)
    assert found.operations > 0 and found.bytes > 0
    assert Ceilings(100.0, 10.0).share(2.0, operations=50.0) == 0.25
    assert Ceilings(100.0, 10.0).share(2.0, operations=50.0, read=10.0) == 0.5


def test_layers_are_timed_beside_one_of_them_and_with_overrides() -> None:
    small: dict[str, Any] = SMALL | {"forms": ["dual"], "lengths": [16]}
    report = LayerBenchmark(["delta_net", "gla"], baseline="gla", overrides=["block_style=plain"], **small).run(silent)
    times = report.tables["Times as long as gla"]
    assert [(row["layer"], row["pass"]) for row in times] == [
        (name, way) for way in ("forward + backward", "forward") for name in ("delta_net", "torch attention")
    ]
    assert {row["layer"]: row["form"] for row in times} == {"delta_net": "dual", "torch attention": ""}
    assert "Every layer with `block_style=plain`." in report.text
    layer = LayerBenchmark(["delta_net"], overrides=["block_style=plain"], **small)._forms("delta_net")["dual"]
    assert layer.gate is None and layer.task.short_conv is None
    with pytest.raises(MetaTTTError, match=r"benchmark\.baseline=kda is not allowed: choose from delta_net"):
        LayerBenchmark(["delta_net"], baseline="kda", **small)
    with pytest.raises(MetaTTTError, match="`nobody` is not a choice of block_style"):
        LayerBenchmark(["delta_net"], overrides=["block_style=nobody"], **small).run(silent)
