"""The processes of a run: those that torchrun or SLURM has started, and those that the run starts itself."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from omegaconf import DictConfig

from metattt.errors import MetaTTTError


class Launched(NamedTuple):
    """Who started the processes, and how many.

    Attributes:
        by: torchrun or SLURM.
        devices: processes on each node.
        num_nodes: nodes.
    """

    by: str
    devices: int
    num_nodes: int


def launched() -> Launched | None:
    """The processes that were started together with this one; None if it was started alone."""
    if TorchElasticEnvironment.detect():
        per_node = int(os.environ["LOCAL_WORLD_SIZE"])
        return Launched("torchrun", per_node, int(os.environ["WORLD_SIZE"]) // per_node)
    if SLURMEnvironment.detect() and "SLURM_PROCID" in os.environ:
        nodes = int(os.environ.get("SLURM_NNODES", 1))
        return Launched("SLURM", int(os.environ["SLURM_NTASKS"]) // nodes, nodes)
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
    for key, value in given.items():
        started = getattr(found, key)
        if value not in ("auto", started):
            hint = "choose trainer=ddp or trainer=fsdp" if trainer.strategy == "auto" else f"set trainer.{key}=auto"
            raise MetaTTTError(
                f"{found.by} has started {found.devices} processes on each of {found.num_nodes} nodes, and "
                f"trainer.{key}={value}: {hint}"
            )
    return {"devices": found.devices, "num_nodes": found.num_nodes}


def is_first() -> bool:
    """Whether this is the first process of the run, before its processes have found one another."""
    if launched() is not None:
        return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0))) == 0
    node = os.environ.get("NODE_RANK", os.environ.get("GROUP_RANK", "0"))
    return int(os.environ.get("LOCAL_RANK", 0)) == int(node) == 0


def started_by_the_run() -> bool:
    """Whether the first process of the run on this machine has started this one."""
    return launched() is None and int(os.environ.get("LOCAL_RANK", 0)) > 0
