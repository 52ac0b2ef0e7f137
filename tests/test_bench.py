"""`metattt layers` and `metattt bench`: what they print and write, and that a wrong result is never timed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from metattt.bench import decode
from metattt.bench.base import require
from metattt.bench.decode import DecodeBenchmark as Decode
from metattt.bench.delta import Delta
from metattt.bench.published_decoding import PublishedDecoding
from metattt.bench.report import Check, Panel, Report, looks_of, markdown_table
from metattt.bench.state import StateAndCost
from metattt.bench.timing import in_turn, ratios, summary
from metattt.catalog.known_layers import known_layers, readable
from metattt.catalog.layer_measures import examine
from metattt.cli import main
from metattt.errors import MetaTTTError


@pytest.mark.parametrize(
    ("name", "causal", "state", "growth"),
    [
        ("delta_net", True, "1.1 KiB", 0),  # W of two heads, the tails of three convolutions, and the position
        ("ttt_linear", True, None, 0),
        ("attention", True, "128 B x tokens", 1),
        ("kernel_ridge", True, "8 B x tokens²", 2),
        ("mttt_linear", False, None, 0),
        ("self_attention", False, "none: one call", 1),
        ("linear_attention_image", False, "none: one call", 0),
    ],
)
def test_what_is_known_of_a_layer(name: str, causal: bool, state: str | None, growth: int) -> None:
    known = examine(name, 16, 2)
    assert (known.causal, known.cost_growth) == (causal, growth)
    if state is not None:
        assert known.state == state
    else:
        assert known.state_bytes is not None and known.state_bytes[0] > 512 and known.state_bytes[1:] == (0, 0)


def test_metattt_layers_lists_every_layer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("metattt.catalog.known_layers.known_layers", lambda _: ["delta_net", "lact"])
    assert main(["layers", "dim=16", "num_heads=2"]) == 0
    out = capsys.readouterr().out
    for word in ("delta_net", "lact", "swiglu", "block_momentum", "orthogonalize=true", "anchor=online"):
        assert word in out
    assert main(["layers", "dim=15", "num_heads=2"]) == 2
    assert {"titans", "nested_ttt"} < set(known_layers()) and "custom" not in known_layers()


def test_readable() -> None:
    assert [readable(size) for size in (8, 1536, 3 * 2**20, 2**31)] == ["8 B", "1.5 KiB", "3 MiB", "2.0 GiB"]


def test_metattt_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = [
        "benchmark.length=40",
        "benchmark.dim=8",
        "benchmark.rounds=1",
        "benchmark.at_least=0",
        f"output_dir={tmp_path}",
    ]
    assert main(["bench", "delta", *small]) == 0, capsys.readouterr().err
    content = json.loads((tmp_path / "delta.json").read_text())
    assert {row["way"] for row in content["tables"]["Time"]} == {"solved", "form=primal", "plain loop"}
    assert all(check["error"] <= check["bound"] for check in content["checks"]) and len(content["checks"]) == 8
    assert "| gated_delta_net | plain loop |" in (tmp_path / "delta.md").read_text()
    assert main(["bench", "delta", *small, "threads=0"]) == 2
    assert main(["bench", "dleta"]) == 2
    assert "Did you mean" in capsys.readouterr().err


def test_a_red_gate_reports_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("metattt.bench.delta.plain_loop", lambda layer, x: layer(x)[0] * 1.001)
    with pytest.raises(MetaTTTError, match="nothing is reported: delta_net, plain loop"):
        Delta(40, 8, rounds=1).run(lambda line: None)
    monkeypatch.undo()
    with pytest.raises(MetaTTTError, match="times faster"):
        Delta(8, 8, rounds=1, at_least=1e9).run(lambda line: None)
    with pytest.raises(MetaTTTError):
        require("nan", float("nan"), 1.0)


def test_state_benchmark() -> None:
    report = StateAndCost(["attention", "delta_net", "self_attention"], [8, 16], call=8, dim=8, rounds=1).run(
        lambda line: None
    )
    state = {row["layer"]: row for row in report.tables["State (bytes)"]}
    assert state["attention"]["T = 16"] > state["attention"]["T = 8"]
    assert state["delta_net"]["T = 16"] == state["delta_net"]["T = 8"]
    assert {check.name.split(",")[0] for check in report.checks} == {"attention", "delta_net"}
    short = StateAndCost(["kernel_ridge"], [8, 16], call=8, dim=8, max_state=600, rounds=1).run(lambda line: None)
    assert short.tables["State (bytes)"][0]["T = 16"] is None
    with pytest.raises(MetaTTTError, match="multiples"):
        StateAndCost([], [8, 12], call=8)


def test_timing_in_turn() -> None:
    calls: list[str] = []
    seconds = in_turn({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=3, warmup=1)
    assert "".join(calls) == "abababab" and len(seconds["a"]) == 3
    assert ratios([2.0, 6.0], [1.0, 2.0]) == (2.0, 2.5, 3.0)
    assert str(summary([1.0, 2.0, 4.0])) == "2 (1 to 4)"


def test_reports(tmp_path: Path) -> None:
    panel = Panel("p", "x", "y", {"curve": ([1, 10], [1.0, 2.0])})
    report = Report(
        "Title",
        "Text.",
        {"Numbers": [{"name": "a", "ms": 0.12345, "bytes": None}]},
        [Check("c", 0.0, 1e-9)],
        {},
        [panel],
    )
    names = [path.name for path in report.write(tmp_path, "one")]
    assert names == ["one.md", "one.json", "one.png"]
    assert "| a | 0.123 | – |" in (tmp_path / "one.md").read_text()
    assert markdown_table([]) == ["(no rows)"]
    assert torch.get_num_threads() == json.loads((tmp_path / "one.json").read_text())["environment"]["threads"]


def test_a_picture_of_all_layers_can_be_read(tmp_path: Path) -> None:
    """Every curve has a look of its own, and the legend leaves the plots their height."""
    from PIL import Image

    names = known_layers()
    looks = looks_of(names)
    assert len({str(sorted(look.items())) for look in looks.values()}) == len(names) > 40
    curves = {name: ([1.0, 10.0], [1.0, 2.0 + i]) for i, name in enumerate(names)}
    Report("T", "", {}, [], {}, [Panel("p", "x", "y", curves)]).write(tmp_path, "all")
    with Image.open(tmp_path / "all.png") as picture:
        dark = np.asarray(picture.convert("L")) < 128
    rows = dark[:, : dark.shape[1] // 3].any(1).nonzero()[0]  # axes and curves, left of the legend
    assert rows.max() - rows.min() > 0.8 * dark.shape[0]


def test_a_benchmark_has_to_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2
    said = capsys.readouterr().err
    assert "`benchmark` is not chosen" in said and "delta" in said and "inner" in said and said.count("\n") == 1


def test_decoding_equals_the_published_style_or_nothing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Decode(dim=32, num_heads=2, num_layers=1, vocab_size=30, layer_dim=16, contexts=[4, 20], tokens=2, rounds=1)
    report = small.run(lambda line: None)
    assert [check.name for check in report.checks] == [
        f"{name}, ours and published style, logits, fp32" for name in ("ttt_linear", "ttt_mlp")
    ]
    models, versus, single = report.tables.values()
    assert (len(models), len(versus), len(single)) == (10, 4, 6)
    step = PublishedDecoding.step
    monkeypatch.setattr(PublishedDecoding, "step", lambda self, ids: step(self, ids) * 1.01)
    with pytest.raises(MetaTTTError, match="nothing is reported: ttt_linear, ours and published style"):
        small.run(lambda line: None)
    for wrong in ({"layers": ["titans"]}, {"contexts": [2]}, {"rounds": 0}, {"device": "tpu"}):
        with pytest.raises(MetaTTTError, match="benchmark"):
            Decode(**wrong)  # type: ignore[arg-type]


def test_decoding_on_a_card_tells_host_and_device_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one: what stands in for the graph is a call of the model, and the clock a made-up one."""
    timed: list[object] = []
    monkeypatch.setattr(decode, "on_card", lambda device: True)
    monkeypatch.setattr(decode, "CapturedStep", decode.PlainStep)
    monkeypatch.setattr(decode, "host_and_device", lambda function: timed.append(function()) or (0.002, 0.003))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    report = Decode(dim=32, num_heads=2, num_layers=1, vocab_size=30, layer_dim=16, contexts=[4], tokens=2, rounds=2).run(
        lambda line: None
    )
    models, _, single = report.tables.values()
    assert report.file == "gpu/decode" and "a card" in report.title and len(report.checks) == 4
    assert [row["way"] for row in models].count("ours, CUDA graph") == 2 and len(models) == 7
    for row in (*models, *single):
        assert (row["host, ms per token"], row["device, ms per token"]) == (2, 3)
    assert len(timed) == 2 * (len(models) + len(single))
    if not torch.cuda.is_available():
        with pytest.raises(MetaTTTError, match=r"benchmark\.device=cuda needs a CUDA device"):
            Decode(device="cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no card")
def test_work_of_the_device_is_timed_without_the_host() -> None:
    x = torch.ones(2048, 2048, device="cuda")
    short = decode.host_and_device(lambda: x @ x)
    long = decode.host_and_device(lambda: [x @ x for _ in range(50)])
    assert 0 < short[1] < long[1]
