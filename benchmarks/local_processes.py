"""Processes on this machine that work together through gloo."""

from __future__ import annotations

import multiprocessing
import os
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
        seconds: for all of it; processes that take longer are ended.

    Returns:
        Of every job, what each process returned (tensors and plain values).

    Raises:
        MetaTTTError: a process that failed, with its traceback, or took too long.
    """
    context = multiprocessing.get_context("forkserver")  # they share what has been imported
    context.set_forkserver_preload(["metattt.training.train"])
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        given = (world_size, folder, list(jobs))
        processes = [context.Process(target=_work, args=(rank, *given)) for rank in range(world_size)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0, end - time.monotonic()))
            process.kill()
        for said in sorted(Path(folder).glob("error_*")):
            raise MetaTTTError(f"a process of {world_size} failed ({said.name}):\n{said.read_text()}")
        files = [Path(folder) / f"result_{rank}" for rank in range(world_size)]
        if missing := [rank for rank, file in enumerate(files) if not file.is_file()]:
            told = f"processes {missing} of {world_size} ended without a result"
            raise MetaTTTError(f"{told}, or not within {seconds:.0f} s")
        results = [torch.load(file, weights_only=True) for file in files]
    return [list(of_job) for of_job in zip(*results, strict=True)]


def _work(rank: int, world_size: int, folder: str, jobs: list[Any]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # what a launcher would say
    torch.set_num_threads(1)
    try:
        # A file, not a port: a port that was free a moment ago may be another's by now, and all would wait for it.
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
        torch.save([job(*arguments) for job, arguments in jobs], Path(folder) / f"result_{rank}")
        dist.barrier()
        dist.destroy_process_group()
    except Exception:
        (Path(folder) / f"error_{rank}").write_text(traceback.format_exc())
