"""Every law of the suite, on rows whose rules erase, decay by channels, precondition, or learn several pairs a token."""

from __future__ import annotations

from typing import ClassVar

from metattt.composition.compose import compose
from metattt.testing import Conformance
from metattt.testing.report import specimen_of
from metattt.testing.specimen import Specimen


def specimen(row: str, *overrides: str) -> Specimen:
    return specimen_of(compose(f"layer={row}", "dim=8", "num_heads=2", *overrides, job="check"))


class OfRows(Conformance):
    rows: ClassVar[dict[str, tuple[str, ...]]]

    def specimens(self) -> dict[str, Specimen]:
        return {row: specimen(row, *overrides) for row, overrides in self.rows.items()}


class TestDecaysByChannels(OfRows):
    rows: ClassVar[dict[str, tuple[str, ...]]] = {"rwkv7": (), "hgrn2": (), "gated_delta_net2": ()}


class TestSteps(OfRows):
    rows: ClassVar[dict[str, tuple[str, ...]]] = {"preconditioned_delta_net": (), "delta_gradient": (), "comba": ()}


class TestPairs(OfRows):
    rows: ClassVar[dict[str, tuple[str, ...]]] = {
        "gated_delta_product": (),
        "omega_net": ("task.window=3",),
        "atlas": ("task.window=3", "optimizer.mini_batch_size=4"),
    }
