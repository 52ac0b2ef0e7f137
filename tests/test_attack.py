"""The attack on all that the commands read, at a small size; and that it sees what it looks for."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from metattt.errors import MetaTTTError
from metattt.testing.attack.__main__ import COLUMNS, TAKEN, Tally, attack, classify, lines
from metattt.testing.attack.child import Outcome, run
from metattt.testing.attack.malice import malicious


@pytest.mark.slow
def test_nothing_is_silently_wrong(tmp_path: Path) -> None:
    seed = int(time.time()) % 1000
    tally = attack(tmp_path, count=12, most_malicious=8, most_commands=8, seed=seed, sharded=False)
    assert tally.bad == [], f"seed={seed}"
    reads = sum(counts["reads"] for counts in tally.counts.values())
    assert reads >= 28 and sum(counts["clear error"] for counts in tally.counts.values()) > reads / 2
    assert len(list(lines(tally))) == len(tally.counts) + 3


def test_there_are_enough_malicious_files() -> None:
    every = list(malicious())
    assert len(every) > 200 and len({one.kind for one in every}) >= 12
    assert len({(one.kind, one.name, one.thing) for one in every}) == len(every)


def _error() -> None:
    raise MetaTTTError("one line")


def _long() -> None:
    raise MetaTTTError("one\ntwo\nthree")


def _crash() -> None:
    os.abort()


def _memory() -> None:
    raise MemoryError


def _program() -> None:
    subprocess.run(["true"], check=True)


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (lambda: "x", "result"),
        (_error, "error"),
        (_long, "traceback"),
        (lambda: 1 / 0, "traceback"),
        (_crash, "traceback"),
        (lambda: time.sleep(60), "hang"),
        (_memory, "memory"),
        (_program, "code"),
        (lambda: os.system("true"), "code"),
        (lambda: Path("/tmp/elsewhere-of-attack").write_text("x"), "code"),
        (lambda: os.unlink("/nowhere"), "code"),
    ],
)
def test_what_came_of_a_command_is_seen(tmp_path: Path, command: Callable[[], Any], kind: str) -> None:
    assert run(command, [tmp_path], seconds=2).kind == kind


def test_the_trace_of_a_crash_is_in_its_outcome(tmp_path: Path) -> None:
    """And not in the output of the test runner, which has such traces go past what it captures."""
    assert faulthandler.is_enabled() and "Fatal Python error: Aborted" in run(_crash, [tmp_path], seconds=5).detail


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_what_a_command_prints_is_kept(tmp_path: Path, stream: str) -> None:
    assert run(lambda: print("said", file=getattr(sys, stream)), [tmp_path]).printed == "said\n"


def test_what_a_command_may_write(tmp_path: Path) -> None:
    inside = tmp_path / "inside"

    def write() -> str:
        inside.write_text("x")
        inside.rename(tmp_path / "renamed")
        (tmp_path / "renamed").unlink()
        return "written"

    assert run(write, [tmp_path], seconds=5) == Outcome("result", "written")


def test_columns() -> None:
    same = Outcome("result", "1.0", "")
    assert classify(same, "1.0") == classify(same, None) == "same result" and classify(same, "2.0") == "silently wrong"
    older = Outcome("result", "1.0", f"step-2 {TAKEN}")
    assert classify(older, "2.0", "1.0") == "older one, said" and classify(older, "2.0", "3.0") == "silently wrong"
    assert classify(Outcome("memory", ""), None) == "traceback" and classify(Outcome("code", ""), None) == "code run"
    tally = Tally()
    for column in COLUMNS[1:]:
        tally.add("row", column, column)
    assert len(tally.bad) == 4 and list(lines(tally))[2] == "| row | 7 | 1 | 1 | 1 | 1 | 1 | 1 | 1 |"
