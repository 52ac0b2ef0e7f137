"""What the three parts of a layer have in common: a layer claims each, and notices when one is changed afterwards."""

from __future__ import annotations

from typing import Any

from torch import nn

from metattt.errors import MetaTTTError


class Part(nn.Module):
    """A task, a learner or an inner optimizer.

    What a layer finds out about its parts when it is built (which form is exact, which kernel computes them) rests on their settings.
    A setting that is assigned later raises `changes`, and the layer asks again.
    """

    belongs = False  #: a layer has claimed this part
    changes = 0  #: settings assigned since it was claimed

    def unclaimed(self, kind: str) -> None:
        """Refuses a part that a layer has.

        Raises:
            MetaTTTError: it has; `kind` with its article says what to give instead.
        """
        if self.belongs:
            raise MetaTTTError(f"this {type(self).__name__} already belongs to a layer: give every layer {kind} of its own")

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if self.belongs and name != "training":  # both modes are looked at
            self.__dict__["changes"] = self.changes + 1
