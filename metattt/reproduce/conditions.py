"""Rows compared under several conditions: every row is tuned, run and evaluated anew under each."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from typing import Any

from metattt.errors import MetaTTTError
from metattt.reproduce.base import Row, Size
from metattt.reproduce.cells import Result
from metattt.reproduce.compare import Compared, Comparison, Scored


class Conditions(Comparison):
    """A comparison whose sizes have `conditions`: name -> overrides.

    Args:
        title, asked, rows, sizes, overrides: see `Claim`.
        against: pairs of rows; the report says how the first stands to the second under each condition.

    Raises:
        MetaTTTError: conditions or pairs that are not written as they should be.
    """

    def __init__(
        self,
        title: str,
        asked: str,
        rows: dict[str, Any],
        sizes: dict[str, Any],
        overrides: Sequence[str] = (),
        against: Sequence[Any] = (),
    ):
        self._conditions: dict[str, dict[str, tuple[str, ...]]] = {}
        kept: dict[str, Any] = {}
        for name, section in (sizes or {}).items():
            kept[name] = dict(section) if isinstance(section, dict) else section
            given = kept[name].pop("conditions", None) if isinstance(section, dict) else None
            if not isinstance(given, dict) or not given or not all(isinstance(one, list) for one in given.values()):
                raise MetaTTTError(f"claim.sizes.{name}.conditions={given} is not allowed: give names with a list of overrides each")
            self._conditions[name] = {str(one): tuple(map(str, words)) for one, words in given.items()}
        super().__init__(title, asked, rows, kept, overrides)
        self.against: list[tuple[str, str]] = []
        for pair in against:
            if not isinstance(pair, list | tuple) or len(pair) != 2 or not {*pair} <= {*rows}:
                raise MetaTTTError(f"claim.against={pair} is not allowed: give two rows of {', '.join(rows)}")
            self.against.append((pair[0], pair[1]))

    def conditions(self, size: Size) -> dict[str, tuple[str, ...]]:
        """Name -> overrides of the conditions at a size."""
        return self._conditions[size.name]

    def layers(self, size: Size) -> list[Row]:
        """The rows at a size, under no condition."""
        return super().rows(size)

    def rows(self, size: Size) -> list[Row]:
        """Every row under every condition, each a row of its own."""
        return [
            Row(f"{condition}, {row.name}", (*row.overrides, *words), row.reported)
            for condition, words in self.conditions(size).items()
            for row in self.layers(size)
        ]

    def found(self, compared: Compared, condition: str, row: Row | str) -> list[Scored]:
        """The finished runs of a row under a condition, by seed."""
        name = f"{condition}, {row if isinstance(row, str) else row.name}"
        return [one for one in compared.scored if one.row.name == name and one.finished]


def by_question(test: Result | None, column: str) -> list[float]:
    """A column of what `metattt eval` writes of synthetic sequences, by question; empty without it."""
    file = None if test is None else test.folder / "sequences.csv"
    if test is None or file is None or not test.finished or not file.is_file():
        return []
    with file.open(newline="", encoding="utf-8") as stream:
        return [float(row[column]) for row in csv.DictReader(stream)]
