"""`metattt bench quality`: the learning rate is chosen on one text and the loss reported on another, and no cell is run twice."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from metattt.bench.cells import Cell, Cells
from metattt.bench.quality import ROWS, Quality
from metattt.composition.choices import choices
from metattt.errors import MetaTTTError

SMALL = {"steps": 2, "dim": 16, "num_heads": 2, "num_layers": 1, "context_length": 16, "batch_size": 2, "held_out_bytes": 64}


def text(folder: Path) -> str:
    folder.mkdir()
    for number in range(30):
        (folder / f"{number}.txt").write_text(f"document {number}. " * 20)
    return str(folder)


def test_rows_are_known_layers() -> None:
    assert set(ROWS) <= set(choices("layer"))


def test_the_rate_is_chosen_by_validation_and_the_test_text_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With made-up runs: the best on the validation text is not the best on the test text."""
    found = {  # validation, test of (row, rate); seeds differ by 0.1 a seed
        ("linear_attention", "0.001"): (3.0, 2.0), ("linear_attention", "0.002"): (2.5, 4.0),
        ("attention", "0.001"): (2.0, 5.0), ("attention", "0.002"): (math.inf, math.inf),
        ("gla", "0.001"): (math.inf, math.inf), ("gla", "0.002"): (math.inf, math.inf),
    }  # fmt: skip
    ran: list[tuple[str, ...]] = []

    def run(self: Quality, given: Sequence[str], folder: Path) -> Cell:
        row, rate, seed = (one.partition("=")[2] for one in given[:3])
        ran.append((row, rate, seed))
        if len(ran) == 4:
            raise KeyboardInterrupt
        validation, test = found[row, rate]
        return Cell(validation + int(seed) / 10, test + int(seed) / 10, 7, "not finite" if math.isinf(test) else None)

    monkeypatch.setattr(Quality, "_train", run)
    bench = Quality(["linear_attention", "attention", "gla"], [2e-3, 1e-3], [0, 1, 2], keep=str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        bench.run(lambda line: None)
    before = len(ran)
    report = bench.run(lambda line: None)
    assert ran[before] == ran[before - 1] and len(set(ran)) == len(ran) - 1  # the one that was killed, and no other, again
    assert ran.count(("linear_attention", "0.001", "1")) == 0  # other seeds at the best rate alone
    (rows,) = report.tables.values()
    assert [row["layer"] for row in rows] == ["linear_attention", "attention"]
    assert rows[0]["bits per byte"] == "4.100 ± 0.100" and rows[0]["best rate"].startswith("0.002")
    assert rows[1]["times linear_attention"] == f"{5.1 / 4.1:.3f}"
    assert "More than 10% behind linear_attention: attention (1.244)" in report.text
    assert "Diverged at every rate: gla" in report.text
    again = len(ran)
    assert bench.run(lambda line: None).markdown() == report.markdown() and len(ran) == again


def test_a_cell_is_a_run_of_the_main_job(tmp_path: Path) -> None:
    bench = Quality(["delta_net"], [1e-3], [0], text=text(tmp_path / "text"), keep=str(tmp_path / "cells"), **SMALL)
    lines: list[str] = []
    report = bench.run(lines.append)
    (file,) = (tmp_path / "cells").iterdir()  # the run's folder is gone
    content = json.loads(file.read_text())
    assert 7 < content["validation"] < 9 and 7 < content["test"] < 9 and content["validation"] != content["test"]
    assert lines[0].startswith("layer=delta_net training.lr=0.001 seed=0: ")
    (rows,) = report.tables.values()
    assert rows[0]["bits per byte"] == f"{content['test']:.3f}" and rows[0]["parameters"] == content["parameters"]
    other = Quality(["delta_net"], [1e9], [0], text=str(tmp_path / "text"), keep=str(tmp_path / "cells"), **SMALL | {"steps": 4})
    assert "Diverged at every rate: delta_net" in other.run(lines.append).text
    assert "finite" in lines[-1]


def test_a_damaged_cell_is_refused(tmp_path: Path) -> None:
    cells = Cells(tmp_path, lambda given, folder: Cell(1.0, 2.0, 3, None))
    lines: list[str] = []
    first = cells.get(["layer=a"], "one", lines.append)
    assert first == cells.get(["layer=a"], "one", lines.append) and len(lines) == 1
    assert first == cells.get(["layer=a"], "another", lines.append) and len(lines) == 2  # of a configuration that has changed
    (file,) = tmp_path.iterdir()
    file.write_text('{"given": ["layer=a"], "config": 1, "validation": true, "test": 1.0, "parameters": 3, "failure": null}')
    with pytest.raises(MetaTTTError, match="is no result of this benchmark"):
        cells.get(["layer=a"], "another", lines.append)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rows": []}, "benchmark.rows"),
        ({"rows": ["gla", "gla"]}, "benchmark.rows"),
        ({"rates": [0.0]}, "benchmark.rates=0"),
        ({"seeds": [0, 1], "choosing": 3}, "benchmark.choosing=3"),
        ({"steps": 0}, "benchmark.steps=0"),
    ],
)
def test_refusals(settings: dict, message: str) -> None:
    with pytest.raises(MetaTTTError, match=message):
        Quality(**settings)


def test_a_misspelt_row_shows_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(MetaTTTError, match="delta_nett"):
        Quality(["gla", "delta_nett"], keep=str(tmp_path)).run(lambda line: None)
