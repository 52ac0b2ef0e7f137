"""The contract of mixers: called like a `TTTLayer`, with one function to write."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.inner.packing import Packing
from metattt.sequence_layer import FSDP_CASTS, SequenceLayer
from metattt.setting import setting
from metattt.state import Context, State, Tensors


class Mixer(SequenceLayer):
    """A sequence layer that is one recurrence, published as a whole: `y, state = mixer(x, state, mask=..., reset=...)`.

    It can be used like a `TTTLayer` or a `Combined`. Its state is in `state.learner`, by the names of `carried`;
    `state.weights`, `state.task` and `state.optimizer` are empty.

    Args:
        dim: model width D.
        chunk_size: c, tokens that are computed together; it changes no result.
        group_size: chunks that the backward pass recomputes together; None is one, 0 stores everything.
    """

    causal = True  #: no output depends on a later token
    chunk_size: int = setting(default=64, kw_only=True)
    group_size: int | None = setting(
        default=None, kw_only=True, least=0, advice=" (0 stores everything, null is one chunk)"
    )

    @property
    @abstractmethod
    def carried(self) -> dict[str, tuple[int, ...]]:
        """What a sequence carries: shapes without `[B]`, by name. A `memory` is in fp32 or wider."""

    @abstractmethod
    def mix(self, x: Tensor, memory: Tensors, ctx: Context) -> tuple[Tensor, Tensors]:
        """Reads tokens.

        Args:
            x: `[B, T, D]`, with padding after the real tokens, and 0 there.
            memory: what the previous call returned, empty at the start of a sequence.
            ctx: `valid` marks real tokens, `first` the starts of documents, which must not depend on earlier tokens.

        Returns:
            Outputs `[B, T, D]`, anything at padding, and `carried` after the last real token.
        """

    def run(
        self, x: Tensor, state: State, packing: Packing | None = None, donate_state: bool = False
    ) -> tuple[Tensor, State]:
        """`mix`, from state to state; see `SequenceLayer.run`."""
        call = self.call(x, state, packing)
        y, memory = self.mix(x, state.learner, call.ctx)
        return y, State(call.after, 0, {}, {}, {}, memory)

    def check_state(self, x: Tensor, state: Any) -> None:
        super().check_state(x, state)
        found = {name: tuple(tensor.shape[1:]) for name, tensor in state.learner.items()}
        if found != self.carried or any((state.weights, state.task, state.optimizer)):
            raise MetaTTTError(f"the state is from another layer: it carries {found}, this layer {self.carried}")
        if any(name == "memory" and tensor.dtype.itemsize < 4 for name, tensor in state.learner.items()):
            kind = state.learner["memory"].dtype
            raise MetaTTTError(f"the state holds a memory of {kind}, expected torch.float32 or wider{FSDP_CASTS}")
