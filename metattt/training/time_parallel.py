"""`trainer=time_parallel`: every sequence is read by several processes, each a part of its time.

The processes form a mesh [data, time, heads]: those of one row read the same windows, each its own tokens, and pass on
the states of all layers (`metattt.parallel`); those of one column read the same part of different windows. Over the
data axis the model is copied (`trainer=time_parallel`) or divided (`trainer=time_parallel_fsdp`), over time it is
copied.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning import Trainer
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from metattt.errors import MetaTTTError, check_integer
from metattt.models.block import Block
from metattt.parallel.cuts import check_cut, check_divisible
from metattt.parallel.gradients import average_gradients
from metattt.parallel.line import Line
from metattt.parallel.scan import scannable
from metattt.registry import register
from metattt.training.batches import shares
from metattt.training.sharding import FullyShardedData, divided
from metattt.training.text_module import LanguageModeling

DATA, TIME, TENSOR = "data_parallel", "time", "tensor_parallel"  # axes of the mesh; two have the names of Lightning


class OverTime(ParallelStrategy):
    """The base of strategies that divide the time: a mixin before the strategy of the data axis."""

    line: Line  # the processes of this one's sequences, once they have started
    scans: list[bool]  # of every block so far: it has a time-parallel scan

    def __init__(self, time_ranks: int, in_flight: int | None, **others: Any) -> None:
        check_integer("trainer.time_ranks", time_ranks)
        if in_flight is not None:
            check_integer("trainer.in_flight", in_flight)
        super().__init__(**others)
        self.time_ranks, self.in_flight, self.scans = time_ranks, in_flight, []

    def check(self, context_length: int, batch_size: int) -> None:
        """Raises an error for windows that cannot be divided; called before anything is read.

        Args:
            context_length: tokens per window.
            batch_size: windows per batch of the processes that read the same ones.
        """
        if context_length < self.time_ranks:
            raise MetaTTTError(
                f"data.context_length={context_length} tokens cannot be divided among "
                f"trainer.time_ranks={self.time_ranks} processes: set one of them"
            )
        if self.in_flight is not None and batch_size < self.in_flight:
            raise MetaTTTError(
                f"trainer.in_flight={self.in_flight} parts need as many windows, and a batch has {batch_size}: "
                "set data.batch_size, or trainer.in_flight=null"
            )

    def setup_environment(self) -> None:
        super().setup_environment()
        sizes = self.time_ranks, getattr(self, "tensor_ranks", 1)
        shape = (shares(self.world_size, *sizes), *sizes)
        self.mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=(DATA, TIME, TENSOR))
        self.line = Line(self.mesh[TIME], frames(self.mesh), self.in_flight)

    def setup(self, trainer: Trainer) -> None:
        module: Any = self.lightning_module
        if not isinstance(module, LanguageModeling):
            raise MetaTTTError("trainer=time_parallel divides the tokens of a text: for images, set trainer=ddp")
        if not divided(module.model):  # else every block was looked at while it was made
            self.scans = []
            for block in module.model.blocks:
                self.on_block(block)
        module.line, module.scanned = self.line, [number for number, scans in enumerate(self.scans) if scans]
        super().setup(trainer)

    def on_block(self, block: nn.Module) -> None:
        """Checks the layer: raises an error if it needs whole sequences, and finds out whether its state allows a
        scan."""
        assert isinstance(block, Block)
        check_divisible(block)
        dim = len(block.layer_norm.weight)
        check_cut(block.layer, dim)
        self.scans.append(scannable(block.layer, dim))

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """The step of the gradients of all processes: they are put together once, before anybody looks at them."""

        def backward_and_average() -> Any:
            result = closure()
            self.line.finish()
            everybody: Any = dist.group.WORLD
            copies = self.line.group if isinstance(self, FullyShardedData) else everybody  # FSDP2 has averaged the rest
            average_gradients((p for group in optimizer.param_groups for p in group["params"]), copies)
            return result

        return super().optimizer_step(optimizer, backward_and_average, model, **kwargs)


@register(group="strategy", name="replicated_over_time")
class ReplicatedOverTime(OverTime, DDPStrategy):
    """A copy of the model in every process.

    Args:
        time_ranks: processes that read one sequence; must divide their number.
        in_flight: parts of a batch that are handed on one after the other; None: every window on its own.
        timeout_minutes: that a process waits for another that hangs, before the run ends.
    """

    def __init__(self, time_ranks: int = 2, in_flight: int | None = None, timeout_minutes: float = 30.0) -> None:
        super().__init__(time_ranks, in_flight, timeout=timedelta(minutes=timeout_minutes))

    def configure_ddp(self) -> None:
        """Nothing is wrapped: every process makes the same model, and gradients are averaged once a step."""


@register(group="strategy", name="sharded_over_data")
class ShardedOverData(OverTime, FullyShardedData):
    """Parameters, gradients and Adam's moments divided among the processes of the data axis (FSDP2), copied over time.

    Args:
        time_ranks, in_flight: as of `ReplicatedOverTime`.
        tensor_ranks, timeout_minutes: as of `FullyShardedData`.
    """

    def __init__(
        self, time_ranks: int = 2, in_flight: int | None = None, tensor_ranks: int = 1, timeout_minutes: float = 30.0
    ) -> None:
        super().__init__(time_ranks, in_flight, tensor_ranks=tensor_ranks, timeout_minutes=timeout_minutes)

    def setup_environment(self) -> None:
        super().setup_environment()
        module: Any = self.lightning_module
        self._device_mesh = module._device_mesh = self.mesh

    def on_block(self, block: nn.Module) -> None:
        """Checks the layer, then divides its heads."""
        OverTime.on_block(self, block)
        FullyShardedData.on_block(self, block)


def frames(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Makes a process group of the host for every line of a mesh, and returns that of this process; None if the mesh's
    own group works on the host."""
    if mesh.device_type == "cpu":
        return None
    assert mesh.mesh_dim_names is not None
    lines = mesh.mesh.movedim(mesh.mesh_dim_names.index(TIME), -1).reshape(-1, mesh[TIME].size())
    group, _ = dist.new_subgroups_by_enumeration(lines.tolist(), backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group
