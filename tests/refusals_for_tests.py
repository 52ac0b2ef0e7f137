"""What is said of a mistake: a line or two. (From a command: the fixture `told`.)"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from metattt.errors import MetaTTTError


def refusal(
    call: Callable[[], object], *words: str, match: str | None = None, lines: int = 2, longest: int | None = None
) -> str:
    """The message of the `MetaTTTError` that a call raises, which holds every word and a match, in so many lines and characters."""
    with pytest.raises(MetaTTTError, match=match) as caught:
        call()
    said = str(caught.value)
    assert len(said.splitlines()) <= lines and (longest is None or len(said) < longest), said
    assert all(word in said for word in words), said
    return said
