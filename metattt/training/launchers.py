"""The processes of a run: those that torchrun or SLURM has started, and those that the run starts itself."""

from __future__ import annotations

import os
from typing import Any

from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from omegaconf import DictConfig

from metattt.errors import MetaTTTError


def launched() -> tuple[str, dict[str, int]] | None:
    """Who has started processes together with this one, and how many: `devices` on each of `num_nodes`. None: it was
    started alone."""
    if TorchElasticEnvironment.detect():
        per_node = int(os.environ["LOCAL_WORLD_SIZE"])
        return "torchrun", {"devices": per_node, "num_nodes": int(os.environ["WORLD_SIZE"]) // per_node}
    if SLURMEnvironment.detect() and "SLURM_PROCID" in os.environ:
        nodes = int(os.environ.get("SLURM_NNODES", 1))
        return "SLURM", {"devices": int(os.environ["SLURM_NTASKS"]) // nodes, "num_nodes": nodes}
    return None


def processes(trainer: DictConfig) -> dict[str, Any]:
    """`devices` and `num_nodes` for Lightning's Trainer: `auto` uses the processes that were started.

    Args:
        trainer: the configuration of the trainer.

    Raises:
        MetaTTTError: settings that are not those of the processes that were started.
    """
    given = {"devices": trainer.get("devices", "auto"), "num_nodes": trainer.get("num_nodes", 1)}
    found = launched()
    if found is None:
        return given | ({"num_nodes": 1} if given["num_nodes"] == "auto" else {})
    by, started = found
    for key, value in given.items():
        if value not in ("auto", started[key]):
            hint = "choose trainer=ddp or trainer=fsdp" if trainer.strategy == "auto" else f"set trainer.{key}=auto"
            raise MetaTTTError(f"{by} has started {started[key]} {key}, and trainer.{key}={value}: {hint}")
    return dict(started)


def is_first() -> bool:
    """Whether this is the first process of the run, before its processes have found one another."""
    if launched() is not None:
        return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0))) == 0
    node = os.environ.get("NODE_RANK", os.environ.get("GROUP_RANK", "0"))
    return int(os.environ.get("LOCAL_RANK", 0)) == int(node) == 0


def started_by_the_run() -> bool:
    """Whether the first process of the run on this machine has started this one."""
    return launched() is None and int(os.environ.get("LOCAL_RANK", 0)) > 0
