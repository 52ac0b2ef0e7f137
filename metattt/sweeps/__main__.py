"""The process of one run of a sweep: `python -m metattt.sweeps train ...` is `metattt train ...`, and stops when the
sweep is gone."""

import os
import signal
import sys
import threading
import time


def live() -> int:
    """The command line."""
    sweep = os.getppid()  # before the import, during which it may die
    from metattt.cli import main

    threading.Thread(target=_follow, args=(sweep,), daemon=True, name="sweep").start()
    return main()


def _follow(sweep: int) -> None:
    """When the process that started the run has died, the run writes a checkpoint and stops."""
    while os.getppid() == sweep:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(live())
