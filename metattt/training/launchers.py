"""The processes of a run: those that torchrun or SLURM has started, and those that the run starts itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any, NamedTuple

from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from omegaconf import DictConfig

from metattt.errors import MetaTTTError

GRACE_SECONDS = 3


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


def is_first() -> bool:
    """Whether this is the first process of the run, before its processes have found one another."""
    if launched() is not None:
        return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0))) == 0
    node = os.environ.get("NODE_RANK", os.environ.get("GROUP_RANK", "0"))
    return int(os.environ.get("LOCAL_RANK", 0)) == int(node) == 0


def started_by_the_run() -> bool:
    """Whether the first process of the run on this machine has started this one."""
    return launched() is None and int(os.environ.get("LOCAL_RANK", 0)) > 0


class Launcher(_SubprocessScriptLauncher):
    """Lightning's launcher of the other processes on this machine, which says so when one of them ends too early.

    Lightning itself looks every five seconds, and kills all of them without a word.
    """

    children: tuple[subprocess.Popen[bytes], ...] = ()

    def _call_children_scripts(self) -> None:
        super()._call_children_scripts()
        self.children = tuple(self.procs)
        self.procs = []  # what Lightning looks after
        threading.Thread(target=self._look_after, daemon=True, name="children").start()

    def kill(self, signum: int) -> None:
        for child in self.children:
            child.send_signal(signum)

    def _look_after(self) -> None:
        """Until all have ended well, or one has not."""
        while True:
            codes = [child.poll() for child in self.children]
            for number, code in enumerate(codes, 1):
                if code:
                    time.sleep(GRACE_SECONDS)  # where the run is under way, `Watch` has noticed and knows more
                    line = f"error: process {number} of {len(codes) + 1} on this machine has ended with code {code}: the run stops"
                    print(line, file=sys.stderr, flush=True)
                    self.kill(signal.SIGKILL)
                    os._exit(1)
            if not any(code is None for code in codes):
                return
            time.sleep(0.5)


def follow_the_starter() -> None:
    """In a process that the run has started: it ends when the process that started it has died."""
    starter = os.getppid()

    def follow() -> None:
        while os.getppid() == starter:
            time.sleep(1)
        time.sleep(GRACE_SECONDS)  # as above
        print("error: the first process of the run has died", file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=follow, daemon=True, name="starter").start()
