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
        wrong: checks that find a large error.
        faults: what happens at a kind of measurement and a length: `check_9`, `time_16_forward`, `time_16_both`.
    """

    def __init__(self, wrong: tuple[str, ...] = (), **faults: Callable[[], Any]):
        self.wrong, self.faults = wrong, faults

    def variants(self, case: dict[str, Any]) -> dict[str, Any]:
        return {"forward: slower": None, "forward: faster": None}

    def measure(self, kind: str, case: dict[str, Any], device: str) -> dict[str, Any]:
        words = [kind, case.get("length", ""), case.get("pass", "").replace("forward + backward", "both"), case.get("variant", "")]
        at = "_".join(str(word) for word in words if word).replace(" ", "_")
        with open(os.environ["PLANTED"], "a") as stream:
            stream.write(f"{at} {os.getpid()}\n")
        self.faults.get(at, lambda: None)()
        if kind in ("check", "decode check"):
            error = 1.0 if at in self.wrong else 1e-6
            part = {"part": "outputs", "error": error, "bound": 1e-4, "passed": error < 1e-4}
            return {"parts": [part], "kernels": [{"kernel": "planted", "registers": 255, "stack": 0}]}
        if kind == "variant":
            ratio = 2.0 if "slower" in case["variant"] else 0.5
            ratios = {f"times used, {which}": ratio for which in ("least", "median", "most")}
            sets = {"TABLE": {case["variant"]: [4, None]}}
            return _times(ratio) | {"used, ms, median": 1.0, "sets": sets} | ratios
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
wrong = Planted(wrong=("check_18",))
raising = Planted(check_18=_raise)
hanging = Planted(time_16_forward=_hang)
killed = Planted(time_16_both=_killed)
leaving = Planted(time_16_both=_leave)
late = Planted(check_9=_hang)
waiting = waiting_too = Planted(time_32_both=_wait_for_release, decode_check=_wait_for_release)
