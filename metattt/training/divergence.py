"""A run that diverges: noticed before the update reaches the weights, named, written down, and stopped, skipped or
rolled back."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

import lightning
import torch
from lightning.pytorch.trainer.states import TrainerFn
from safetensors import SafetensorError
from torch import Tensor, nn

from metattt.errors import MetaTTTError, check_choice
from metattt.layer import TTTLayer
from metattt.mixers.base import Mixer
from metattt.registry import register
from metattt.training.diagnosis import advice, diagnose
from metattt.training.dump import Batch, Step, add_step, begin_dump, free_name, random_state, whole_weights
from metattt.training.finite import overflows
from metattt.training.snapshot import Snapshot, parameters_of

WINDOW = 100  # steps over which skipped ones are counted


@register(group="callback", name="divergence")
class Divergence(lightning.Callback):
    """Looks at every step before its update: the loss of every batch, and the norm of the gradient. Weights are looked
    at before they are validated or written, so that no checkpoint ever holds one that is not finite.

    The price: one multi-tensor norm over the gradients, and one number that the host waits for when the backward pass
    has ended (the decision has to come before the update). All processes of a run decide alike. The batches of a step
    are kept until it has ended.

    What happens then, by `on_divergence`:

    - `stop`: one line, exit code 2.
    - `skip`: the step counts, with its batch and its place in the schedule; weights and moments stay as they are.
    - `rollback`: weights and moments become those of the last checkpoint again (of the start of this process, before
      the first), whose copy the memory of the host holds. The count of steps, the schedule and the data go on behind
      the bad batch: the steps in between are lost, and nothing is read twice.

    Weights that are not finite themselves cannot be skipped: then `skip` stops.

    Args:
        folder: of the run; what computes the step again is written there, for `metattt train replay=<folder>`.
        on_divergence: see above.
        max_rollbacks: of a run; then it stops.
        max_skipped: of the last 100 steps; with more it stops.
        dumps: steps of a run that are written down, at most; each takes as much as the weights.

    Raises:
        MetaTTTError: a value that is not allowed; in training, the line of a run that stops.
    """

    def __init__(
        self,
        folder: str,
        on_divergence: Literal["stop", "rollback", "skip"] = "stop",
        max_rollbacks: int = 3,
        max_skipped: int = 10,
        dumps: int = 2,
    ):
        check_choice("on_divergence", on_divergence, ("stop", "rollback", "skip"))
        for key, value in (("max_rollbacks", max_rollbacks), ("max_skipped", max_skipped), ("dumps", dumps)):
            if value < 0:
                raise MetaTTTError(f"callbacks.divergence.{key}={value} is not allowed: it must be at least 0")
        self.folder, self.on_divergence = Path(folder), on_divergence
        self.max_rollbacks, self.max_skipped, self.dumps = max_rollbacks, max_skipped, dumps
        self.rollbacks, self.dumped = 0, 0
        self.skipped: list[int] = []  # steps, of the last 100
        self.step = Step([], {})  # what the step under way began with
        self.losses: list[Tensor] = []  # of its batches so far
        self.snapshot: Snapshot | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"rollbacks": self.rollbacks, "skipped": list(self.skipped), "dumped": self.dumped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rollbacks, self.dumped = state_dict["rollbacks"], state_dict["dumped"]
        self.skipped = list(state_dict["skipped"])

    # -- what is looked at ---------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        refuse_nan(pl_module, False)  # it comes to the loss, where all processes see it

    def teardown(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        refuse_nan(pl_module, True)

    def on_exception(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, exception: BaseException
    ) -> None:
        refuse_nan(pl_module, True)

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._keep(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.step, self.losses = Step([], random_state(pl_module.device)), []
        kept: Batch = batch if isinstance(batch, Tensor) else tuple(batch)
        self.step = self.step._replace(batches=[*self.step.batches, kept])

    def on_before_backward(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, loss: Tensor
    ) -> None:
        self.losses.append(loss.detach())

    def on_before_optimizer_step(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if _forward_only(pl_module):  # it is in the middle of its own step, and drops the update itself
            return
        parameters = parameters_of([optimizer])
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None  # drops what overflows itself
        if self._agreed(trainer, self._of_losses(), None if scaled else overflows(gradients)):
            self._react(trainer, pl_module, trainer.global_step + 1)
            for parameter in parameters:  # without a gradient no optimizer touches a parameter, or its moments
                parameter.grad = None

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if _forward_only(pl_module) and self._agreed(trainer, self._of_losses()):
            self._react(trainer, pl_module, trainer.global_step)

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and self._spoilt(trainer):
            self._react(trainer, pl_module, trainer.global_step)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        loss = trainer.callback_metrics.get("validation/loss")
        if loss is not None and not torch.isfinite(loss):
            _say(
                trainer, f"step {trainer.global_step}: the validation loss is {loss.item()}, of weights that are finite"
            )

    def on_save_checkpoint(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._spoilt(trainer):
            self._react(trainer, pl_module, trainer.global_step)
            # only a rollback comes here: what is written are the weights that it went back to
            checkpoint["state_dict"] = trainer.strategy.lightning_module_state_dict()
            checkpoint["optimizer_states"] = [trainer.strategy.optimizer_state(one) for one in trainer.optimizers]
        self._keep(trainer, pl_module)

    def _of_losses(self) -> Tensor | None:
        """0 or 1: whether a loss of this step is not finite."""
        return (~torch.isfinite(torch.stack(self.losses))).any().float() if self.losses else None

    def _spoilt(self, trainer: lightning.Trainer) -> bool:
        """Whether a weight is not finite."""
        return self._agreed(trainer, overflows(parameters_of(trainer.optimizers)))

    @staticmethod
    def _agreed(trainer: lightning.Trainer, *flags: Tensor | None) -> bool:
        """Whether a flag is raised in any process. Here the host waits for the device."""
        raised = [flag for flag in flags if flag is not None] or [torch.zeros((), device=trainer.strategy.root_device)]
        return bool(trainer.strategy.reduce(torch.stack(raised).sum(), reduce_op="sum") > 0)

    def _keep(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if self.on_divergence == "rollback":
            self.snapshot = Snapshot(pl_module, trainer.optimizers, trainer.global_step)

    # -- what happens then ---------------------------------------------------------------------------------------------

    def _react(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, step: int) -> None:
        """Returns where the run can go on without the update of a step.

        Raises:
            MetaTTTError: it cannot.
        """
        text, spoilt = diagnose(trainer, pl_module, self.losses, self.step)
        found = f"step {step}: {text}{self._write(trainer, pl_module, step, text)}"
        ending = advice(pl_module)
        if self.on_divergence == "skip" and spoilt:
            ending = f"weights cannot be skipped, as a step can: {ending}, or set on_divergence=rollback"
        elif self.on_divergence == "skip":
            self.skipped = [*(one for one in self.skipped if one > step - WINDOW), step]
            if len(self.skipped) <= self.max_skipped:
                return _say(trainer, f"{found}. Skipped ({len(self.skipped)} of the last {WINDOW} steps)")
            ending = f"{self.max_skipped} of the last {WINDOW} steps were skipped already: {ending}"
        elif self.on_divergence == "rollback" and self.rollbacks < self.max_rollbacks:
            assert self.snapshot is not None
            self.snapshot.restore()
            self.rollbacks += 1
            count = f"rollback {self.rollbacks} of {self.max_rollbacks}"
            return _say(
                trainer, f"{found}. On with the next batch and the weights of step {self.snapshot.step} ({count})"
            )
        elif self.on_divergence == "rollback":
            ending = f"{self.rollbacks} rollbacks did not help: {ending}"
        raise MetaTTTError(f"{found}\n{ending}")

    def _write(self, trainer: lightning.Trainer, pl_module: Any, step: int, text: str) -> str:
        """Writes the step down, if not too many are; says where. A disk that is full hides nothing of what was found."""
        if self.dumped >= self.dumps:
            return ""
        self.dumped += 1
        weights = whole_weights(pl_module.model)
        target = Path(trainer.strategy.broadcast(str(free_name(self.folder, step))))
        problem = None
        if trainer.is_global_zero:
            record = {
                "step": step,
                "found": text,
                "processes": trainer.world_size,
                "precision": str(trainer.precision),
                "document_start": getattr(pl_module, "document_start", None),
                "run": {"version": pl_module.record["version"], "config": pl_module.record["config"]},
            }
            problem = _attempt(begin_dump, target, record, weights)
        problem = trainer.strategy.broadcast(problem) or _attempt(add_step, target, trainer.global_rank, self.step)
        return (
            f". To look at it: metattt train replay={target}" if problem is None else f" (not written down: {problem})"
        )


def refuse_nan(module: nn.Module, refuse: bool) -> None:
    """Whether layers refuse NaN, as they do where nobody looks at the loss, or hand it on."""
    for one in module.modules():
        if isinstance(one, TTTLayer | Mixer):
            one.refuse_nan = refuse


def _attempt(function: Any, *arguments: Any) -> str | None:
    """What went wrong in a function that writes; None if nothing did."""
    try:
        function(*arguments)
    except (OSError, SafetensorError) as error:
        return str(error).splitlines()[0]
    return None


def _forward_only(pl_module: Any) -> bool:
    return getattr(pl_module.recipe, "forward_only", False)


def _say(trainer: lightning.Trainer, line: str) -> None:
    if trainer.is_global_zero:
        print(line, file=sys.stderr, flush=True)
