"""A run that ends when it is good enough."""

from __future__ import annotations

from typing import Any, Literal

import lightning
from lightning.pytorch.callbacks import EarlyStopping

from metattt.errors import MetaTTTError, check_choice, check_number
from metattt.registry import register

NEVER = 2**31  # validations without progress, of Lightning's other reason to stop: a plateau is no end


@register(group="callback", name="stop_at")
class StopAt(EarlyStopping):
    """Ends the run after the validation at which a metric reaches a threshold (Lightning's `EarlyStopping`); its last
    step is then that number of steps.

    Args:
        metric: a column of metrics.csv.
        threshold: that ends the run.
        mode: `max`, at or above the threshold, or `min`.

    Raises:
        MetaTTTError: a value that is not allowed; at the first validation, a metric that the run does not log.
    """

    def __init__(self, metric: str, threshold: float, mode: Literal["min", "max"] = "max"):
        check_number("callbacks.stop_at.threshold", threshold)
        check_choice("callbacks.stop_at.mode", mode, ("min", "max"))
        super().__init__(metric, mode=mode, stopping_threshold=threshold, patience=NEVER, check_finite=False, strict=False)

    def _run_early_stopping_check(self, trainer: lightning.Trainer) -> None:
        if self.monitor not in trainer.callback_metrics:
            known = ", ".join(sorted(name for name in trainer.callback_metrics if name.startswith("validation/")))
            raise MetaTTTError(f"callbacks.stop_at.metric={self.monitor} is not logged; of validation there are {known}")
        super()._run_early_stopping_check(trainer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As Lightning; the threshold is that of the configuration."""
        super().load_state_dict(state_dict)
        self.patience = NEVER
