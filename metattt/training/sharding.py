"""`trainer=fsdp`: parameters, gradients and Adam's moments of a model divided among the processes (FSDP2)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.optim import Optimizer

from metattt.models.language_model import LanguageModel


def shard(model: LanguageModel, mesh: DeviceMesh) -> None:
    """Divides every block, and then the rest of the model, among the processes of a mesh. Once: later calls do nothing."""
    if isinstance(model, FSDPModule):
        return
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    register_fsdp_forward_method(model, "step")  # generation calls it in place of forward


class FullyShardedData(ModelParallelStrategy):
    """FSDP2 over all processes, on GPUs or CPUs; `configure_model` of the module decides what is divided.

    Checkpoints are gathered into the one file that every other run writes: `eval`, `generate` and `resume` take it, with any
    number of processes and any strategy.
    """

    def __init__(self) -> None:
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=False)

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole state in rank 0, with parameters numbered as `optimizer.state_dict()` of one process numbers them."""
        named = self._named_state(optimizer, full=True)
        if not named:  # not rank 0
            return {}
        numbers = {name: number for number, name in enumerate(_names(named))}
        groups = [group | {"params": [numbers[name] for name in group["params"]]} for group in named["param_groups"]]
        return {"state": {numbers[name]: state for name, state in named["state"].items()}, "param_groups": groups}

    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads a gathered checkpoint; every process keeps its part."""
        path = Path(self.broadcast(checkpoint_path))
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        assert self.lightning_module is not None
        options = StateDictOptions(full_state_dict=True, strict=self.lightning_module.strict_loading)
        set_model_state_dict(self.lightning_module, content.pop("state_dict"), options=options)
        for optimizer, saved in zip(self.optimizers, content.get("optimizer_states", []), strict=False):
            names = _names(self._named_state(optimizer, full=False))
            groups = [group | {"params": [names[number] for number in group["params"]]} for group in saved["param_groups"]]
            named: dict[str, Any] = {"state": {names[number]: state for number, state in saved["state"].items()}, "param_groups": groups}
            set_optimizer_state_dict(self.lightning_module, optimizer, named, options=options)
        return content

    def _named_state(self, optimizer: Optimizer, full: bool) -> dict[str, Any]:
        assert self.lightning_module is not None
        optimizer = getattr(optimizer, "_optimizer", optimizer)  # Lightning's wrapper
        options = StateDictOptions(full_state_dict=full, cpu_offload=full)
        return get_optimizer_state_dict(self.lightning_module, optimizer, options=options)


def _names(state: dict[str, Any]) -> list[str]:
    """The names of an optimizer's parameters, in its own order."""
    return [name for group in state["param_groups"] for name in group["params"]]
