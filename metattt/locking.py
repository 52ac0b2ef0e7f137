"""A lock for one process per folder; the operating system releases it when the process dies."""

from __future__ import annotations

import os
import re
import socket
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from metattt.errors import MetaTTTError

LOCK = ".metattt.lock"


class FolderLock:
    """A folder that one process writes to at a time; a context manager.

    The lock is on a small file in the folder, which names its holder. It ends with `release` or with the process,
    however that ends; the file of a dead process is reused.

    Args:
        folder: the folder, which exists.
        what: the purpose of the folder, for the error message: `a training run`.
    """

    def __init__(self, folder: Path, what: str):
        self.folder, self.what = folder, what
        self.file = folder / LOCK
        self._lock = FileLock(self.file, mode=0o644, thread_local=False)

    def acquire(self) -> None:
        """Takes the lock without waiting; does nothing if this object has it already.

        Raises:
            MetaTTTError: another process (or object) has it: names both; or the folder cannot be written to.
        """
        if self._lock.is_locked:
            return
        try:
            self._lock.acquire(blocking=False)
        except Timeout as error:
            known = None
            with suppress(OSError):
                known = re.fullmatch(r"(\d+) (\S+) (.+)\n", self.file.read_bytes()[:512].decode(errors="replace"))
            holder = f"process {known[1]} on {known[2]} ({known[3]})" if known else "another process"
            raise MetaTTTError(
                f"{self.folder} is in use by {holder}: wait until it ends, or choose another folder"
            ) from error
        except OSError as error:
            reason = f"{self.folder} cannot be written to, for {self.what}: {error.strerror or error}"
            raise MetaTTTError(f"{reason}; choose another folder") from error
        with suppress(OSError):
            self.file.write_text(f"{os.getpid()} {socket.gethostname()} {self.what}\n")

    def release(self) -> None:
        """Releases the lock and removes its file; does nothing if this object does not have it."""
        if self._lock.is_locked:
            with suppress(OSError):  # the folder is gone or can no longer be written to; the lock ends all the same
                self.file.unlink()  # while it is locked: whoever opened it before sees that it is gone, and tries again
            self._lock.release(force=True)

    def __enter__(self) -> FolderLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
