"""The contract of a benchmark, and its checks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

from metattt.bench.report import Check, Report
from metattt.errors import MetaTTTError, check_integer


class Benchmark(ABC):
    """Constructors take settings only; `run` does the work and returns what is to be written."""

    def keep_in(self, folder: Path) -> None:
        """Says, before `run`, where the report will be written. A benchmark that lasts keeps what it has finished there,
        too."""
        return

    @abstractmethod
    def run(self, say: Callable[[str], None]) -> Report:
        """Checks, then measures. `say` shows a line of progress.

        Raises:
            MetaTTTError: a check failed.
        """


MOST = 2**24
"""Tokens, rounds and widths that a benchmark may be asked for: more are a slip, and would not end."""


def check_counts(**settings: object) -> None:
    """Refuses settings that are no numbers of something; of a list, each.

    Args:
        settings: by the name that they have under `benchmark`.

    Raises:
        MetaTTTError: one that is no integer from 1 to `MOST`, or an empty list.
    """
    for name, value in settings.items():
        values = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        if not values:
            raise MetaTTTError(f"benchmark.{name}=[] is not allowed: give one or more")
        for one in values:
            check_integer(f"benchmark.{name}", one, most=MOST)


def require(name: str, error: float, bound: float) -> Check:
    """A passed check.

    Raises:
        MetaTTTError: the error is above the bound (or not a number).
    """
    if not error <= bound:
        raise MetaTTTError(f"nothing is reported: {name}: relative error {error:.1e} is above {bound:.0e}")
    return Check(name, error, bound)
