"""Processes on this machine that work together through gloo."""

from __future__ import annotations

import faulthandler
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
        seconds: for all of it; a process that takes longer is ended.

    Returns:
        Of every job, what each process returned (tensors and plain values).

    Raises:
        MetaTTTError: a process that failed, with its traceback, or took too long, with where every one then was.
    """
    context = multiprocessing.get_context("forkserver")  # they share what has been imported
    context.set_forkserver_preload(["metattt.training.train"])
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_work, args=(rank, world_size, folder, list(jobs), 0.95 * seconds))
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
            where = "".join(f"\nprocess {rank}: {_where(Path(folder), rank, len(jobs))}" for rank in missing)
            raise MetaTTTError(
                f"processes {missing} of {world_size} ended without a result, or not within {seconds:.0f} s{where}"
            )
        results = [torch.load(Path(folder) / f"result_{rank}", weights_only=True) for rank in range(world_size)]
    return [list(of_job) for of_job in zip(*results, strict=True)]


def _work(rank: int, world_size: int, folder: str, jobs: list[Any], patience: float) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # what a launcher would say
    torch.set_num_threads(1)
    stacks = open(Path(folder) / f"stacks_{rank}", "w")  # noqa: SIM115 - open until the process ends
    faulthandler.dump_traceback_later(patience, file=stacks)
    results = []
    try:
        # A file, not a port: a port that was free a moment ago may be another's by now, and all would wait for it.
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
        for job, arguments in jobs:
            results.append(job(*arguments))
            (Path(folder) / f"done_{rank}").write_text(str(len(results)))
        torch.save(results, Path(folder) / f"result_{rank}")
        dist.barrier()
        dist.destroy_process_group()
    except Exception:
        (Path(folder) / f"error_{rank}").write_text(traceback.format_exc())
    finally:
        faulthandler.cancel_dump_traceback_later()


def _where(folder: Path, rank: int, jobs: int) -> str:
    """What a process that gave no result had done, and its calls at the end."""
    done = (folder / f"done_{rank}").read_text() if (folder / f"done_{rank}").is_file() else "0"
    stacks = (folder / f"stacks_{rank}").read_text() if (folder / f"stacks_{rank}").is_file() else ""
    return f"{done} of {jobs} jobs done\n{stacks}".rstrip()
