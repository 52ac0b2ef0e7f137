"""`metattt layers`: families and papers of the known layers, rows of the user's own, and the page of the documentation."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from documents_for_tests import script
from processes_for_tests import fresh

from metattt.catalog.families import FAMILIES, OWN, Source, sources
from metattt.catalog.known_layers import MEASURED, known_layers, written_down
from metattt.catalog.layer_measures import write_down
from metattt.cli import main

PAGE = Path(__file__).resolve().parents[2] / "docs" / "layers.md"
SIZE = ("dim=8", "num_heads=2")
ROW = "# @package _global_\n# Mine\n{line}defaults:\n  - delta_net\n  - _self_\n"


def test_every_known_layer_has_a_family_and_a_paper() -> None:
    known = sources()
    assert set(known) == set(known_layers())
    assert {one.family for one in known.values()} == set(FAMILIES)
    assert list(dict.fromkeys(one.family for one in known.values())) == list(FAMILIES)
    delta = Source("delta rules", "Parallelizing Linear Transformers with the Delta Rule", "2406.06484")
    assert known["delta_net"] == delta
    assert known["ttt_linear"].arxiv == "2407.04620" and known["mttt_mlp"].arxiv == "2310.13807"
    assert str(known["titans"]) == "Titans, arXiv 2501.00663"


def test_the_tables_of_the_page_are_those_of_the_configurations() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == script(PAGE.parent / "scripts" / "layers.py").page(page), "run `python -P docs/scripts/layers.py`"
    listed = [line[2:-2].split(" | ") for line in page.splitlines() if line.startswith("| ")]
    assert {row[0].strip("`") for row in listed if row[0].startswith("`")} == set(sources())


def test_every_layer_is_written_down_as_it_is_configured() -> None:
    assert set(written_down(64, 4)) == set(known_layers()), "run `python -m metattt.catalog.layer_measures`"
    assert written_down(32, 4) == {} == written_down(64, 2)  # these are measured


@pytest.mark.slow
def test_all_that_is_written_down_is_so() -> None:
    assert MEASURED.read_text() == write_down(64, 4), "run `python -m metattt.catalog.layer_measures`"


def test_the_table_needs_no_torch() -> None:
    fresh([], ["import sys; from metattt.cli import main; assert main(['layers']) == 0; assert 'torch' not in sys.modules"])


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "mine" / "layer"
    folder.mkdir(parents=True)
    (folder / "plain.yaml").write_text(ROW.format(line=""))
    (folder / "known.yaml").write_text(ROW.format(line="# family: apes; paper: Apes, arXiv 2401.00001\n"))
    return folder


def test_rows_of_ones_own(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["layers", "--config-dir", "mine", *SIZE]
    assert main([*given, f"family={OWN}"]) == 0
    out = capsys.readouterr().out
    assert OWN in out and "plain" in out and "Apes" not in out
    assert main([*given, "layer=known"]) == 0
    out = capsys.readouterr().out
    assert "apes: Apes, arXiv 2401.00001" in out and "W_t = W_{t−1} − η_t k_tᵀ(k_t W_{t−1} − v_t)" in out


def test_the_row_that_the_page_shows(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = re.search(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert shown is not None
    (mine / "shown.yaml").write_text(shown[1])
    assert main(["layers", "--config-dir", "mine", "layer=shown", *SIZE]) == 0
    assert "W_t = α_t W_{t−1} + S_t" in capsys.readouterr().out


@pytest.mark.parametrize(("overrides", "expected"), [
    (["family=delta rule"], "Did you mean 'family=delta rules'?"),
    (["layer=delta_nt"], "Did you mean `layer=delta_net`?"),
    (["layer=delta_net", "family=delta rules"], "leave out one of them"),
    (["learner=mlp", "learner.dpth=2"], "learner.depth"),
])  # fmt: skip
def test_mistakes(overrides: list[str], expected: str, mine: Path, told: Callable[..., str]) -> None:
    assert expected in told("layers", *SIZE, *overrides)
