"""NVIDIA's tools on one small case of an operation: compute-sanitizer for its kernels, ncu for what they wait for.

A tool that is not installed, or may not look at the device, is a result that says so.
"""

from __future__ import annotations

import csv
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from metattt.bench.gpu.processes import Ended, in_words, run

LIMIT = 85.0  # seconds of a tool; the point that runs it has more
ERROR = 9  # exit code of compute-sanitizer for what it found
STALL = re.compile(r"average_warps?_(?:latency_)?issue_stalled_(\w+?)(?:_per_issue_active)?\.(?:ratio|pct)")
UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # an allocation for every tensor, so that its bounds are known


class Tool:
    """A program that runs another.

    Args:
        program: its name on the path.
    """

    def __init__(self, program: str):
        self.program = program

    def measure(self, kind: str, case: dict[str, Any], device: str) -> dict[str, Any]:
        """As `subjects.Subject`, for the kind `tool`."""
        if shutil.which(self.program) is None:
            return {"outcome": f"{self.program} is not installed", "ran": False}
        sizes = [str(case[name]) for name in ("length", "width", "size", "dtype")]
        small = [sys.executable, "-m", "metattt.bench.gpu.small", case["operation"], *sizes, device]
        ended = run([self.program, *self.options(case), *small], limit=LIMIT, environment=UNCACHED, keep=2**22)
        return self.read(ended)

    def options(self, case: Mapping[str, Any]) -> list[str]:
        raise NotImplementedError

    def read(self, ended: Ended) -> dict[str, Any]:
        raise NotImplementedError


class Sanitizer(Tool):
    """memcheck and racecheck."""

    def options(self, case: Mapping[str, Any]) -> list[str]:
        return ["--tool", case["tool"], "--error-exitcode", str(ERROR), "--report-api-errors", "no"]

    def read(self, ended: Ended) -> dict[str, Any]:
        last = [line for line in ended.output.splitlines() if "SUMMARY" in line]
        clean = ended.code == 0 and ended.late is None and bool(last)
        outcome = last[-1].strip("= ") if last else in_words(ended, LIMIT)
        return {"outcome": outcome, "ran": bool(last), "passed": clean}


class NCU(Tool):
    """Stall reasons of the kernels of a forward and a backward pass: warps that wait for each, per instruction that is
    issued."""

    def options(self, case: Mapping[str, Any]) -> list[str]:
        # the clocks stay as they are: the card may be shared, and only shares are read
        options = ["--clock-control", "none", "--section", "WarpStateStats", "--page", "raw", "--csv"]
        return [
            *options,
            "--kernel-name",
            f"regex:^({'|'.join(kernel_names(case['operation']))})$",
            "--launch-count",
            "16",
        ]

    def read(self, ended: Ended) -> dict[str, Any]:
        kernels = stalls(ended.output.splitlines())
        outcome = f"{len(kernels)} kernels" if kernels else in_words(ended, LIMIT)
        return {"outcome": outcome, "ran": bool(kernels), "stalls": kernels}


def kernel_names(operation: str) -> list[str]:
    """The kernels of an operation's folder: those of torch, which make its inputs, are not looked at."""
    sources = (Path(__file__).resolve().parents[2] / "kernels" / operation).glob("*.py")
    return sorted(
        {name for file in sources for name in re.findall(r"^def (\w+_kernel)\(", file.read_text("utf-8"), re.M)}
    )


def stalls(lines: Sequence[str]) -> list[dict[str, Any]]:
    """The stall reasons of every kernel in the CSV that ncu prints, the largest first."""
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    kernels = []
    for row in csv.DictReader(lines[start:]):
        found = {}
        for column, value in row.items():
            reason = STALL.search(column or "")
            number = _number(value)
            if reason and number is not None and not reason[1].endswith("_not_issued"):
                found[reason[1]] = number
        if found and row.get("ID"):
            ordered = sorted(found.items(), key=lambda item: -item[1])
            kernels.append({"kernel": row.get("Kernel Name", "?"), "stalls": dict(ordered)})
    return kernels


def _number(text: object) -> float | None:
    try:
        return float(str(text).replace(",", ""))
    except ValueError:
        return None


sanitizer, ncu = Sanitizer("compute-sanitizer"), NCU("ncu")
