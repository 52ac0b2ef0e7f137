"""Runs the commands that are wrong, each in a process of its own."""

from __future__ import annotations

import contextlib
import io
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from metattt.errors import MetaTTTError
from metattt.testing.answers import Answer
from metattt.testing.attack.child import Outcome, run
from metattt.testing.bad_commands import GROUPS, commands, filled, material


def run_commands(folder: Path, most: int | None, seed: int, seconds: float) -> Iterator[tuple[str, str, Outcome]]:
    """Runs commands that are wrong.

    Args:
        folder: a new folder, for what they name and where they run.
        most: number of commands, drawn from all; None: all.
        seed: of the draw.
        seconds: that one may take.

    Yields:
        The group of a command, its words, and what came of it: `error` is exit code 2 with one or two lines.
    """
    folder.mkdir(parents=True)
    paths = material(folder)
    groups = [(group, words) for group in GROUPS for words in commands(group)]
    # each with an output folder of its own: one that is taken would have the next refused
    every = [(one[0], filled(one[1], paths | {"new": f"{paths['new']}-{n}"})) for n, one in enumerate(groups)]
    if most is not None:
        every = random.Random(seed).sample(every, min(most, len(every)))
    before = os.getcwd()
    os.chdir(folder)
    try:
        for group, words in every:
            yield group, " ".join(words), run(_command(words), [folder], seconds)
    finally:
        os.chdir(before)


def _command(words: list[str]) -> Callable[[], str]:
    def command() -> str:
        from metattt.cli import main

        out, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            code = main(words)
        answer = Answer(code, out.getvalue(), errors.getvalue(), "")
        if answer.complaint is None:
            raise MetaTTTError(answer.err.rpartition("error: ")[2].strip())
        if code == 2:
            raise RuntimeError(f"exit code 2: {answer.complaint}")
        return f"taken, exit code {code}: {answer.out[-300:]}"

    return command
