"""Runs a command in a process of its own and says what came of it: a result, one clear error, a traceback, no end, or
something that a file must not make it do."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from metattt.errors import MetaTTTError

RAN = ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "socket.connect", "webbrowser.open")
"""Audit events that no command of ours raises while it reads."""

REMOVED = ("os.remove", "os.rename", "os.rmdir", "os.truncate", "os.chmod", "os.symlink", "os.link", "shutil.rmtree")
LINES = 2  # of an error


class Outcome(NamedTuple):
    """What came of a command.

    Attributes:
        kind: `result`, `error` (one or two lines for the user), `traceback`, `hang`, `memory`, or `code` (it did what no
            file may ask for).
        detail: the result as a text; else the message.
        printed: what it printed.
    """

    kind: str
    detail: str
    printed: str = ""


def run(command: Callable[[], Any], writable: Sequence[Path], seconds: float = 60.0) -> Outcome:
    """Runs a command in a fork of this process.

    Args:
        command: returns what is comparable as a text.
        writable: folders that it may write in.
        seconds: it is killed after.
    """
    with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            _in_child(command, [str(path.resolve()) for path in writable], answer.fileno(), output.fileno())
        ended = _wait(child, seconds)
        answer.seek(0)
        said = answer.read().decode(errors="replace")
        output.seek(0)
        printed = output.read().decode(errors="replace")[-20_000:]
    if said:
        kind, detail = json.loads(said)
        return Outcome(kind, detail, printed)
    if ended is None:
        return Outcome("hang", f"no end after {seconds:.0f} s: {printed}")
    return Outcome("traceback", f"the process ended with {ended}: {printed}")


def _wait(child: int, seconds: float) -> int | None:
    """The status of a process when it has ended; None: it was killed because it did not."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _in_child(command: Callable[[], Any], writable: list[str], answer: int, output: int) -> None:
    """Runs the command, writes what came of it, and ends the process."""
    faults: list[str] = []
    for stream in (1, 2):
        os.dup2(output, stream)
    # what stands for them in this process may write elsewhere: a test runner keeps what is printed
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1, closefd=False) for stream in (1, 2))
    if faulthandler.is_enabled():  # else the trace of a crash goes where the parent's would
        faulthandler.enable(sys.stderr)
    _watch(faults, writable)
    try:
        found = Outcome("result", str(command()))
    except MetaTTTError as error:
        clear = 0 < len(str(error).splitlines()) <= LINES
        found = Outcome("error" if clear else "traceback", str(error))
    except MemoryError as error:
        found = Outcome("memory", str(error))
    except BaseException:
        found = Outcome("traceback", traceback.format_exc())
    if faults:
        found = Outcome("code", "; ".join(faults[:3]))
    os.write(answer, json.dumps(found[:2]).encode())
    os._exit(0)


def _is_probe(event: str, arguments: tuple[Any, ...]) -> bool:
    """Whether a process is ours, that tries a tokenizer out where it can do no harm."""
    words = arguments[1] if event == "subprocess.Popen" else ()
    return list(words[:3]) == [sys.executable, "-P", "-c"]


def _at(arguments: tuple[Any, ...]) -> Any:
    """The path of an audit event, which may be relative to an open folder."""
    folder = arguments[1] if len(arguments) == 2 else arguments[2] if len(arguments) == 4 else -1
    if not isinstance(folder, int) or folder < 0 or isinstance(arguments[0], int):
        return arguments[0]
    return os.path.join(os.readlink(f"/proc/self/fd/{folder}"), os.fsdecode(arguments[0]))


def _watch(faults: list[str], writable: list[str]) -> None:
    """Notes what goes beyond reading: programs, connections, files written or removed elsewhere."""

    def inside(path: Any) -> bool:
        if isinstance(path, int):
            return True
        real = os.path.realpath(os.fsdecode(path))
        return real in ("/dev/null", "/dev/shm") or any(real == one or real.startswith(f"{one}/") for one in writable)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if (event in RAN and not _is_probe(event, arguments)) or (event in REMOVED and not inside(_at(arguments))):
            faults.append(f"{event} {arguments!r:.200}")
        elif event == "open" and arguments[0] is not None:
            mode, flags = arguments[1], arguments[2] if len(arguments) > 2 else 0
            writes = any(letter in (mode or "") for letter in "wax+") or (flags or 0) & (
                os.O_WRONLY | os.O_RDWR | os.O_CREAT
            )
            if writes and not inside(arguments[0]):
                faults.append(f"open for writing {arguments[0]!r:.200}")

    sys.addaudithook(hook)
