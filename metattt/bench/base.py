"""The contract of a benchmark, and its checks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from metattt.bench.report import Check, Report
from metattt.errors import MetaTTTError


class Benchmark(ABC):
    """Constructors take settings only; `run` does the work and returns what is to be written."""

    @abstractmethod
    def run(self, say: Callable[[str], None]) -> Report:
        """Checks, then measures. `say` shows a line of progress.

        Raises:
            MetaTTTError: a check failed.
        """


def require(name: str, error: float, bound: float) -> Check:
    """A passed check.

    Raises:
        MetaTTTError: the error is above the bound (or not a number).
    """
    if not error <= bound:
        raise MetaTTTError(f"nothing is reported: {name}: relative error {error:.1e} is above {bound:.0e}")
    return Check(name, error, bound)
