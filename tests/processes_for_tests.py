"""Processes that need not import anything anew: two of a training run, as torchrun starts them, and programs as `python`
runs them."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path

import torch

from metattt.cli import main

PRELOADED = ["metattt.training.train"]
LEFT_BEHIND = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", "RANK")
"""What Lightning leaves in the environment of a process that has trained."""


class Program:
    """`python <words>`, in a fork of a process that has imported what training needs: ten seconds less than an
    interpreter of its own. Processes that it starts itself are interpreters as ever.

    It has the arguments, `__main__`, environment, working directory, signals and exit of a program.

    Args:
        words: `-m`, a module and its arguments; or a file and its arguments.
        folder: for `out.txt` and `err.txt`, what it prints.
        environment: None: as here; without what `LEFT_BEHIND` names and is still as it was left.
        session: it gets one of its own.
    """

    def __init__(
        self, *words: str, folder: Path, environment: Mapping[str, str] | None = None, session: bool = False
    ) -> None:
        self.out, self.err = folder / "out.txt", folder / "err.txt"
        given = os.environ if environment is None else environment
        left = {name: os.environ.get(name) for name in LEFT_BEHIND}
        clean = {name: value for name, value in given.items() if value != left.get(name)} | {"OMP_NUM_THREADS": "1"}
        arguments = (words, str(self.out), str(self.err), os.getcwd(), clean, session)
        self._process = _context().Process(target=_program, args=arguments)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        atexit.register(self.kill)  # where a test fails

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.exitcode

    def wait(self, seconds: float | None = None) -> int:
        """The exit code, when it has ended.

        Raises:
            subprocess.TimeoutExpired: it has not by then.
        """
        self._process.join(seconds)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.pid), seconds or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def done(self, seconds: float = 300) -> subprocess.CompletedProcess[str]:
        """When it has ended: its exit code and what it has printed."""
        code = self.wait(seconds)
        return subprocess.CompletedProcess(str(self.pid), code, self.out.read_text(), self.err.read_text())


FORKS = """
import json, os, sys, traceback
for module in json.loads(sys.argv[1]):
    __import__(module)
for program in json.loads(sys.argv[2]):
    child = os.fork()
    if not child:
        try:
            exec(program, {})
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(program)
"""


def fresh(imported: Sequence[str], programs: Sequence[str]) -> str:
    """What programs print, each in an interpreter that has imported nothing but these modules (of others).

    Raises:
        AssertionError: one has failed, with its traceback.
    """
    command = [sys.executable, "-c", FORKS, json.dumps(imported), json.dumps(programs)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _program(
    words: tuple[str, ...], out: str, err: str, folder: str, environment: dict[str, str], session: bool
) -> None:
    if session:
        os.setsid()
    for stream, file in ((1, out), (2, err)):
        with open(file, "wb") as output:
            os.dup2(output.fileno(), stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined] # of whoever it starts, it is the first
    try:
        if words[0] == "-m":
            sys.argv = list(words[1:])
            sys.modules.pop(f"{words[1]}.__main__", None)  # runpy warns of a module that has been imported
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(words)
            runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def nothing(rank: int) -> None:
    """What the processes do first, if nothing is to go wrong."""


def _process(rank: int, port: int, folder: str, overrides: tuple[str, ...], first: Callable[[int], None]) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "test"}
    with open(f"{folder}/{rank}.txt", "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    torch.set_num_threads(1)
    first(rank)
    sys.exit(main(["train", *overrides]))


def two_processes(
    folder: Path, *overrides: str, first: Callable[[int], None] = nothing
) -> tuple[list[int | None], str]:
    """Exit codes of `metattt train` in two processes, and what the first has printed.

    Args:
        folder: for what they print.
        overrides: of the command.
        first: what a process does with its rank before anything else; it can be pickled.
    """
    context = _context()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = partial(_process, port=port, folder=str(folder), overrides=overrides, first=first)
    processes = [context.Process(target=start, args=(rank,)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
        process.kill()
    return [process.exitcode for process in processes], (folder / "0.txt").read_text()
