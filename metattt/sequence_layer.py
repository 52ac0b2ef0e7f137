"""The base of all sequence layers: arguments, checks and results of a call."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from metattt.declared import Declared
from metattt.errors import MetaTTTError, NotFinite
from metattt.inner.packing import Call, Packing, check_flags, pack
from metattt.modules import RECORDING, needs_probes, stands_for_others, transformed
from metattt.nested import map_tensors, tensors_of
from metattt.setting import setting
from metattt.state import Context, State

FSDP_CASTS = " (FSDP2 casts states to bf16: set cast_forward_inputs=False in its MixedPrecisionPolicy)"


class SequenceLayer(Declared, ABC):
    """A layer that reads sequences and carries a state: `y, state = layer(x, state, mask=..., reset=...)`.

    The base checks the inputs, and moves padding to the end and back. A subclass implements `run`; it declares
    settings (`metattt.declared.Declared`) and makes its modules in `create_modules`, or writes an `__init__`.
    """

    _group = "layer"
    dim: int = setting()  #: model width D
    causal: ClassVar[bool]  #: whether no output depends on a later token
    #: raise an error for NaN in `x`; False if the caller checks outputs for NaN (a training run checks its loss)
    refuse_nan = True
    mini_batch_size = 1  #: b (tokens), which the context of a call tells

    def forward(
        self,
        x: Tensor,
        state: Any = None,
        *,
        mask: Tensor | None = None,
        reset: Tensor | None = None,
        packing: Packing | None = None,
        donate_state: bool = False,
    ) -> tuple[Tensor, Any]:
        """Reads the tokens `x`; returns the outputs and the state for the next call.

        Args:
            x: `[B, T, D]`.
            state: what the previous call returned; None at the start. Calls may cut a sequence anywhere, except where
                `optimizer.mini_batch_size=null` or a read `block` or `final` makes the call part of the rule.
            mask: `[B, T]` bool, True for real tokens. Padding may be anywhere and changes nothing; its outputs are 0.
            reset: `[B, T]` bool, True at the first token of a packed document: the state starts again.
            packing: what `pack` makes of `mask` and `reset`, for all layers of a model; then `x` and the output have
                padding last.
            donate_state: the caller gives up `state`, and its weights may be written over (decoding without
                derivatives).

        Returns:
            Outputs `[B, T, D]` and the new state.

        Raises:
            MetaTTTError: shapes, types or flags that do not fit, a state of another layer or batch size, or NaN in `x`
                (checked on CPU, if `refuse_nan`).
        """
        if not torch.is_tensor(x) or x.ndim != 3 or x.size(2) != self.dim or not (x.size(1) and x.is_floating_point()):
            raise _wrong_tokens(x, self.dim)
        if torch.jit.is_tracing():  # a kernel's results would be constants of the program
            raise MetaTTTError("torch.jit.trace cannot follow a layer: use torch.export")
        sorted_already = packing is not None
        if mask is not None or reset is not None:
            check_flags(x, mask, reset)
            packing = packing or pack(mask, reset, x.device)
        if packing is not None:
            x = packing.clear(x) if sorted_already else packing.sort(x)
        if self.refuse_nan:
            check_finite(x)
        state = self.start(x, packing) if state is None else self._taken(x, state)
        y, state = self.run(x, state, packing, donate_state)
        if packing is not None:
            y = packing.clear(y) if sorted_already else packing.restore(packing.clear(y))
        return y, state

    def learn(self, x: Tensor, state: Any = None, *, mask: Tensor | None = None, reset: Tensor | None = None) -> Any:
        """The state after tokens that are learned without reading; arguments and errors as of a call."""
        return self(x, state, mask=mask, reset=reset)[1]

    def read(self, x: Tensor, state: Any, *, mask: Tensor | None = None) -> Tensor:
        """Outputs for tokens that are not learned: all are read with `state`, which does not change.

        `learn` and `read` are the two halves of a call. With `optimizer.read=previous`, reading a mini-batch and then
        learning it gives the outputs of a call. With `inclusive`, learning a token and then reading it does so only if
        the layer does not use positions or earlier tokens (RoPE, convolutions).

        Args:
            x: `[B, T, D]`, the tokens that would come next; convolutions see those before them.
            state: what `learn`, or a call, has returned.
            mask: `[B, T]` bool, True for real tokens; outputs of padding are 0.

        Returns:
            Outputs `[B, T, D]`.

        Raises:
            MetaTTTError: as of a call; or the layer cannot read without learning.
        """
        if not torch.is_tensor(x) or x.ndim != 3 or x.size(2) != self.dim or not (x.size(1) and x.is_floating_point()):
            raise _wrong_tokens(x, self.dim)
        check_flags(x, mask, None)
        packing = pack(mask, None, x.device)
        if packing is not None:
            x = packing.sort(x)
        if self.refuse_nan:
            check_finite(x)
        y = self.answer(x, self.start(x, packing) if state is None else self._taken(x, state), packing)
        return y if packing is None else packing.restore(packing.clear(y))

    def _taken(self, x: Tensor, state: Any) -> Any:
        """The state that a caller passed, checked; a copy if it was made in inference mode, and gradients are taken."""
        self.check_state(x, state)
        if not (needs_probes() or RECORDING.get()) and any(one.is_inference() for one in tensors_of(state)):
            state = map_tensors(torch.clone, state)
        return state

    def answer(self, x: Tensor, state: Any, packing: Packing | None = None) -> Tensor:
        """Outputs `[B, T, D]` of tokens that are not learned; arguments as of `run`.

        Raises:
            MetaTTTError: the layer cannot do this.
        """
        raise MetaTTTError(
            f"{type(self).__name__} learns every token that it reads: it cannot read without "
            "learning; choose a layer with a learner, e.g. layer=ttt_linear"
        )

    @abstractmethod
    def run(
        self, x: Tensor, state: Any, packing: Packing | None = None, donate_state: bool = False
    ) -> tuple[Tensor, Any]:
        """What the layer computes.

        Args:
            x: `[B, T, D]`, with padding after the real tokens, and 0 there.
            state: `start`, or what an earlier call has returned.
            packing, donate_state: as of `forward`.

        Returns:
            Outputs `[B, T, D]`, anything at padding, and the state after the last real token.
        """

    def start(self, x: Tensor, packing: Packing | None = None) -> Any:
        """The state before the first token of `x` `[B, T, D]`."""
        pos = x.new_zeros(x.shape[0], dtype=torch.long) if packing is None else packing.start
        return State(pos, 0, {}, {}, {}, {})

    def check_state(self, x: Tensor, state: Any) -> None:
        """Checks a state that a caller passed with the tokens `x` `[B, T, D]`.

        Raises:
            MetaTTTError: it is not of this layer, or of another number of sequences.
        """
        if not isinstance(state, State):
            kind = type(state).__name__
            raise MetaTTTError(f"the state is from another layer: it is a {kind}, expected a State, or None")
        if state.pos.shape[0] != x.shape[0]:
            raise MetaTTTError(
                f"the state is for {state.pos.shape[0]} sequences, x holds {x.shape[0]}: start with state=None"
            )

    def call(self, x: Tensor, state: State, packing: Packing | None = None, donate_state: bool = False) -> Call:
        """What the layer knows about a call with the tokens `x` `[B, T, D]`."""
        count, size = x.shape[1], self.mini_batch_size
        if packing is not None:
            positions, after = packing.positions(state.pos)
            ctx = Context(positions, packing.valid, packing.first, size)
        else:
            positions, after = state.pos.unsqueeze(1), state.pos + count
            if count > 1:
                positions = torch.arange(count, device=x.device) + positions
            ctx = Context(positions, None, None, size)
        return Call(ctx, after, packing, donate_state)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("group_size", "outer") and name in self._settings:  # they may be assigned later
            self._settings[name].check(self._key(name), value)
        super().__setattr__(name, value)

    def check_held(self, name: str) -> None:
        """Raises an error for something else than a layer of this one's width."""
        held, kinds = getattr(self, name), "a TTTLayer, a Combined or a Mixer"
        if not isinstance(held, SequenceLayer) or held.dim != self.dim:
            width = f" of dim={held.dim}" if isinstance(held, SequenceLayer) else ""
            kind = type(held).__name__
            raise MetaTTTError(f"layer.{name} is a {kind}{width}: it must be {kinds} of dim={self.dim}")

    def _key(self, name: str) -> str:
        return name if name in ("dim", "num_heads") else super()._key(name)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


def _wrong_tokens(x: object, dim: int) -> MetaTTTError:
    found = f"{x.dtype} of shape {list(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
    return MetaTTTError(f"x is {found}, expected [B, T, {dim}] of floating-point numbers, with at least one token")


def check_finite(x: Tensor) -> None:
    """Raises an error for NaN and infinity. Checked only where this is cheap: on a CPU, and not in a function transform
    (then NaN appears in the result).

    Raises:
        NotFinite: `x` has such values.
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling() or transformed() or RECORDING.get():
        return
    if type(x) is not Tensor and stands_for_others(x):
        return
    # One pass over x as a rule: only a sum that overflows needs a second look.
    if not math.isfinite(x.sum().item()) and not bool(x.isfinite().all()):
        raise NotFinite("x contains NaN or infinite values: look for the first layer or loss that produced them")
