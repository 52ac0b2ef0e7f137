"""A lock for one process per folder; the operating system releases it when the process dies."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from metattt.errors import MetaTTTError

LOCK = ".metattt.lock"


@contextmanager
def locked(folder: Path, what: str) -> Iterator[None]:
    """A context in which this process alone writes to a folder.

    The lock is on a small file in the folder, which names its holder. It ends with the context or with the process,
    however that ends; the file of a dead process is reused.

    Args:
        folder: the folder, which exists.
        what: the purpose of the folder, for the error message: `a training run`.

    Raises:
        MetaTTTError: another process (or context) has it: names both; or the folder cannot be written to.
    """
    file = folder / LOCK
    lock = FileLock(file, mode=0o644, thread_local=False)
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        known = None
        with suppress(OSError):
            known = re.fullmatch(r"(\d+) (\S+) (.+)\n", file.read_bytes()[:512].decode(errors="replace"))
        holder = f"process {known[1]} on {known[2]} ({known[3]})" if known else "another process"
        raise MetaTTTError(f"{folder} is in use by {holder}: wait until it ends, or choose another folder") from error
    except OSError as error:
        reason = f"{folder} cannot be written to, for {what}: {error.strerror or error}"
        raise MetaTTTError(f"{reason}; choose another folder") from error
    try:
        with suppress(OSError):
            file.write_text(f"{os.getpid()} {socket.gethostname()} {what}\n")
        yield
    finally:
        with suppress(OSError):  # the folder is gone or can no longer be written to; the lock ends all the same
            file.unlink()  # while it is locked: whoever opened it before sees that it is gone, and tries again
        lock.release(force=True)
