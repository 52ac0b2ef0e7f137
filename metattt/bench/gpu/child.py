"""The process of one job: takes its points in turn, and writes a line for each before it begins the next.

An exception is a result like any other, the reason of a point that gave none. A device that no longer answers ends the
process: what is left is begun in a new one.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from metattt.bench.gpu.ledger import Ledger, done, failed
from metattt.bench.gpu.plan import Point
from metattt.bench.gpu.subjects import load

LONGEST = 300  # characters of a reason


def work(given: Mapping[str, Any]) -> None:
    """Takes `given["points"]` on `given["device"]` and appends to the ledger `given["file"]`.

    Raises:
        SystemExit: the device is broken.
    """
    ledger = Ledger(Path(given["file"]))
    for point in (Point(**fields) for fields in given["points"]):
        ledger.append(_line(point, given["device"]))
        _clear()


def _line(point: Point, device: str) -> dict[str, Any]:
    started = time.monotonic()
    try:
        found = load(point.subject).measure(point.kind, dict(point.case), device)
    except Exception as error:  # of whatever kind: the point has failed, and the next may not
        return failed(point._asdict(), reason(error), time.monotonic() - started)
    return done(point._asdict(), found, time.monotonic() - started)


def reason(error: BaseException) -> str:
    """An exception in a line: its kind, and the first line of what it says."""
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {said}"[:LONGEST].rstrip(": ")


def _clear() -> None:
    """Gives memory back, and ends the process if the device has had a fault: every further call would fail, too."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        sys.exit(f"the device has had a fault: {reason(error)}")


if __name__ == "__main__":
    work(json.load(sys.stdin))
