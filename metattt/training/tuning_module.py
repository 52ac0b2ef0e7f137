"""The outer loop for a pretrained language model of Transformers, of which some parameters are trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from metattt.data.windows import NO_TOKEN
from metattt.errors import MetaTTTError
from metattt.training.job import OuterLoop


class PartTuning(OuterLoop):
    """Trains those parameters of a causal model of Transformers that require a gradient, on windows of tokens
    `[B, T + 1]`: the first T are read, the last T predicted; the loss is in nats per token.

    A checkpoint holds the trained parameters alone: to resume, load the pretrained model first (`metattt.attach`, and
    `examples/attach_lightning.py`). Arguments as of `OuterLoop`.
    """

    def __init__(self, *args: Any, **named: Any):
        super().__init__(*args, **named)  # hooks are called in a copy inside another module, too: of `WeightAveraging`
        self.register_state_dict_post_hook(_leave_out)
        self.register_load_state_dict_pre_hook(_check)
        self.register_load_state_dict_post_hook(lambda _, incompatible: incompatible.missing_keys.clear())

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


def _trained(module: nn.Module, prefix: str) -> set[str]:
    return {prefix + name for name, one in module.named_parameters() if one.requires_grad}


def _leave_out(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Of a state, what is not trained."""
    for name in {name for name in state if name.startswith(prefix)} - _trained(module, prefix):
        del state[name]


def _check(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Raises an error for a state that is not of the parameters that are trained here."""
    if other := _trained(module, prefix) ^ {name for name in state if name.startswith(prefix)}:
        raise MetaTTTError(
            f"the checkpoint is of other trained parameters ({len(other)}, {min(other)} among them): attach the "
            "same layers, with the same parameters trained, or start in another folder"
        )
