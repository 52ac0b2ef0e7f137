"""One layer that reads a sequence in both directions, for tokens that may see later ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metattt.errors import MetaTTTError
from metattt.inner.packing import Packing
from metattt.sequence_layer import SequenceLayer
from metattt.setting import setting


class Bidirectional(SequenceLayer):
    """`y = tanh(a) ∘ layer(x) + tanh(b) ∘ reversed(layer(reversed(x)))`, called like the layer: `y, _ = both(x)`.

    Both directions share the layer; a and b have a number per feature and begin small, so that a pretrained model
    around the layer changes little at first (One-Minute Video Generation with Test-Time Training, arXiv 2504.05298,
    Sec. 3). Padding and documents are turned around by themselves: no document sees another. A call is a set of tokens:
    there is no state.

    Args:
        dim: model width D, that of the layer.
        layer: a `TTTLayer`, a `Combined` or a `Mixer`.
        gate_init: of a and b.

    Raises:
        MetaTTTError: something else than a layer, or one of another width; in a call: a state.
    """

    causal = False
    refuse_nan = False  #: the layer checks its inputs
    layer: nn.Module = setting()
    gate_init: float = setting(default=0.1)

    def check_settings(self) -> None:
        super().check_settings()
        self.check_held("layer")

    def create_modules(self) -> None:
        self.gate, self.gate_reversed = (nn.Parameter(torch.full((self.dim,), self.gate_init)) for _ in range(2))

    def start(self, x: Tensor, packing: Packing | None = None) -> None:
        """There is none."""

    def check_state(self, x: Tensor, state: Any) -> None:
        """Refuses any."""
        raise MetaTTTError("Bidirectional reads all tokens of a sequence in one call, and takes no state: leave it out")

    def learn(self, *given: Any, **options: Any) -> None:
        """Refused, as reading without learning: nothing is kept from one call to the next."""
        raise MetaTTTError(
            "Bidirectional carries no state, so that learning and reading cannot be apart: set direction=forward"
        )

    read = learn  # type: ignore[assignment]

    def run(
        self, x: Tensor, state: None, packing: Packing | None = None, donate_state: bool = False
    ) -> tuple[Tensor, None]:
        """See `SequenceLayer.run`."""
        y = self.layer(x, packing=packing)[0] * self.gate.tanh()
        mask = reset = None
        if packing is not None and packing.valid is not None:
            mask = packing.valid.flip(1)
        if packing is not None and packing.first is not None:  # the last token of a document is the first one
            reset = F.pad(packing.first[:, 1:], (0, 1)).flip(1)
        back = self.layer(x.flip(1), mask=mask, reset=reset)[0].flip(1)
        return y + back * self.gate_reversed.tanh(), None
