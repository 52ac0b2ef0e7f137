"""A copy of a run's weights and moments in the memory of the host, to go back to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from metattt.training.finite import local


class Snapshot:
    """What training changes: parameters, buffers, and the optimizers' state of every parameter. Each process copies
    what it holds itself.

    Takes as much memory of the host as these take on the device: three times the parameters, with Adam.

    Args:
        module: whose buffers are copied.
        optimizers: whose parameters are copied, with what they keep of them.
        step: the number of steps done.
    """

    def __init__(self, module: nn.Module, optimizers: Iterable[torch.optim.Optimizer], step: int):
        self.module, self.optimizers, self.step = module, list(optimizers), step
        self.tensors = [_copy(tensor) for tensor in self._live()]
        self.states = [{parameter: _copied(state) for parameter, state in one.state.items()} for one in self.optimizers]

    @torch.no_grad()
    def restore(self) -> None:
        """Puts everything back in place. Settings of the optimizers (the learning rate) stay: they follow the steps."""
        for part in self.module.modules():
            if isinstance(part, FSDPModule):  # what was gathered from all processes is out of date
                part.reshard()
        for tensor, kept in zip(self._live(), self.tensors, strict=True):
            local(tensor).copy_(kept)
        for optimizer, states in zip(self.optimizers, self.states, strict=True):
            for parameter in [one for one in optimizer.state if one not in states]:  # before its first step
                del optimizer.state[parameter]
            for parameter, state in states.items():
                for key, kept in state.items():
                    if isinstance(kept, Tensor):
                        local(optimizer.state[parameter][key]).copy_(kept)
                    else:
                        optimizer.state[parameter][key] = kept

    def _live(self) -> list[Tensor]:
        return [*parameters_of(self.optimizers), *self.module.buffers()]


def parameters_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    """The parameters that are trained, as their optimizers know them: of a divided model, the part of this process."""
    return [parameter for one in optimizers for group in one.param_groups for parameter in group["params"]]


def _copy(tensor: Tensor) -> Tensor:
    return local(tensor.detach()).to("cpu", copy=True)


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, Tensor) else value for key, value in state.items()}
