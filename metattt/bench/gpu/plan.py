"""What a stage measures: jobs, one process each, and their points, one result each. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from metattt.bench.gpu.ledger import DONE, Line, key
from metattt.bench.gpu.subjects import CEILINGS, IN_TURN, NCU, SANITIZER, load
from metattt.bench.gpu.tuned import winners

STAGES = ("correctness", "times", "peers", "tuning", "final")
CHECK, DECODE_CHECK, TIME, DECODE, VARIANT, TOOL = "check", "decode check", "time", "decode", "variant", "tool"
BOTH, FORWARD = "forward + backward", "forward"


class Point(NamedTuple):
    """One result.

    Attributes:
        kind: of measurement, one of those above, or `CEILINGS`, `IN_TURN`.
        subject: what is measured: see `subjects`.
        case: shapes, types and sizes; JSON values.
    """

    kind: str
    subject: str
    case: dict[str, Any]

    @property
    def key(self) -> str:
        """What the result is found by."""
        return key(**self._asdict())

    @property
    def words(self) -> str:
        """For people."""
        case = ", ".join(
            f"{name} {value}" for name, value in self.case.items() if name in SHOWN and value not in (None, False)
        )
        return f"{self.kind} of {self.subject}{': ' + case if case else ''}"


SHOWN = ("turn", "variant", "tool", "operation", "pass", "batch", "heads", "length", "width", "size", "packed")
"""What a line of progress says of a case."""


class Job(NamedTuple):
    """Points that one process takes in turn.

    Attributes:
        name: for people.
        points: in order.
        alone: whether nothing else may run beside it: it is timed.
    """

    name: str
    points: list[Point]
    alone: bool = True


class Case(NamedTuple):
    """One shape of the correctness suite."""

    length: int
    width: int
    size: int
    dtype: str = "bfloat16"
    packed: bool = False
    batch: int = 2
    heads: int = 3


CASES = (
    Case(203, 64, 16),
    Case(203, 64, 16, packed=True, batch=1),
    Case(1100, 64, 16),  # longer than a segment of stored weights
    Case(40, 64, 16, batch=88),  # 264 programs: two for every multiprocessor of an H100
    Case(203, 64, 16, "float32"),
    Case(203, 64, 16, "float16"),
    Case(96, 64, 8),
    Case(150, 64, 32),
    Case(150, 64, 64),
    Case(100, 32, 16),
    Case(100, 96, 16),
    Case(100, 128, 16),
    Case(9, 64, 16),
    Case(1, 64, 16),
)
INTERPRETED = (Case(18, 32, 16, "float32", batch=1, heads=1), Case(9, 32, 8, "float32", batch=1, heads=1))
"""The same on the CPU, where a kernel takes seconds."""


@dataclass(frozen=True)
class Settings:
    """What `GPU` is given, checked; its docstring says what each is."""

    operations: list[str]
    peers: list[str]
    tokens: int
    lengths: list[int]
    num_heads: list[int]
    head_dim: int
    mini_batch_size: int
    dtype: str
    decode_batch: int
    programs: list[int]
    rounds: int
    cases: int | None
    device: str

    def case(self, heads: int, length: int) -> dict[str, Any]:
        """Of a timed call on `tokens` tokens in sequences of `length`."""
        return {
            "heads": heads, "length": length, "tokens": self.tokens, "width": self.head_dim, "size": self.mini_batch_size,
            "dtype": self.dtype, "rounds": self.rounds,
        }  # fmt: skip

    @property
    def shapes(self) -> Iterator[tuple[int, int]]:
        """Heads and length of the timed calls."""
        return ((heads, length) for heads in self.num_heads for length in self.lengths)


def jobs(stage: str, settings: Settings, results: Sequence[Line], say: Callable[[str], None]) -> list[Job]:
    """The jobs of a stage, in order. `results` are those that there are: the last stage depends on them."""
    if stage == "tuning":
        return list(_tuning(settings, say))
    return list(
        {"correctness": _correctness, "times": _times, "peers": _peers}[stage](settings)
        if stage != "final"
        else _final(settings, results)
    )


def _correctness(settings: Settings) -> Iterator[Job]:
    """The shape that is timed first; then the tools; then every other shape by itself: what takes time is to compile its
    kernels, which many processes do at once."""
    timed = (settings.head_dim, settings.mini_batch_size, settings.dtype)
    suite = (CASES if settings.device == "cuda" else INTERPRETED)[: settings.cases]
    first = [case for case in suite if (case.width, case.size, case.dtype) == timed]
    token: dict[str, Any] = {"batch": 5, "heads": 3, "width": settings.head_dim, "size": settings.mini_batch_size}
    for operation in settings.operations:
        points = [Point(CHECK, operation, case._asdict()) for case in first]
        yield Job(f"correctness of {operation}", [*points, Point(DECODE_CHECK, operation, token)], alone=False)
    if settings.device == "cuda":
        yield from _tools(settings)
    for operation in settings.operations:
        for case in suite:
            if case not in first:
                point = Point(CHECK, operation, case._asdict())
                yield Job(f"correctness of {operation} at d {case.width}, b {case.size}", [point], alone=False)


def _tools(settings: Settings) -> Iterator[Job]:
    small = {"width": settings.head_dim, "size": settings.mini_batch_size, "dtype": settings.dtype}
    short, long = 9, 33 * settings.mini_batch_size + 1  # long sequences of few heads may have kernels of their own
    for operation in settings.operations:
        for tool in SANITIZERS:
            for length in (short, long):
                case = {"tool": tool, "operation": operation, "length": length, **small}
                yield Job(f"{tool} of {operation}, T = {length}", [Point(TOOL, SANITIZER, case)], alone=False)
    for operation in settings.operations:
        case = {"operation": operation, "length": long, **small}
        yield Job(f"stall reasons of {operation}", [Point(TOOL, NCU, case)])


SANITIZERS = ("memcheck", "racecheck")


def _times(settings: Settings) -> Iterator[Job]:
    yield Job(CEILINGS, [Point(CEILINGS, CEILINGS, {"dtype": settings.dtype, "rounds": settings.rounds})])
    for operation in settings.operations:
        points = _sequences(settings, operation)
        for heads in settings.num_heads:
            case: dict[str, Any] = {"batch": settings.decode_batch, "heads": heads, "width": settings.head_dim}
            case |= {"size": settings.mini_batch_size, "dtype": settings.dtype, "rounds": settings.rounds}
            points.append(Point(DECODE, operation, case))
        yield Job(f"times of {operation}", points)


def _peers(settings: Settings) -> Iterator[Job]:
    for peer in settings.peers:
        yield Job(f"times of {peer}", _sequences(settings, peer))


def _sequences(settings: Settings, subject: str) -> list[Point]:
    return [
        Point(TIME, subject, {"pass": title, **settings.case(*shape)})
        for shape in settings.shapes
        for title in (BOTH, FORWARD)
    ]


def _tuning(settings: Settings, say: Callable[[str], None]) -> Iterator[Job]:
    """Every other launch against the one that is used, for as many programs at once as `settings.programs` says."""
    heads = settings.num_heads[0]
    for operation in settings.operations:
        points = []
        for programs in settings.programs:
            case = settings.case(heads, settings.tokens * heads // programs)
            try:
                names = list(load(operation).variants(case))
            except Exception as error:  # a module of kernels that does not import must not end the stage
                say(f"{operation} has no other launches to try: {type(error).__name__}: {error}")
                break
            points += [Point(VARIANT, operation, {"variant": name, **case}) for name in names]
        if points:
            yield Job(f"tuning of {operation}", points)


def _final(settings: Settings, results: Sequence[Line]) -> Iterator[Job]:
    """Our operations as tuning found them best, and the best peer of each kind, in turn in one process; twice."""
    for heads, length in settings.shapes:
        case = settings.case(heads, length)
        launches = {
            operation: winners(results, operation, case, heads * settings.tokens // length)
            for operation in settings.operations
        }
        ways = {"operations": settings.operations, "peers": _best(settings, results, case), "launches": launches}
        points = [Point(IN_TURN, IN_TURN, {"turn": turn, **ways, **case}) for turn in (1, 2)]
        yield Job(f"in turn: H = {heads}, T = {length}", points)


def _best(settings: Settings, results: Sequence[Line], case: Mapping[str, Any]) -> list[str]:
    """Of the peers that were timed on `case`, the fastest of each kind: `torch attention, flash` is of the kind `torch
    attention`."""
    fastest: dict[str, tuple[float, str]] = {}
    for line in results:
        of_peer = line["kind"] == TIME and line["state"] == DONE and line["subject"] in settings.peers
        if of_peer and line["case"] == {"pass": BOTH, **case} and "ms, median" in line["found"]:
            took = (line["found"]["ms, median"], line["subject"])
            kind = line["subject"].partition(",")[0]
            fastest[kind] = min(took, fastest.get(kind, took))
    return [name for _, name in sorted(fastest.values())]
