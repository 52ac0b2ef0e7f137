"""Processes on this machine that work together through gloo."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing


def together(world_size: int, jobs: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], seconds: float) -> list[Any]:
    """Calls functions one after the other in each of several processes that can send each other messages.

    Args:
        world_size: number of processes.
        jobs: functions that a new process can import, with their arguments; called in the same order in every process.
        seconds: that a process waits for another, at most.

    Returns:
        Of every job, what each process returned (tensors and plain values).

    Raises:
        torch.multiprocessing.ProcessException: one of them failed, or waited too long.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(["metattt.training.train"])  # imported once
    with tempfile.TemporaryDirectory() as folder:
        given = (world_size, folder, timedelta(seconds=seconds), list(jobs))
        torch.multiprocessing.start_processes(_work, given, world_size, start_method="forkserver")
        results = [torch.load(Path(folder, str(rank)), weights_only=True) for rank in range(world_size)]
    return [list(of_job) for of_job in zip(*results, strict=True)]


def _work(rank: int, world_size: int, folder: str, timeout: timedelta, jobs: list[Any]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # what a launcher would say
    torch.set_num_threads(1)
    # A file, not a port: a port that was free a moment ago may be another's by now, and all would wait for it.
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size, timeout=timeout)
    torch.save([job(*arguments) for job, arguments in jobs], Path(folder, str(rank)))
    dist.barrier()
    dist.destroy_process_group()
