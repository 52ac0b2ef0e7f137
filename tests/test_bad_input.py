"""Commands that are wrong are answered with a line and exit code 2; random ones with that or with a result."""

import contextlib
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from metattt.errors import LARGEST, MetaTTTError, check_flag, check_integer, check_number
from metattt.testing.answers import Answer, ask
from metattt.testing.bad_commands import GROUPS, commands, filled, material
from metattt.testing.fuzz import attempt, fuzz

EVERY = 9  # of the commands that are asked here; all of them are asked by the attack


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder: Path = tmp_path_factory.mktemp("material")
    with contextlib.chdir(folder):
        yield material(folder)


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_bad_commands(group: str, paths: dict[str, str]) -> None:
    found = {}
    first = sum(map(ord, group)) % EVERY  # not the first of every line
    for number, words in enumerate(islice(commands(group), first, None, EVERY)):
        answer = ask(filled(words, paths | {"new": f"{paths['new']}-{group.replace(' ', '-')}-{number}"}))
        if answer.complaint:
            found[" ".join(words)] = answer.complaint
    assert not found


def test_there_are_enough_of_them() -> None:
    assert sum(len(list(commands(group))) for group in GROUPS) >= 900
    assert list(commands("layers"))[:2] == [["layers", "dim=0"], ["layers", "dim=-1"]]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Answer(2, "", "error: no\n", ""), None),
        (Answer(2, "", "step 1\nerror: no\nbut yes\n", ""), None),
        (Answer(0, "", "", ""), "exit code 0"),
        (Answer(2, "", "no\n", ""), "no line"),
        (Answer(2, "", "error: a\nb\nc\n", ""), "3 lines"),
        (Answer(2, "", "Traceback (most recent call last)\nerror: a\n", ""), "no line"),
        (Answer(None, "", "", "KeyError: a"), "KeyError: a"),
    ],
)
def test_complaints(answer: Answer, expected: str | None) -> None:
    assert (answer.complaint is None) == (expected is None) and (expected or "") in (answer.complaint or "")


def test_a_command_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def forever(words: object) -> int:
        while True:
            with contextlib.suppress(Exception):
                pass

    monkeypatch.setattr("metattt.cli.main", forever)
    assert "no answer after 0.2 s" in (ask(["train"], 0.2).complaint or "")


@pytest.mark.slow
def test_fuzz() -> None:
    assert fuzz(20, 1, lambda line: None) == []


def test_a_trial_is_its_seed() -> None:
    assert attempt("3:0")[0] == attempt("3:0")[0] != attempt("3:1")[0]


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        (lambda: check_integer("a", 0), "a=0 is not allowed: it must be at least 1"),
        (lambda: check_integer("a", 9, 1, 8), "a=9 is not allowed: it must be at most 8"),
        (lambda: check_integer("a", True), "a=true is not allowed: it must be an integer, at least 1"),
        (lambda: check_integer("a", 1.0), "a=1.0 is not allowed: it must be an integer, at least 1"),
        (lambda: check_number("a", float("nan")), "a=nan is not allowed: it must be finite"),
        (lambda: check_number("a", 2 * LARGEST), "is not allowed: it must be finite"),
        (lambda: check_number("a", 0, above=0), "a=0 is not allowed: it must be positive and finite"),
        (lambda: check_number("a", 1e-60, above=0), "a=1e-60 is not allowed: in fp32 it is 0"),
        (lambda: check_number("a", 1e-300, least=0), "a=1e-300 is not allowed: in fp32 it is 0, whose neighbour is 1.175e-38"),
        (lambda: check_number("a", -1, least=0), "a=-1 is not allowed: it must be at least 0 and finite"),
        (lambda: check_number("a", 1, least=0, below=1), "a=1 is not allowed: it must be at least 0 and below 1"),
        (lambda: check_number("a", "1"), "a=1 is not allowed: it must be a number, finite"),
        (lambda: check_number("a", None, advice=", or b"), "a=null is not allowed: it must be a number, finite, or b"),
        (lambda: check_flag("a", 1), "a=1 is not allowed: it must be true or false"),
    ],
)  # fmt: skip
def test_checks(check: object, expected: str) -> None:
    with pytest.raises(MetaTTTError, match=re.escape(expected)):
        check()  # type: ignore[operator]


def test_what_checks_let_through() -> None:
    import numpy as np

    for value in (1, np.int64(3), 2**63 - 1):
        check_integer("a", value)
    for number in (0, -1.5, np.float32(2), LARGEST, -0.0):
        check_number("a", number)
    check_number("a", 1, above=0, most=1)
