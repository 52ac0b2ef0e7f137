"""`trainer=ddp`: a copy of the model in every process, also for layers that leave parameters without a gradient."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy

from metattt.registry import register
from metattt.training.random_state import apart_from_the_run


@register(group="strategy", name="replicated_data")
class ReplicatedData(DDPStrategy):
    """DDP that finds out whether parameters may get no gradient; only then it searches the graph of every step.

    Nearest neighbours give no gradient to q and k, and a rule that acts once per mini-batch gives none before the first
    commit. So it depends on the lengths of documents. The shortest input decides (`shortest_loss` of the Lightning
    module): parameters that affect its loss affect every longer one. (To add every parameter to the loss with a factor
    of 0 instead would give zero gradients, and weight decay, where one process has none.)

    Args:
        timeout_minutes: that a process waits for another that hangs, before the run ends.
    """

    def __init__(self, timeout_minutes: float = 30.0) -> None:
        super().__init__(timeout=timedelta(minutes=timeout_minutes))

    def configure_ddp(self) -> None:
        module: Any = self.lightning_module
        with torch.enable_grad(), apart_from_the_run(self.root_device):
            parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
            found = torch.autograd.grad(module.shortest_loss(), parameters, allow_unused=True)
        self._ddp_kwargs["find_unused_parameters"] = any(gradient is None for gradient in found)
        super().configure_ddp()
