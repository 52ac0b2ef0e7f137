"""What all benchmarks share: settings as `key=value`, a check before anything is timed, and times in turn."""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from metattt.errors import MetaTTTError

T = TypeVar("T")
Name = TypeVar("Name")
Say = Callable[[str], None]  # shows a line of progress
Row = dict[str, Any]  # of a table: JSON values by column


def some(*values: Any) -> Any:
    """The default of a field that is a list."""
    return dataclasses.field(default_factory=lambda: list(values))


def settings(kind: type[T], words: Sequence[str]) -> T:
    """An instance of a dataclass, with fields as they are given: `key=value`.

    Raises:
        MetaTTTError: no such field, or a value of another type; of integers, one below 1.
    """
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    if bare := [word for word in words if "=" not in word]:
        raise MetaTTTError(f"`{bare[0]}` is no setting: give key=value, of {', '.join(names)}")
    try:
        made: Any = OmegaConf.merge(OmegaConf.structured(kind), OmegaConf.from_dotlist(list(words)))
        found: Any = OmegaConf.to_object(made)
    except OmegaConfBaseException as error:
        told = f"{getattr(error, 'full_key', None) or ''}: {str(error).splitlines()[0]}".lstrip(": ")
        raise MetaTTTError(f"{told}; settings are {', '.join(names)}") from error
    for name in names:
        value = getattr(found, name)
        values = value if isinstance(value, list) else [value]
        least = 0 if name in getattr(kind, "MAY_BE_ZERO", ()) else 1
        wrong = [one for one in values if isinstance(one, int) and not isinstance(one, bool) and one < least]
        if wrong or (values == [] and name not in getattr(kind, "MAY_BE_EMPTY", ())):
            allowed = f"integers from {least} on" if wrong else "one or more"
            raise MetaTTTError(f"{name}={value} is not allowed: give {allowed}")
    return found


def exit_code(function: Callable[[Sequence[str]], int], stopped: str = "nothing is written") -> int:
    """Of a script: what a user can mend is one line and exit code 2; Ctrl-C says what that costs."""
    try:
        return function(sys.argv[1:])
    except MetaTTTError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"stopped: {stopped}", file=sys.stderr)
        return 130


# -- checks ------------------------------------------------------------------------------------------------------------


class Check(NamedTuple):
    """A comparison that was made before anything was timed: the relative error, and what it may be at most."""

    name: str
    error: float
    bound: float


def require(name: str, error: float, bound: float) -> Check:
    """A passed check.

    Raises:
        MetaTTTError: the error is above the bound, or not a number.
    """
    if not error <= bound:
        raise MetaTTTError(f"nothing is reported: {name}: relative error {error:.1e} is above {bound:.0e}")
    return Check(name, error, bound)


# -- times -------------------------------------------------------------------------------------------------------------


class Summary(NamedTuple):
    """Smallest, middle and largest of several measurements."""

    least: float
    median: float
    most: float

    def columns(self, unit: str, scale: float = 1.0) -> Row:
        """As columns of a table, such as `ms, median`."""
        return {f"{unit}, {key}" if unit else key: scale * value for key, value in self._asdict().items()}


def summary(values: Sequence[float]) -> Summary:
    return Summary(min(values), statistics.median(values), max(values))


def ratios(slower: Sequence[float], faster: Sequence[float]) -> Summary:
    """How many times longer the one took than the other, round by round."""
    return summary([a / b for a, b in zip(slower, faster, strict=True)])


def in_turn(functions: Mapping[Name, Callable[[], object]], rounds: int, warmup: int = 1) -> dict[Name, list[float]]:
    """Seconds of every call, by name: each round calls every function once, so that a busy machine slows all alike.

    `torch.utils.benchmark` times one function after the other, which other programs on the machine then favour or not.

    Args:
        functions: what to time.
        rounds: measured calls of each.
        warmup: calls of each before that.
    """
    seconds: dict[Name, list[float]] = {name: [] for name in functions}
    for number in range(warmup + rounds):
        for name, function in functions.items():
            took = measure(function)
            if number >= warmup:
                seconds[name].append(took)
    return seconds


def measure(function: Callable[[], object]) -> float:
    """Seconds of one call; work on a GPU is waited for."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    started = time.perf_counter()
    function()
    wait()
    return time.perf_counter() - started


def product(device: torch.device, dtype: torch.dtype) -> tuple[Callable[[], object], float]:
    """Ten products of 1,024 x 1,024 (CPU) or 8,192 x 8,192 (GPU) numbers, and their operations."""
    side = 1024 if device.type == "cpu" else 8192
    a = torch.randn(side, side, device=device, dtype=dtype)
    return (lambda: [torch.mm(a, a) for _ in range(10)]), 20.0 * side**3


def reading(device: torch.device, dtype: torch.dtype) -> tuple[Callable[[], object], float]:
    """A product of a large matrix and a vector, and the bytes that it reads."""
    side = 8192 if device.type == "cpu" else 32768
    a, x = torch.ones(side, side, device=device, dtype=dtype), torch.ones(side, device=device, dtype=dtype)
    return (lambda: a @ x), float(a.nbytes)


def rate(call: Callable[[], object], work: float) -> float:
    """Work a second, in the best of five calls."""
    return work / min(in_turn({"call": call}, 5)["call"])
