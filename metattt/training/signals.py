"""Signals that ask a run to stop: Ctrl-C, SIGTERM, and SIGUSR1, with which schedulers announce the end of a job's time.

A handler only records the signal; the run checks it between two steps, in all of its processes together. (Lightning's
own handler sends messages from within the handler, possibly during another message, and ends the run with exit code 0
and no checkpoint.)
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
SAME_SIGNAL_SECONDS = 0.5


class Interrupted(Exception):
    """Raised between two steps after a signal, after the checkpoint is written; `exit_code` is that of shells: 130
    after Ctrl-C, 143 after SIGTERM."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


class StopRequests:
    """Records the first signal that asks the run to stop; another Ctrl-C ends the process at once.

    A signal within half a second of the first one is the same Ctrl-C, passed on by a launcher.

    Args:
        last_checkpoint: returns the message about the last checkpoint, for a second signal.
    """

    def __init__(self, last_checkpoint: Callable[[], str]):
        self.received = 0  # number of the first signal; 0: none
        self.speaks = True  # one of several processes
        self.last_checkpoint = last_checkpoint
        self._since = 0.0
        self._previous: dict[int, Any] = {}

    def listen(self) -> None:
        """Sets the handlers of signals that are not ignored; does nothing in a thread, where Python does not allow
        it."""
        if self._previous or threading.current_thread() is not threading.main_thread():
            return
        # a signal that is ignored stays so: a script's command in the background does not end with another's Ctrl-C
        heard = [number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN]
        self._previous = {number: signal.signal(number, self._note) for number in heard}

    def stop_listening(self) -> None:
        """Restores the previous handlers."""
        for number, previous in self._previous.items():
            signal.signal(number, previous if previous is not None else signal.SIG_DFL)
        self._previous.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.received:
            self.received, self._since = number, time.monotonic()
            if self.speaks:
                _say(f"\n{signal.Signals(number).name}: stopping after this step; Ctrl-C again stops at once")
        elif number == signal.SIGINT and time.monotonic() - self._since > SAME_SIGNAL_SECONDS:
            _say(f"stopped at once; {self.last_checkpoint()}")
            os._exit(128 + signal.SIGINT)


def _say(line: str) -> None:
    """Writes without print, which must not be called again while it is running."""
    os.write(2, f"{line}\n".encode())


def silence_lightning(trainer: Any) -> None:
    """Turns off Lightning's signal handlers and its check for signals before every batch."""
    trainer._signal_connector.register_signal_handlers = lambda: None
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
