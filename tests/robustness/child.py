"""Runs a command of metattt in a process of its own and says what came of it: a result, one clear error, a traceback,
no end, or something that no file may make it do."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import resource
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

MAX_LINES = 2  # of an error message
MEMORY = 4 * 2**30  # bytes that a command may take beyond what the process has
RAN = ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "socket.connect", "webbrowser.open")
"""Audit events that no command raises while it reads."""
REMOVED = ("os.remove", "os.rename", "os.rmdir", "os.truncate", "os.chmod", "os.symlink", "os.link", "shutil.rmtree")


class Outcome(NamedTuple):
    """What came of a command.

    Attributes:
        kind: `result` (exit code 0), `error` (exit code 2 and one or two lines), `traceback` (any other end), `hang`,
            or `code` (it did what no file may ask for).
        detail: why it is of this kind; of an error its message.
        out, err: what it printed.
    """

    kind: str
    detail: str = ""
    out: str = ""
    err: str = ""


def metattt(words: Sequence[str]) -> int:
    """The command line."""
    from metattt.cli import main

    return main(words)


def run(
    words: Sequence[str], writable: Sequence[Path], seconds: float = 60, main: Callable[[Sequence[str]], int] = metattt
) -> Outcome:
    """Runs a command in a fork of this process, which has imported what takes long.

    Args:
        words: as on the command line.
        writable: folders that it may write in.
        seconds: it is killed after.
        main: another command line than ours, in tests.
    """
    with tempfile.TemporaryFile() as faults, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        files = faults.fileno(), out.fileno(), err.fileno()
        given = files, [str(path.resolve()) for path in writable], words, main
        child = multiprocessing.get_context("fork").Process(target=_in_child, args=given)
        child.start()
        child.join(seconds)
        code = child.exitcode
        child.kill()
        child.join()
        fault, said, errors = (os.pread(file, 2**24, 0).decode(errors="replace") for file in files)
    kind, detail = ("code", fault) if fault else _kind(code, errors)
    return Outcome(kind, detail, said, errors)


def _kind(code: int | None, errors: str) -> tuple[str, str]:
    if code is None:
        return "hang", errors[-300:]
    if code == 0:
        return "result", ""
    before, said, message = errors.rpartition("error: ")
    clear = said and 0 < len(message.strip().splitlines()) <= MAX_LINES and "Traceback" not in before + message
    return ("error", message.strip()) if code == 2 and clear else ("traceback", f"exit code {code}: {errors[-1000:]}")


def _in_child(
    files: tuple[int, int, int], writable: list[str], words: Sequence[str], main: Callable[[Sequence[str]], int]
) -> None:
    faults, *streams = files
    for stream, number in zip(streams, (1, 2), strict=True):
        os.dup2(stream, number)
    # what stands for them in this process may write elsewhere: a test runner keeps what is printed
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    faulthandler.enable(sys.stderr)
    most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
    _watch(faults, writable)
    sys.exit(main(words))


def _watch(faults: int, writable: list[str]) -> None:
    """Writes down what goes beyond reading: programs, connections, files written or removed elsewhere."""

    def is_inside(path: Any, folder: Any = None) -> bool:
        if isinstance(path, int):
            return True
        if isinstance(folder, int) and folder >= 0:  # relative to an open folder
            path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), os.fsdecode(path))
        real = os.path.realpath(os.fsdecode(path))
        return real in ("/dev/null", "/dev/shm") or any(f"{real}/".startswith(f"{one}/") for one in writable)

    def hook(event: str, given: tuple[Any, ...]) -> None:
        wrong = False
        if event in RAN:
            wrong = True
        elif event == "shutil.rmtree" and not os.path.lexists(given[0]):
            pass  # what is not there may be taken away, as a command that could not write does with what it wrote
        elif event in REMOVED:
            wrong = not is_inside(given[0], given[len(given) // 2] if len(given) in (2, 4) else None)
        elif event == "open" and given[0] is not None:
            flags = (given[2] if len(given) > 2 else 0) or 0
            writes = set(given[1] or "") & set("wax+") or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            wrong = bool(writes) and not is_inside(given[0])
        if wrong:
            os.write(faults, f"{event} {given!r:.200}\n".encode())

    sys.addaudithook(hook)
