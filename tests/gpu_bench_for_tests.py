"""Operations that the benchmark of the GPU is given by its tests: they need no torch, and fail in every way that there
is. What they are called with is written to the file of the environment variable `PLANTED`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any


def _times(ms: float) -> dict[str, Any]:
    return {"ms, least": ms, "ms, median": ms, "ms, most": ms, "host, ms": 0.1, "calls": 1, "finite": True, "bytes": 1e6}


class Planted:
    """Every check passes and every time is a millisecond, but for what is planted.

    Args:
        faults: what happens at a kind of measurement, or at one of its cases: `"check 9"` is the check of nine tokens.
    """

    def __init__(self, **faults: Callable[[], Any]):
        self.faults = faults

    def variants(self, case: dict[str, Any]) -> dict[str, Any]:
        return {"slower": None, "faster": None}

    def measure(self, kind: str, case: dict[str, Any], device: str) -> dict[str, Any]:
        with open(os.environ["PLANTED"], "a") as stream:
            stream.write(f"{kind} {case.get('length', '')} {case.get('variant', '')}\n".replace("  ", " "))
        fault = self.faults.get(kind.replace(" ", "_")) or self.faults.get(f"{kind}_{case.get('length')}")
        if fault is not None:
            fault()
        if kind in ("check", "decode check"):
            return {"parts": [{"part": "outputs", "error": 1e-6, "bound": 1e-4, "passed": True}], "kernels": []}
        if kind == "variant":
            ratio = 2.0 if case["variant"] == "slower" else 0.5
            ratios = {f"times used, {which}": ratio for which in ("least", "median", "most")}
            return _times(ratio) | {"used, ms, median": 1.0} | ratios
        if kind == "decode":
            return _times(0.3) | {"graph, ms, median": 0.2, "state, bytes": 1000}
        return _times(1.0)


def _raise() -> None:
    raise RuntimeError("the planted check\nraises")


def _hang() -> None:
    time.sleep(600)


def _killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _leave() -> None:
    os._exit(0)


def _wait_for_release() -> None:
    """Until the test removes the file `PLANTED`.wait."""
    while os.path.exists(os.environ["PLANTED"] + ".wait"):
        time.sleep(0.05)


steady = Planted()
raising = Planted(check_203=_raise)
hanging = Planted(time_16=_hang)
killed = Planted(time_16=_killed)
leaving = Planted(time_16=_leave)
waiting = Planted(time_32=_wait_for_release)
