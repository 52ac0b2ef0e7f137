"""Processes on this machine that work together through gloo."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from metattt.errors import MetaTTTError


def together(world_size: int, jobs: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], seconds: float) -> list[Any]:
    """Calls functions one after the other in each of several processes that can send each other messages.

    Args:
        world_size: number of processes.
        jobs: functions that a new process can import, with their arguments; called in the same order in every process.
        seconds: for all of it; processes that take longer are ended.

    Returns:
        Of every job, what each process returned (tensors and plain values).

    Raises:
        MetaTTTError: the processes took too long.
        torch.multiprocessing.ProcessException: one of them failed.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(["metattt.training.train"])  # imported once
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        given = (world_size, folder, list(jobs))
        started = torch.multiprocessing.start_processes(_work, given, world_size, join=False, start_method="forkserver")
        while not started.join(max(0.0, end - time.monotonic()), grace_period=10):
            if time.monotonic() > end:
                for process in started.processes:
                    process.kill()
                raise MetaTTTError(f"{world_size} processes were not done after {seconds:.0f} s")
        results = [torch.load(Path(folder, str(rank)), weights_only=True) for rank in range(world_size)]
    return [list(of_job) for of_job in zip(*results, strict=True)]


def _work(rank: int, world_size: int, folder: str, jobs: list[Any]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # what a launcher would say
    torch.set_num_threads(1)
    # A file, not a port: a port that was free a moment ago may be another's by now, and all would wait for it.
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    torch.save([job(*arguments) for job, arguments in jobs], Path(folder, str(rank)))
    dist.barrier()
    dist.destroy_process_group()
