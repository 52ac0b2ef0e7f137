"""`trainer=time_parallel`: every sequence is read by several processes, each a part of its time.

The processes form a mesh [data, time]: those of one row read the same windows, each its own tokens, and pass on
the states of all layers (`metattt.parallel`); those of one column read the same part of different windows. Every
process has a copy of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import lightning
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from metattt.errors import MetaTTTError, check_integer
from metattt.parallel.cuts import check_cut, check_divisible
from metattt.parallel.gradients import average_gradients
from metattt.parallel.line import Line
from metattt.registry import register
from metattt.training.batches import shares

DATA, TIME = "data", "time"  # axes of the mesh


@register(group="strategy", name="replicated_over_time")
class ReplicatedOverTime(DDPStrategy):
    """A copy of the model in every process, and the tokens of a window divided among some of them.

    Args:
        time_ranks: processes that read one sequence; must divide their number.
        timeout_minutes: that a process waits for another that hangs, before the run ends.

    Raises:
        MetaTTTError: a number below 1.
    """

    of_text = True  #: it divides the tokens of language models
    line: Line  #: the processes of this one's sequences, once they have started

    def __init__(self, time_ranks: int = 2, timeout_minutes: float = 30.0) -> None:
        check_integer("trainer.time_ranks", time_ranks)
        super().__init__(timeout=timedelta(minutes=timeout_minutes))
        self.time_ranks = time_ranks

    def check(self, context_length: int) -> None:
        """Raises an error for windows of fewer tokens than processes; called before anything is read."""
        if context_length < self.time_ranks:
            raise MetaTTTError(
                f"data.context_length={context_length} tokens cannot be divided among "
                f"trainer.time_ranks={self.time_ranks} processes: set one of them"
            )

    def setup_environment(self) -> None:
        super().setup_environment()
        shape = shares(self.world_size, self.time_ranks), self.time_ranks
        mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=(DATA, TIME))
        self.line = Line(mesh[TIME], frames(mesh))

    def setup(self, trainer: lightning.Trainer) -> None:
        module: Any = self.lightning_module
        module.line = self.line
        for block in module.model.blocks:
            check_divisible(block)
            check_cut(block.layer, len(block.layer_norm.weight))
        super().setup(trainer)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: lightning.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """The step of the gradients of all processes: they are put together once, before anybody looks at them."""

        def backward_and_average() -> Any:
            result = closure()
            self.line.finish()
            assert dist.group.WORLD is not None
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            average_gradients(parameters, dist.group.WORLD)
            return result

        return super().optimizer_step(optimizer, backward_and_average, model, **kwargs)

    def configure_ddp(self) -> None:
        """Nothing is wrapped: every process makes the same model, and gradients are averaged once a step."""


def frames(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Makes a process group of the host for every row of a mesh, and returns that of this process; None if the mesh's
    own group works on the host."""
    if mesh.device_type == "cpu":
        return None
    group, _ = dist.new_subgroups_by_enumeration(mesh.mesh.tolist(), backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group
