"""A command in a process group of its own, which ends with its limit of time, with ours, or by itself."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

POLL = 0.05  # seconds between two looks at a process
TAIL = 2000  # characters of a process's output that are kept, unless more are asked for

# Runs first in the new process: it is killed when its parent dies, however that dies, and stays so through exec.
BOUND = (
    "import ctypes, os, signal, sys\n"
    "getattr(ctypes.CDLL(None), 'prctl', lambda *_: 0)(1, signal.SIGKILL)\n"
    "os.getppid() == int(sys.argv[1]) or os._exit(1)\n"
    "os.execvp(sys.argv[2], sys.argv[2:])\n"
)


class Ended(NamedTuple):
    """How a process ended.

    Attributes:
        code: as `subprocess` has it: negative for a signal.
        late: the limit that it was stopped at: `limit`, `deadline`, or None.
        output: the end of what it wrote to stdout and stderr.
    """

    code: int
    late: str | None
    output: str


def run(
    command: Sequence[str],
    given: Any = None,
    *,
    limit: float,
    deadline: float = float("inf"),
    progress: Callable[[], object] = lambda: None,
    stopped: Callable[[], bool] = lambda: False,
    environment: Mapping[str, str] | None = None,
    keep: int = TAIL,
) -> Ended:
    """Runs a command to its end, or to one of its limits: then it is killed with all processes that it began.

    Args:
        command: program and arguments; the program is looked for on the path.
        given: written to its stdin as JSON.
        limit: seconds that may pass without `progress` returning something new.
        deadline: of `time.monotonic()`, for the whole.
        progress: asked again and again.
        stopped: likewise; once it says so, the process ends as at its deadline.
        environment: variables beside ours.
        keep: characters of the output, of its end.
    """
    with tempfile.TemporaryFile() as input_, tempfile.TemporaryFile() as output:
        input_.write(json.dumps(given).encode())
        input_.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", BOUND, str(os.getpid()), *command],
            stdin=input_,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is ours to hand on, and the group is killed as one
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            | dict(environment or {}),
        )
        late = None
        try:
            seen, since = progress(), time.monotonic()
            while not _over(process) and late is None:
                time.sleep(POLL)
                now, at = progress(), time.monotonic()
                if now != seen:
                    seen, since = now, at
                late = "deadline" if at > deadline or stopped() else "limit" if at - since > limit else None
        finally:
            _kill(process)
        return Ended(process.returncode, late, _tail(output, keep))


def in_words(ended: Ended, limit: float) -> str:
    """Why a process gave no result, in a line."""
    if ended.late is not None:
        return f"past its limit of {limit:g} s"
    if ended.code < 0:
        return f"killed by {_signal_name(-ended.code)}"
    said = [line.strip() for line in ended.output.splitlines() if line.strip()]
    return f"its process ended with code {ended.code}{': ' + said[-1][:300] if said else ''}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _over(process: subprocess.Popen[bytes]) -> bool:
    """Whether it has ended. It is not waited for yet: until then its number, and so its group's, is nobody else's."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The whole group: what a process that has ended left behind as well."""
    if process.returncode is None:
        with contextlib.suppress(
            ProcessLookupError, PermissionError
        ):  # PermissionError: a group of the dead, on some systems
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def die_with_parent() -> None:
    """This process is killed when the one that began it ends, however it does; where the system can."""
    getattr(ctypes.CDLL(None), "prctl", lambda *_: 0)(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _tail(output: Any, keep: int) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - 4 * keep))
    return str(output.read().decode(errors="replace")[-keep:])
