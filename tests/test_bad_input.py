"""What the checks of settings let through, and what they say of the rest."""

import re

import pytest

from metattt.errors import LARGEST, MetaTTTError, check_flag, check_integer, check_number


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
