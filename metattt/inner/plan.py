"""How the inner loop of one layer is computed: found out when the layer is built, and looked up in every call."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from metattt.errors import MetaTTTError
from metattt.modules import transformed

if TYPE_CHECKING:
    from metattt.inner.tokens import MiniBatches, Tokens
    from metattt.kernels.base import Kernel

log = logging.getLogger("metattt")


@dataclass
class Plan:
    """How the inner loop of one layer is computed. It rests on what the parts are now: a layer makes a new one when
    they change.

    Attributes:
        form: one of `metattt.inner.inspect.FORMS`, or `scan` for a learner without weights.
        chunks: how the forms compute what no kernel does: a key of `metattt.inner.forms.CHUNKS`.
        linear: the loss of an online rule of a linear learner, whose gradients are known in closed form: `squared`, `dot`,
            or nothing.
        kernels: those that compute this combination; the first one that takes a call is used.
        reasons: of the other kernels and of a solved form that does not hold, why.
        strict: a call that no kernel takes is refused instead of computed as `dual`.
        roles: of the tensors carried for every fast weight.
        period: tokens after which the rule repeats itself; None: all tokens are alike to it.
        block: tokens that the scan hands on together.
        chunk: tokens per compute step; None: a whole block.
        replays: an open mini-batch is carried as raw tokens, and run again when it goes on.
        outer: what the outer loop differentiates: `exact`, `first_order` or `implicit` (`TTTLayer`).
        sees_weights: gates depend on the weights (`InnerOptimizer.gates_at`).
        looks_ahead: tokens of a mini-batch see later ones.
        weights: shapes `[H, *shape]` of the fast weights by name.
        shapes: output shapes of the learner's primitives by the shapes of the tokens, found out once.
        beside: what recomputation would miss (`recompute.captured`), by what a call has; looked at once.
        decoders: the kernel that takes tokens of an open mini-batch, by what its answer depends on.
    """

    form: str
    chunks: str = ""
    linear: str = ""
    kernels: list[Kernel] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    strict: bool = False
    roles: tuple[str, ...] = ()
    period: int | None = None
    block: int = 1
    chunk: int | None = None
    replays: bool = False
    sees_weights: bool = False
    looks_ahead: bool = False
    outer: str = "exact"
    weights: dict[str, tuple[int, ...]] = field(default_factory=dict)
    shapes: dict[tuple[object, ...], list[torch.Size]] = field(default_factory=dict)
    decoders: dict[tuple[object, ...], Kernel | None] = field(default_factory=dict)
    beside: dict[tuple[object, ...], list[str]] = field(default_factory=dict)
    said: set[tuple[str, str, str]] = field(default_factory=set)
    said_cut: bool = False  #: that a call cuts the mini-batches of a `block` read
    basis: tuple[object, ...] = ()  #: the state of the parts that it was made for

    def __reduce__(self) -> tuple[object, ...]:
        return Plan, ("",)  # not written to disk: a layer that was makes its plan again

    def __deepcopy__(self, memo: dict[int, object]) -> Plan:
        return replace(
            self,
            kernels=list(self.kernels),
            shapes=dict(self.shapes),
            decoders=dict(self.decoders),
            said=set(self.said),
        )

    def kernel(self, given: MiniBatches) -> Kernel | None:
        """The first kernel that takes these whole mini-batches.

        Raises:
            MetaTTTError: none does, and `layer.form=fused` was asked for.
        """
        device, reasons = given.tokens.k.device.type, []
        if generalised(given.tokens):
            reasons = ["kernels know no erase views, no several pairs a token and no labels of another shape than keys"]
        elif (
            transformed() and not torch.compiler.is_compiling()
        ):  # (to a compiler every call looks like one)
            reasons = ["kernels do not run inside torch.func transforms"]
        else:
            for kernel in self.kernels:
                if kernel.device != device:
                    reason: str | None = f"for {kernel.device}"
                elif torch.compiler.is_compiling() and not kernel.traceable:
                    reason = "not under torch.compile"
                else:
                    reason = kernel.reason_rejected(given)
                if reason is None:
                    self._say("fused", device, kernel.name)
                    return kernel
                reasons.append(f"{kernel.name}: {reason}")
        message = "; ".join(reasons)
        if self.strict:
            raise MetaTTTError(
                f"layer.form=fused: no kernel takes this call on {device} ({message}): set layer.form=auto"
            )
        self._say("dual", device, message)
        return None

    def decoder(self, given: MiniBatches) -> Kernel | None:
        """The first kernel that takes these tokens of an open mini-batch."""
        if transformed() or torch.compiler.is_compiling():
            return None
        if generalised(given.tokens):
            return None
        key = decided_by(given)
        if key not in self.decoders:
            device = given.tokens.k.device.type
            here = (kernel for kernel in self.kernels if kernel.device == device)
            self.decoders[key] = next((kernel for kernel in here if kernel.reason_not_decoded(given) is None), None)
        return self.decoders[key]

    def say_stored(self, beside: list[str]) -> None:
        """Once, that mini-batches are stored because of tensors that recomputation would miss."""
        if ("stored", "", "") not in self.said:
            self.said.add(("stored", "", ""))
            log.warning(
                "every mini-batch is stored for the backward pass, which takes more memory: the inner loop reaches %s by "
                "a closure or a tensor made outside; use parameters as attributes of a part, or set layer.group_size=0",
                beside[0] if len(beside) == 1 else f"{beside[0]} and {len(beside) - 1} more",
            )

    def _say(self, form: str, device: str, why: str) -> None:
        """The choice of a kernel in the debug log, once."""
        if not torch.compiler.is_compiling() and (form, device, why) not in self.said:
            self.said.add((form, device, why))
            log.debug("form=%s on %s: %s", form, device, why)


def generalised(tokens: Tokens) -> bool:
    """Whether tokens have what only the generic forms know: an erase view, decays by channel, several pairs, labels of
    another shape than keys."""
    if tokens.p is not None or tokens.b is not None or tokens.decay is not None or tokens.k.ndim == 5:
        return True
    return tokens.v.shape != tokens.k.shape


def decided_by(given: MiniBatches) -> tuple[object, ...]:
    """What a kernel's `reason_not_decoded` may depend on: types, widths, gates and the device, but not the number of
    tokens or sequences."""
    k, v, q, eta, *rest = given.tokens
    types = [x.dtype for x in (*given.weights.values(), *given.slow.values())]
    tau = None if given.tau is None else given.tau.dtype
    here = [gate is None for gate in rest]
    return (
        k.device,
        k.dtype,
        v.dtype,
        q.dtype,
        eta.dtype,
        tau,
        given.operand,
        given.size,
        k.shape[-1],
        v.shape[-1],
        *types,
        *here,
    )
