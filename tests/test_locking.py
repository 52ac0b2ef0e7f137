"""The lock of a folder: one holder, none that is dead, and one line for whoever comes second."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from refusals_for_tests import refusal

from metattt.locking import LOCK, locked

HOLD = (
    "import sys, pathlib\nfrom metattt.locking import locked\n"
    "with locked(pathlib.Path(sys.argv[1]), 'a test'):\n    print('held', flush=True)\n    sys.stdin.read()"
)


def refused(folder: Path) -> str:
    return refusal(lambda: locked(folder, "a second test").__enter__(), str(folder), lines=1)


def test_one_holder_and_nothing_left_behind(tmp_path: Path) -> None:
    with locked(tmp_path, "a test"):
        assert f"process {os.getpid()} on {socket.gethostname()} (a test)" in refused(tmp_path)
        (tmp_path / LOCK).write_bytes(b"\xff\x00" * 5000)
        assert "another process" in refused(tmp_path)
    assert not list(tmp_path.iterdir())
    with locked(tmp_path, "a test"), pytest.raises(ZeroDivisionError), locked(tmp_path.parent, "a test"):
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
    with locked(tmp_path, "a test"):
        assert f"process {os.getpid()}" in refused(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_child_does_not_hold_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    done = context.Event()
    with locked(tmp_path, "a test"):
        child = context.Process(target=done.wait, args=(30,))
        child.start()
        assert "in use" in refused(tmp_path)
    with locked(tmp_path, "a test"):  # the child lives
        assert child.is_alive()
    done.set()
    child.join()


def test_what_cannot_be_locked_is_one_line(tmp_path: Path) -> None:
    (tmp_path / LOCK).mkdir()
    assert "cannot be written to" in refused(tmp_path)
    (tmp_path / LOCK).rmdir()
    (tmp_path / "mine").write_text("mine")
    (tmp_path / LOCK).symlink_to(tmp_path / "mine")
    assert "cannot be written to" in refused(tmp_path) and (tmp_path / "mine").read_text() == "mine"
