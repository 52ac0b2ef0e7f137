"""Signals that ask a run to stop: Ctrl-C, SIGTERM, and SIGUSR1, with which schedulers announce the end of a job's time.

A handler does nothing but to note the signal: the run looks at the note between two steps, in all of its processes
together. (Lightning's own handler sends messages from within, where another message may be under way, and ends the run
with exit code 0 and no checkpoint.)
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
    """Raised between two steps after a signal, when the checkpoint is written.

    Attributes:
        signal: the number of the signal.
    """

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.signal = number

    @property
    def exit_code(self) -> int:
        """As shells have it: 130 after Ctrl-C, 143 after SIGTERM."""
        return 128 + self.signal


class StopRequests:
    """Notes the first signal that asks the run to stop; Ctrl-C after it ends the process at once.

    What comes within half a second of the first is the same Ctrl-C by another way (a launcher passes it on).

    Args:
        last_checkpoint: what the user is told is kept, if a second signal comes.
    """

    def __init__(self, last_checkpoint: Callable[[], str]):
        self.received = 0  # number of the first signal; 0: none
        self.speaks = True  # one of several processes
        self.last_checkpoint = last_checkpoint
        self._since = 0.0
        self._previous: dict[int, Any] = {}

    def listen(self) -> None:
        """Sets the handlers of signals that are not ignored; nothing happens in a thread, where Python allows none."""
        if self._previous or threading.current_thread() is not threading.main_thread():
            return
        # a signal that is ignored stays so: a script's command in the background does not end with another's Ctrl-C
        heard = [number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN]
        self._previous = {number: signal.signal(number, self._note) for number in heard}

    def stop_listening(self) -> None:
        """Puts back the handlers that were there before."""
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
    """Not by print, which may be in the middle of a line of its own and must not be entered twice."""
    os.write(2, f"{line}\n".encode())


def silence_lightning(trainer: Any) -> None:
    """Leaves the handlers of signals to us, and with them the message that looks for a signal before every batch."""
    trainer._signal_connector.register_signal_handlers = _nothing
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = _nothing


def _nothing() -> None:
    pass
