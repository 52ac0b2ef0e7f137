"""The attacks at a small size, and what they take for what."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attack
import child
import pytest
from attack import Artifacts, Tally, read_damaged, read_malicious
from child import run

Main = Callable[[Sequence[str]], int]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder: Path = tmp_path_factory.mktemp("attack")
    Artifacts(folder, ("run", "published"))
    with contextlib.chdir(folder):
        yield folder


# -- what came of a command --------------------------------------------------------------------------------------------


def says(text: str, code: int) -> Main:
    def main(words: Sequence[str]) -> int:
        print(text, file=sys.stderr)
        return code

    return main


@pytest.mark.parametrize(
    ("main", "kind"),
    [
        (says("step 1", 0), "result"),
        (says("step 1\nerror: no\nbut yes", 2), "error"),
        (says("error: one\ntwo\nthree", 2), "traceback"),
        (says("Traceback (most recent call last)\nerror: a", 2), "traceback"),
        (lambda words: os.abort(), "traceback"),
        (lambda words: len(bytearray(2 * child.MEMORY)), "traceback"),
        (lambda words: time.sleep(60), "hang"),
        (lambda words: subprocess.run(["true"], check=True).returncode, "code"),
        (lambda words: Path("/tmp/elsewhere-of-attack").write_text("x"), "code"),
        (lambda words: os.unlink("/nowhere"), "code"),
    ],
)
def test_what_came_of_a_command_is_seen(main: Main, kind: str, tmp_path: Path) -> None:
    assert run([], [tmp_path], seconds=3, main=main).kind == kind


# -- the attacks, with ours and with careless commands -----------------------------------------------------------------


def test_nothing_is_silently_wrong(home: Path) -> None:
    seed = int(time.time()) % 1000
    tally, draw, artifacts = Tally(), random.Random(seed), Artifacts(home)
    read_damaged(artifacts, 12, draw, tally)
    read_malicious(artifacts, 8, draw, tally)
    assert tally.bad == [], f"seed={seed}"
    reads = sum(counts["reads"] for counts in tally.values())
    assert reads >= 20 and sum(counts["clear error"] for counts in tally.values()) > reads / 2


def test_bad_commands(tmp_path: Path) -> None:
    seed = int(time.time()) % 1000
    tally = Tally()
    (tmp_path / "commands").mkdir()
    with contextlib.chdir(tmp_path):
        attack.run_bad_commands(tmp_path / "commands", 60, random.Random(seed), tally)
    assert tally.bad == [], f"seed={seed}"
