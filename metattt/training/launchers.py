"""Processes that torchrun or SLURM has started: how many there are, and what the trainer has to be told of them."""

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
    """`devices` and `num_nodes` for Lightning's Trainer: `auto` takes what was started.

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
                f"{found.by} has started {found.devices} processes on each of {found.num_nodes} nodes, and trainer.{key}={value}: {hint}"
            )
    return {"devices": found.devices, "num_nodes": found.num_nodes}
