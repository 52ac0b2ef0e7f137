"""The exception for invalid user input, a subclass for NaN and infinity, and checks of values."""

import difflib
import numbers
import re
from collections.abc import Iterable
from typing import Any

SMALLEST, LARGEST = 2.0**-126, 2.0**127
"""The range of absolute values that a setting may have besides 0: the inner loop computes with them in float32."""


class MetaTTTError(ValueError):
    """A mistake in a value, a file or a shape that the user gave.

    The message is one or two lines: what was wrong, the value, what is allowed, and the override that fixes it. The
    command line prints it as `error: ...` and exits with code 2, without a traceback.
    """

    said = False  # whether one of several processes has printed it for all


class NotFinite(MetaTTTError):
    """NaN or infinity where finite numbers are needed."""


def did_you_mean(value: object, allowed: Iterable[object], key: str = "") -> str:
    """The question, after a space, for the allowed value that looks most like this one; nothing if none does."""
    near = difflib.get_close_matches(str(value), map(str, allowed), 1)
    quote = "'" if near and " " in near[0] else ""
    return f" Did you mean {quote}{key}{near[0]}{quote}?" if near else ""


def check_choice(key: str, value: object, allowed: Iterable[object]) -> None:
    """Raises an error if a value is not among `allowed`; `key` is the override that sets it, such as `task.loss`."""
    allowed = list(allowed)
    if value not in allowed:
        hint = did_you_mean(value, allowed, f"{key}=")
        raise MetaTTTError(f"{_said(key, value)}: choose from {', '.join(map(str, allowed))}.{hint}")


def check_integer(key: str, value: object, least: int = 1, most: int = 2**63 - 1, advice: str = "") -> None:
    """Raises an error if a value is not an integer from `least` to `most`; `key` is the override that sets it.

    Args:
        advice: what else there is to say, for the end of the line.
    """
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if whole and least <= value <= most:  # type: ignore[operator]
        return
    below = whole and value < least  # type: ignore[operator]
    bounds = f"at least {least}" if most == 2**63 - 1 or below else f"at most {most:,}"
    raise MetaTTTError(f"{_said(key, value)}: it must be {bounds if whole else 'an integer, ' + bounds}{advice}")


def check_number(
    key: str,
    value: object,
    *,
    least: float = -LARGEST,
    most: float = LARGEST,
    above: float | None = None,
    below: float | None = None,
    advice: str = "",
) -> None:
    """Raises an error if a value is not a finite number in a range; `key` is the override that sets it.

    Args:
        least, most: the range with its ends.
        above, below: ends that are not in it, in their places.
        advice: what else there is to say, for the end of the line.
    """
    number: Any = value
    low, high = least if above is None else above, most if below is None else below
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if real and low <= number <= high and number not in (above, below) and (number == 0 or abs(number) >= SMALLEST):
        return
    if real and 0 < abs(number) < SMALLEST:
        raise MetaTTTError(f"{_said(key, value)}: in fp32 it is 0, whose neighbour is {SMALLEST:.4g}{advice}")
    start = f"at least {low:g}" if above is None else "positive" if low == 0 and high == LARGEST else f"above {low:g}"
    end = "finite" if high == LARGEST else f"at most {high:g}" if below is None else f"below {high:g}"
    span = end if low == -LARGEST and high == LARGEST else f"{start} and {end}"
    raise MetaTTTError(f"{_said(key, value)}: it must be {'' if real else 'a number, '}{span}{advice}")


def check_flag(key: str, value: object, words: Iterable[str] = (), advice: str = "") -> None:
    """Raises an error if a value is not True, False or one of `words`; `key` is the override that sets it.

    Args:
        advice: which of the words true means.
    """
    if not isinstance(value, bool) and value not in (words := list(words)):
        allowed = f"true{advice}, false or one of {', '.join(words)}" if words else "true or false"
        raise MetaTTTError(f"{_said(key, value)}: it must be {allowed}")


def check_heads(dim: int, num_heads: int) -> None:
    """Raises an error if the number of heads does not divide the width of a layer."""
    if dim % num_heads:
        raise MetaTTTError(f"num_heads={num_heads} does not divide dim={dim}: choose num_heads from {divisors(dim)}")


def divisors(number: int) -> str:
    """The divisors of a number, up to 4096, for an error message."""
    return ", ".join(str(n) for n in range(1, min(number, 2**12) + 1) if number % n == 0)


def shown(value: object) -> str:
    """A value as it is written in an override."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(shown, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}: {shown(one)}' for key, one in value.items())}}}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def printable(text: str) -> str:
    """A text for a terminal: control characters, which could steer it, are written out as `\\x1b`. Joiners, as in
    emoji, stay."""
    kept = "\n\t\u200c\u200d"
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)


def _said(key: str, value: object) -> str:
    text = isinstance(value, str) and re.fullmatch(r"[-+.\de]+|true|false|null", value, re.IGNORECASE)
    found = repr(value) if text else " ".join(shown(value).split())  # "16" is not the number 16
    return f"{key}={found[:100]} is not allowed"
