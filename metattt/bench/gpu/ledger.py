"""The file of results: one JSON object a line, appended by whoever has a result and on the disk before the next is
begun.

A process may die while it writes. A torn last line is not read, and whoever writes next begins a new line. The first
line says what the results depend on; results of other code, another card or other libraries are put aside.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from metattt.errors import MetaTTTError
from metattt.io import sync, write_whole

FILE = "results.jsonl"
DONE, FAILED = "done", "failed"
LONGEST = 2**20  # bytes of a line; real ones have some thousands
DEPENDS = ("code", "card", "torch", "triton")
"""Of the facts in the first line, those without which results cannot be compared."""

Line = dict[str, Any]


class Ledger:
    """Results by key, in a file.

    Args:
        file: where; its folder exists.
    """

    def __init__(self, file: Path):
        self.file = file

    def read(self, start: int = 0) -> tuple[Line, list[Line], int]:
        """The facts of the first line ({} without one), a line for each key, the last that there is, and how many lines
        were none of ours.

        A line is a result if its key is that of its point, and it says what was found or why it failed.

        Args:
            start: byte to begin at, at the start of a line.
        """
        if not self.file.is_file():
            return {}, [], 0
        facts: Line = {}
        results: dict[str, Line] = {}
        junk = 0
        with self.file.open("rb") as stream:
            stream.seek(start)
            while raw := stream.readline(LONGEST):
                line = _object(raw)  # of a torn line there is none: its last brace is missing
                if line is not None and isinstance(line.get("facts"), dict):
                    facts = facts or line["facts"]
                elif line is not None and _is_result(line):
                    results.pop(line["key"], None)  # the order is that of the lines that count
                    results[line["key"]] = line
                elif raw.strip():
                    junk += 1
        return facts, list(results.values()), junk

    def begin(self, facts: Mapping[str, Any]) -> list[str]:
        """Makes the file one for results under `facts`: goes on with what is there, or puts it aside if it depends on
        others.

        Returns:
            What a user should read about it, in lines.

        Raises:
            MetaTTTError: there is something else of that name.
        """
        if self.file.exists() and not self.file.is_file():
            raise MetaTTTError(f"{self.file} is not a file: remove it, or choose another output_dir")
        there, results, junk = self.read()
        lines = [f"{junk} lines of {self.file} are damaged or no results: left out"] if junk else []
        changed = [
            f"{name} {there.get(name, 'unknown')}, now {facts.get(name)}"
            for name in DEPENDS
            if there.get(name) != facts.get(name)
        ]
        if not self.file.exists():
            pass
        elif not changed:
            return [*lines, f"{len(results)} results are there already: {self.file}"] if results else lines
        elif results or junk:
            aside = next(
                path for n in range(1, 10**6) if not (path := self.file.with_name(f"results-{n}.jsonl")).exists()
            )
            self.file.rename(aside)
            lines.append(
                f"starting anew ({'; '.join(changed)}): {len(results)} results are kept in {aside.name}, and not used"
            )
        write_whole(self.file, _bytes({"facts": dict(facts)}))
        return lines

    def append(self, line: Line) -> None:
        """Adds a line, and returns once it is on the disk."""
        descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            content = (b"\n" if torn else b"") + _bytes(line)
            while content:
                content = content[os.write(descriptor, content) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if size == 0:
            sync(self.file.parent)

    def size(self) -> int:
        """Bytes of the file: it grows with every result."""
        return self.file.stat().st_size if self.file.is_file() else 0


def key(kind: str, subject: str, case: Mapping[str, Any]) -> str:
    """What a result is found by: its kind of measurement, what is measured, and shapes, types and sizes."""
    return f"{kind}: {subject}: " + " ".join(f"{name}={json.dumps(value)}" for name, value in case.items())


def done(point: Mapping[str, Any], found: Mapping[str, Any], seconds: float) -> Line:
    """The line of a result. `point` has `kind`, `subject` and `case`."""
    return {"key": key(**point), "state": DONE, **point, "found": dict(found), "seconds": round(seconds, 3)}


def failed(point: Mapping[str, Any], reason: str, seconds: float) -> Line:
    """The line of a point that gave none, and why."""
    return {"key": key(**point), "state": FAILED, **point, "reason": reason, "seconds": round(seconds, 3)}


def _is_result(line: Line) -> bool:
    kind, subject, case = (line.get(name) for name in ("kind", "subject", "case"))
    known = (
        isinstance(kind, str)
        and isinstance(subject, str)
        and isinstance(case, dict)
        and line.get("key") == key(kind, subject, case)
        and isinstance(line.get("seconds"), int | float)
    )
    found = (line.get("state") == DONE and isinstance(line.get("found"), dict)) or (
        line.get("state") == FAILED and isinstance(line.get("reason"), str)
    )
    return known and found


def _object(raw: bytes) -> Line | None:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):  # no JSON, no UTF-8; nested without end
        return None
    return line if isinstance(line, dict) else None


def _bytes(line: Line) -> bytes:
    return json.dumps(_plain(line), ensure_ascii=False, allow_nan=False).encode() + b"\n"


def _plain(value: Any) -> Any:
    """With texts for numbers that JSON does not have: `nan`, `inf`."""
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
