"""Compiled blocks: always, or where the first batches of a run show that it pays."""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer

from metattt.errors import MetaTTTError
from metattt.inner.compiled import allow

MEASURED = 4  # batches of each way, after one that is not counted: it compiles, or makes plans and buffers
PAYS = 0.95  # compiled batches take at most so many times as long


def compile_blocks(model: Any) -> None:
    """Compiles every block at its first call; those that are alike are compiled once."""
    allow()
    for block in model.blocks:
        block.compile()


class CompileWherePays(Callback):
    """What `compile=auto` does: the first batches of a run are computed as they are, the next ones compiled, and all
    others by what was faster. Checkpoints hold the choice: a resumed run computes as the run did."""

    def __init__(self) -> None:
        self.compiled: bool | None = None  # None: not known yet
        self.seconds: dict[bool, list[float]] = {False: [], True: []}
        self.began = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"compiled": self.compiled}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.compiled = state_dict["compiled"]

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        if hasattr(trainer.strategy, "on_block"):
            raise MetaTTTError("compile=auto is for trainer=default and trainer=ddp: set compile=true, or false")
        compile_blocks(pl_module.model)  # a model that cannot be compiled says so now
        if not self.compiled:
            _undo(pl_module.model)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.compiled is None:
            self.began = _now()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.compiled is not None:
            return
        way = len(self.seconds[False]) > MEASURED
        self.seconds[way].append(_now() - self.began)
        if len(self.seconds[way]) <= MEASURED:
            return
        if not way:
            compile_blocks(pl_module.model)
            return
        medians = torch.tensor([statistics.median(self.seconds[one][1:]) for one in (False, True)])
        plain, fast = trainer.strategy.reduce(medians.to(pl_module.device), reduce_op="mean").tolist()  # one for all
        self.compiled = fast <= PAYS * plain
        if not self.compiled:
            _undo(pl_module.model)
        if trainer.is_global_zero:
            said = "goes on compiled" if self.compiled else "goes on as it is"
            print(f"compile=auto: a batch takes {plain:.3g} s, and {fast:.3g} s compiled: {said}", file=sys.stderr)


def _undo(model: Any) -> None:
    for block in model.blocks:
        block._compiled_call_impl = None


def _now() -> float:
    """Seconds; work on a GPU is waited for."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
