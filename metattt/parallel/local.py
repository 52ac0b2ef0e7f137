"""Processes on this machine that work together through gloo: for benchmarks and tests."""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from metattt.errors import MetaTTTError


def together(world_size: int, jobs: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], seconds: float) -> list[Any]:
    """Runs functions one after the other in processes that can send each other messages.

    Args:
        world_size: number of processes.
        jobs: functions that a new process can import, with their arguments; called in the same order in every process.
        seconds: for all of it; a process that takes longer is ended.

    Returns:
        Of every job, what each process returned (tensors and plain values).

    Raises:
        MetaTTTError: a process that failed, with its traceback, or took too long.
    """
    context = multiprocessing.get_context("forkserver")  # they share what has been imported
    context.set_forkserver_preload(["metattt.training.train"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_work, args=(rank, world_size, port, folder, list(jobs)))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0, end - time.monotonic()))
            process.kill()
        for rank in range(world_size):
            if (said := Path(folder) / f"error_{rank}").is_file():
                raise MetaTTTError(f"process {rank} of {world_size} failed:\n{said.read_text()}")
        missing = [rank for rank in range(world_size) if not (Path(folder) / f"result_{rank}").is_file()]
        if missing:
            raise MetaTTTError(f"processes {missing} of {world_size} ended without a result, or not within {seconds:.0f} s")
        results = [torch.load(Path(folder) / f"result_{rank}", weights_only=True) for rank in range(world_size)]
    return [list(of_job) for of_job in zip(*results, strict=True)]


def _work(rank: int, world_size: int, port: int, folder: str, jobs: list[Any]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
        torch.save([job(*arguments) for job, arguments in jobs], Path(folder) / f"result_{rank}")
        dist.barrier()
        dist.destroy_process_group()
    except Exception:
        (Path(folder) / f"error_{rank}").write_text(traceback.format_exc())
