"""The outer loop for a pretrained language model of Transformers, of which some parameters are trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from metattt.data.windows import NO_TOKEN
from metattt.errors import MetaTTTError
from metattt.training.job import OuterLoop


class PartTuning(OuterLoop):
    """Trains those parameters of a causal model of Transformers that require a gradient, on windows of tokens
    `[B, T + 1]`: the first T are read, the last T predicted; the loss is in nats per token.

    A checkpoint holds the trained parameters alone: to resume, load the pretrained model first (`metattt.attach`, and
    `examples/attach_lightning.py`). Arguments as of `OuterLoop`.
    """

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        held = super().state_dict(*args, **options)
        return {name: held[name] for name, one in self.named_parameters() if one.requires_grad}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Raises:
        MetaTTTError: the state is not of the parameters that are trained here.
        """
        other = {name for name, one in self.named_parameters() if one.requires_grad} ^ state_dict.keys()
        if other:
            raise MetaTTTError(
                f"the checkpoint is of other trained parameters ({len(other)}, {min(other)} among them): attach the "
                "same layers, with the same parameters trained, or start in another folder"
            )
        return super().load_state_dict(state_dict, strict=False, assign=assign)

    def batch_loss(self, batch: Tensor) -> Tensor:
        return self._nats(batch).mean()

    def read(self, batch: Tensor) -> None:
        self._nats(batch)

    def shortest_loss(self) -> Tensor:
        return self.batch_loss(next(self.parameters()).new_zeros(1, 2).long())

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        losses = self._nats(batch)
        self.add_to_validation(loss=(losses.sum(), losses.new_tensor(losses.numel())))

    def _nats(self, ids: Tensor) -> Tensor:
        """The cross-entropy of every predicted token `[N]`."""
        logits, labels = self.model(input_ids=ids[:, :-1].clamp(min=0), use_cache=False).logits, ids[:, 1:]
        real = labels != NO_TOKEN
        return F.cross_entropy(logits[real].float(), labels[real], reduction="none")
