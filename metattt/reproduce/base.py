"""The contract of a claim: its rows, its sizes, and what turns finished cells into a report."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from metattt.errors import MetaTTTError, check_choice
from metattt.reproduce.cells import Runner
from metattt.reproduce.report import Report


class Row(NamedTuple):
    """A row of a claim's table.

    Attributes:
        name: as it is shown.
        overrides: what makes it.
        reported: the figure in the paper; None if the paper has none.
    """

    name: str
    overrides: tuple[str, ...]
    reported: float | None


class Size(NamedTuple):
    """What a size of a claim sets.

    Attributes:
        name: `smoke`, `cpu`, `gpu`.
        minutes: of computing that all cells take together, about.
        overrides: of every run.
        evaluate: of every evaluation.
        seeds: of the runs that are reported; the learning rate is chosen with the first.
        learning_rates: that are tried for every row; none leaves that of the rows.
    """

    name: str
    minutes: float
    overrides: tuple[str, ...]
    evaluate: tuple[str, ...]
    seeds: tuple[int, ...]
    learning_rates: tuple[float, ...]


class Claim(ABC):
    """A claim of a paper. Subclasses are registered, and have a file in `configs/claim`.

    Args:
        title: of the report.
        asked: what the paper says and where, as Markdown.
        rows: name -> `overrides` (a list) and `reported` (the paper's figure), or the list alone.
        sizes: `smoke`, `cpu`, `gpu` -> the fields of `Size`; a size may leave out some of the rows with `rows: [names]`.
        overrides: of every run at every size, before those of the size.

    Raises:
        MetaTTTError: rows or sizes that have other fields.
    """

    def __init__(
        self, title: str, asked: str, rows: dict[str, Any], sizes: dict[str, Any], overrides: Sequence[str] = ()
    ):
        self.title, self.asked = title, asked.strip()
        self._overrides = _list("claim.overrides", list(overrides), str)
        self._rows, self._sizes = _mapping("claim.rows", rows), _mapping("claim.sizes", sizes)

    def size(self, name: str) -> Size:
        """One of the sizes.

        Raises:
            MetaTTTError: it has none of that name, or one that is not written as it should be.
        """
        given = self._section(name)
        key = f"claim.sizes.{name}"
        fields = {*Size._fields, "rows"} - {"name"}
        for field in given:
            check_choice(f"{key}, field", field, sorted(fields))
        minutes = given.get("minutes", 0)
        if isinstance(minutes, bool) or not isinstance(minutes, int | float):
            raise MetaTTTError(f"{key}.minutes={minutes} is not a number")
        seeds = _list(f"{key}.seeds", given.get("seeds", [0]), int)
        if not seeds or len(set(seeds)) < len(seeds):
            raise MetaTTTError(f"{key}.seeds={given['seeds']} is not allowed: give one or more, all different")
        return Size(
            name, float(minutes), (*self._overrides, *_list(f"{key}.overrides", given.get("overrides", []), str)),
            _list(f"{key}.evaluate", given.get("evaluate", []), str), seeds,
            _list(f"{key}.learning_rates", given.get("learning_rates", []), int | float),
        )  # fmt: skip

    def rows(self, size: Size) -> list[Row]:
        """The rows at a size, in order.

        Raises:
            MetaTTTError: no such row, or one that is not written as it should be.
        """
        chosen = self._section(size.name).get("rows")
        names = list(self._rows) if chosen is None else _list(f"claim.sizes.{size.name}.rows", chosen, str)
        if not names:
            raise MetaTTTError("claim.rows is empty: a claim needs one row or more")
        found = []
        for name in names:
            check_choice(f"claim.sizes.{size.name}.rows", name, list(self._rows))
            given = self._rows[name]
            given = {"overrides": given} if isinstance(given, list) else _mapping(f"claim.rows.{name}", given)
            for field in given:
                check_choice(f"claim.rows.{name}, field", field, ["overrides", "reported"])
            overrides = _list(f"claim.rows.{name}.overrides", given.get("overrides", []), str)
            reported = given.get("reported")
            if isinstance(reported, bool) or not isinstance(reported, int | float | None):
                raise MetaTTTError(f"claim.rows.{name}.reported={reported} is not a number")
            found.append(Row(name, overrides, reported))
        return found

    def _section(self, name: str) -> Mapping[str, Any]:
        check_choice("size", name, list(self._sizes))
        return _mapping(f"claim.sizes.{name}", self._sizes[name])

    @abstractmethod
    def count(self, size: Size) -> int:
        """How many cells `run` asks for."""

    @abstractmethod
    def run(self, size: Size, runner: Runner) -> Report:
        """Has the cells run, in as many rounds as it needs, and says what came out. Cells that failed are in the report."""


def _mapping(key: str, given: Any) -> Mapping[str, Any]:
    if not isinstance(given, Mapping) or not given:
        raise MetaTTTError(f"{key}={given} is not allowed: it must be a mapping that is not empty")
    return given


def _list(key: str, given: Any, kind: Any) -> tuple[Any, ...]:
    if not isinstance(given, list) or not all(isinstance(one, kind) and not isinstance(one, bool) for one in given):
        raise MetaTTTError(f"{key}={given} is not allowed: it must be a list of {_plural(kind)}")
    return tuple(given)


def _plural(kind: Any) -> str:
    return {str: "overrides or names", int: "integers"}.get(kind, "numbers")
