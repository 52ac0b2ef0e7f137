"""`trainer=fsdp`: parameters, gradients and Adam's moments of a model divided among the processes (FSDP2)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.optim import Optimizer

from metattt.checkpoints.folder import STATES, WEIGHTS, load_parts, verify, weights, write_checkpoint
from metattt.checkpoints.tensors import put_together, take_apart
from metattt.checkpoints.trained import read_checkpoint
from metattt.errors import check_integer
from metattt.models.language_model import LanguageModel
from metattt.parallel.heads import divide_heads
from metattt.registry import register
from metattt.training.batches import shares
from metattt.training.building import Builder


def divided(model: nn.Module) -> bool:
    """Whether a model is divided among processes already."""
    return isinstance(model, FSDPModule)


@register(group="strategy", name="fully_sharded")
class FullyShardedData(ModelParallelStrategy):
    """FSDP2 over all processes, on GPUs or CPUs; `configure_model` of the module decides what is divided.

    Every process writes its own part of a checkpoint (`metattt.checkpoints.folder`). It is read by any number of
    processes under any strategy, and so are the checkpoints of other strategies here.

    Args:
        tensor_ranks: processes that divide the heads of every layer and the features of every SwiGLU; they read the
            same windows. Must divide the number of processes.
        timeout_minutes: that a process waits for another that hangs, before the run ends.
    """

    def __init__(self, tensor_ranks: int = 1, timeout_minutes: float = 30.0) -> None:
        check_integer("trainer.tensor_ranks", tensor_ranks)
        timeout = timedelta(minutes=timeout_minutes)
        super().__init__(tensor_parallel_size=tensor_ranks, save_distributed_checkpoint=True, timeout=timeout)
        self.tensor_ranks = tensor_ranks

    def setup_environment(self) -> None:
        self._data_parallel_size = shares(self.num_nodes * self.num_processes, tensor_ranks=self.tensor_ranks)
        super().setup_environment()

    def build_divided(self, build: Builder) -> LanguageModel:
        """Makes a model block by block, each divided among the processes before the next is made: no process ever holds
        the whole model. The parameters are those of one process, as all draw the same random numbers in the same order.
        """
        divide = partial(fully_shard, mesh=self.device_mesh["data_parallel"])

        def divided_block(block: nn.Module) -> None:
            self.on_block(block)
            divide(block)

        model = build.in_parts(divided_block)
        divide(model)  # embedding, final norm and head
        for method in ("step", "cross_entropy"):  # generation and training call them in place of forward
            register_fsdp_forward_method(model, method)
        build.finish(model)
        return model

    def on_block(self, block: nn.Module) -> None:
        """Divides the heads of a block; FSDP2 divides the parts again afterwards."""
        if self.tensor_ranks > 1:
            divide_heads(block, self.device_mesh["tensor_parallel"])

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        if self.tensor_ranks > 1:  # torch takes parameters together only where all are divided in the same way
            for group in optimizer.param_groups:
                group["foreach"] = False
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """This process's parts of the state; Lightning would name parameters, which one process numbers."""
        return optimizer.state_dict()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Every process writes its parts of the tensors, one of them the rest."""
        write_checkpoint(Path(self.broadcast(str(filepath))), checkpoint, together=True)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads a checkpoint of any strategy and number of processes: every process checks the checksums, then
        reads its part of the tensors."""
        folder = Path(self.broadcast(str(checkpoint_path)))
        plain, content = verify(folder), read_checkpoint(folder, "small")
        if "current_model_state" in plain["content"]:  # of a run that averaged weights: its own, not the averages
            plain["content"][WEIGHTS] = plain["content"]["current_model_state"]
        module, stored = cast(nn.Module, self.lightning_module), weights(plain)
        model = cast(dict[str, Tensor], get_model_state_dict(module))  # no copies: what is read goes into the model
        # of a weight with several names one was written, and here they are one tensor as well
        load_parts(folder, {stored.get(name, name): tensor for name, tensor in model.items()}, together=True)
        for index, (optimizer, saved) in enumerate(zip(self.optimizers, content.pop(STATES, []), strict=False)):
            get_optimizer_state_dict(module, optimizer)  # before its first step this makes the state, of zeros
            own, tensors = optimizer.state_dict()["state"], dict[str, Tensor]()
            # one process has no state of a parameter without a gradient
            take_apart({number: own[number] for number in saved["state"]}, tensors, f"{STATES}/{index}/state")
            load_parts(folder, tensors, together=True)
            state = put_together(plain["content"][STATES][index]["state"], tensors)
            optimizer.load_state_dict({"state": state, "param_groups": saved["param_groups"]})
        return content
