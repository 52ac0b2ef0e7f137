"""`trainer=ddp`: a copy of the model in every process, also for layers that leave parameters without a gradient."""

from __future__ import annotations

from datetime import timedelta

from lightning.pytorch.strategies import DDPStrategy

from metattt.registry import register


@register(group="strategy", name="replicated_data")
class ReplicatedData(DDPStrategy):
    """DDP that looks in every step for parameters without a gradient.

    Nearest neighbours give none to q and k, and a rule that acts once per mini-batch gives none before the first
    commit, so it depends on the lengths of documents. (To add every parameter to the loss with a factor of 0 instead
    would give zero gradients, and weight decay, where one process has none.)

    Args:
        timeout_minutes: that a process waits for another that hangs, before the run ends.
    """

    def __init__(self, timeout_minutes: float = 30.0) -> None:
        super().__init__(timeout=timedelta(minutes=timeout_minutes), find_unused_parameters=True)
