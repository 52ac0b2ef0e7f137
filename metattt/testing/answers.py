"""What a command answers, and whether that is how a mistake is to be answered: a line, exit code 2, in time."""

from __future__ import annotations

import contextlib
import gc
import io
import resource
import signal
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

MAX_LINES = 2  # of an answer
ROOM = 4 * 2**30  # bytes that a command may take beyond what the process has


class Answer(NamedTuple):
    """What came of a command.

    Attributes:
        code: the exit code; None if an exception came instead.
        out, err: what it wrote.
        raised: the exception, with its last frames; empty if there was none.
    """

    code: int | None
    out: str
    err: str
    raised: str

    @property
    def complaint(self) -> str | None:
        """What is wrong with it, as the answer to a mistake; None if it is right."""
        if self.raised:
            return self.raised
        if self.code != 2:
            return f"exit code {self.code}"
        before, error, message = self.err.rpartition("error: ")
        if "this looks like a bug" in message:
            return message[:300]
        if not error or "Traceback" in before + message:
            return f"no line that begins with `error:` but {self.err[-300:]!r}"
        if len(message.strip().splitlines()) > MAX_LINES or not message.strip():
            return f"{len(message.strip().splitlines())} lines: {message[:300]!r}"
        return None


class TooLong(BaseException):
    """A command took longer than it may. (No `Exception`: nothing on the way must take it for its own.)"""


def ask(words: Sequence[str], seconds: float = 60.0) -> Answer:
    """Runs one command in this process, which must be its main thread's, with limits of time and memory."""
    from metattt.cli import main

    out, err, code, raised = io.StringIO(), io.StringIO(), None, ""
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        warnings.catch_warnings(),
        memory_limit(ROOM),
        time_limit(seconds),
    ):
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except TooLong as late:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raised = f"no answer after {seconds:g} s: {_frames(late)}"
        except BaseException as error:
            raised = f"{type(error).__name__}: {error}"[:300] + f" {_frames(error)}"
    gc.collect()
    return Answer(code, out.getvalue(), err.getvalue(), raised)


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises `TooLong` in the main thread after so many seconds, and again every five."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, 5.0)  # and again, should something have caught the first
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def memory_limit(room: int) -> Iterator[None]:
    """At most `room` more bytes of address space than there are now, where the system tells."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    now = int(statm.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _frames(error: BaseException) -> str:
    """The last places of ours that an exception came through."""
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if "/metattt/" in frame.filename]
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(ours[-4:]))
