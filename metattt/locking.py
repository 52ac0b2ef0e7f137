"""One process at a time in a folder: a lock that the kernel takes back when the process dies."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import stat
from pathlib import Path
from types import TracebackType

from metattt.errors import MetaTTTError

LOCK = ".metattt.lock"
NOTE_BYTES = 512  # of what the holder says about itself


class FolderLock:
    """A folder that one process writes to at a time; a context manager.

    The lock is on a small file in the folder, which says who holds it. It ends with `release` or with the process,
    however it dies: a file that a dead process left is taken over. Children that the process forks do not hold it.

    Args:
        folder: the folder, which exists.
        what: what the folder is for, in the words of the message: `a training run`.
    """

    def __init__(self, folder: Path, what: str):
        self.folder, self.what = folder, what
        self.file = folder / LOCK
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Takes the lock, and does not wait for it; nothing happens if this object has it already.

        Raises:
            MetaTTTError: another process (or object) has it: names both; or the folder cannot be written to.
        """
        while self._descriptor is None:
            try:
                self._descriptor = self._try()
            except OSError as error:
                raise MetaTTTError(self._reason(error)) from error
        _held.add(self)

    def release(self) -> None:
        """Gives the lock back and removes its file; nothing happens if this object does not have it."""
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        _held.discard(self)
        try:
            if _is_still(descriptor, self.file):
                self.file.unlink()  # while it is locked: whoever opened it before sees that it is gone, and tries again
        except OSError:  # the folder is gone or can no longer be written to; the lock ends all the same
            pass
        finally:
            os.close(descriptor)

    def __enter__(self) -> FolderLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _try(self) -> int | None:
        """The descriptor of the locked file; None if its holder removed it meanwhile.

        Raises:
            MetaTTTError: it is held.
            OSError: it cannot be opened, locked or written.
        """
        # a link is not followed, and a pipe of that name does not block
        descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise MetaTTTError(f"{self.file} is not a file: remove it")
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise MetaTTTError(self._taken(os.pread(descriptor, NOTE_BYTES, 0))) from error
            if not _is_still(descriptor, self.file):
                os.close(descriptor)
                return None
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()} {socket.gethostname()} {self.what}\n".encode(), 0)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _taken(self, note: bytes) -> str:
        known = re.fullmatch(r"(\d+) (\S+) (.+)\n", note.decode(errors="replace"))
        holder = f"process {known[1]} on {known[2]} ({known[3]})" if known else "another process"
        return f"{self.folder} is in use by {holder}: wait until it ends, or choose another folder"

    def _reason(self, error: OSError) -> str:
        if error.errno == errno.ELOOP:
            return f"{self.file} is a link: remove it"
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            return f"{self.folder} is on a file system without locks: choose a folder on another, for {self.what}"
        return f"{self.folder} cannot be written to, for {self.what}: {error.strerror}; choose another folder"


def _is_still(descriptor: int, file: Path) -> bool:
    """Whether an open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), file.lstat())
    except FileNotFoundError:
        return False


_held: set[FolderLock] = set()


def _let_go() -> None:
    """In a forked child: its copies of descriptors are closed, or the lock would outlive the process that took it."""
    for lock in _held:
        if lock._descriptor is not None:
            os.close(lock._descriptor)
            lock._descriptor = None
    _held.clear()


os.register_at_fork(after_in_child=_let_go)
