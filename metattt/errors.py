"""The one exception for mistakes that a user can make and mend, and its kind for numbers that are none."""

import difflib
from collections.abc import Iterable


class MetaTTTError(ValueError):
    """A mistake in a value, a file or a shape that the user gave.

    The message is one or two lines: what was wrong, the value, what is allowed, and the override that fixes it. The
    command line prints it as `error: ...` and exits with code 2, without a traceback.
    """


class NotFinite(MetaTTTError):
    """Numbers that are NaN or infinite where a result needs others."""


def check_choice(key: str, value: object, allowed: Iterable[object]) -> None:
    """Refuses a value that is not among `allowed`; `key` is the override that sets it, such as `task.loss`."""
    allowed = list(allowed)
    if value not in allowed:
        near = difflib.get_close_matches(str(value), map(str, allowed), 1)
        hint = f" Did you mean {key}={near[0]}?" if near else ""
        raise MetaTTTError(f"{key}={value} is not allowed: choose from {', '.join(map(str, allowed))}.{hint}")
