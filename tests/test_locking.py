"""The lock of a folder: one holder, none that is dead, and one line for whoever comes second."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from metattt.errors import MetaTTTError
from metattt.locking import LOCK, FolderLock

HOLD = (
    "import sys, pathlib\nfrom metattt.locking import FolderLock\n"
    "lock = FolderLock(pathlib.Path(sys.argv[1]), 'a test')\nlock.acquire()\nprint('held', flush=True)\nsys.stdin.read()"
)


def refused(folder: Path) -> str:
    with pytest.raises(MetaTTTError) as error:
        FolderLock(folder, "a second test").acquire()
    assert "\n" not in str(error.value) and str(folder) in str(error.value)
    return str(error.value)


def test_one_holder_and_nothing_left_behind(tmp_path: Path) -> None:
    with FolderLock(tmp_path, "a test") as lock:
        lock.acquire()  # once more is nothing new
        assert f"process {os.getpid()} on {socket.gethostname()} (a test)" in refused(tmp_path)
        (tmp_path / LOCK).write_bytes(b"\xff\x00" * 5000)
        assert "another process" in refused(tmp_path)
    assert not list(tmp_path.iterdir())
    lock.release()
    with FolderLock(tmp_path, "a test"), pytest.raises(ZeroDivisionError), FolderLock(tmp_path.parent, "a test"):
        _ = 1 / 0
    assert not (tmp_path.parent / LOCK).exists() and not list(tmp_path.iterdir())


def test_a_dead_process_holds_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"held\n"
    process.send_signal(signal.SIGSTOP)  # alive, if not well
    assert f"process {process.pid} on {socket.gethostname()} (a test)" in refused(tmp_path)
    process.kill()
    process.wait()
    assert (tmp_path / LOCK).is_file()
    with FolderLock(tmp_path, "a test"):
        assert f"process {os.getpid()}" in refused(tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_locked_is_one_line(tmp_path: Path) -> None:
    (tmp_path / LOCK).mkdir()
    assert "cannot be written to" in refused(tmp_path)
    (tmp_path / LOCK).rmdir()
    (tmp_path / "mine").write_text("mine")
    (tmp_path / LOCK).symlink_to(tmp_path / "mine")
    assert "cannot be written to" in refused(tmp_path) and (tmp_path / "mine").read_text() == "mine"
