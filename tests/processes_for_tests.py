"""Two processes of a training run, as torchrun starts them; they need not import anything anew."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from metattt.cli import main


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
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["metattt.training.train"])
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
