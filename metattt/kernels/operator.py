"""Operations on whole mini-batches: of autograd, and of `torch.library`, one operator for all devices.

An operation has a kernel for each device: in C++ on the CPU, by Triton on a GPU. What they keep for the backward pass
differs; arguments, shapes and the derivative are the same, and are here. A call of a layer runs the kernel directly, as
one `torch.autograd.Function`: calling the operator takes time that decoding, and small models on a GPU, do not have.
`torch.compile` sees the operator, one node for all mini-batches; so do tensors without memory, which it has shapes for.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.inner.tokens import MiniBatches, Scan, Tokens
from metattt.kernels.base import Kernel, register_kernel
from metattt.modules import RECORDING
from metattt.optimizers.base import Gates
from metattt.state import Tensors
from metattt.tasks.base import Views
from metattt.torch_private import for_torch

Results = tuple[Tensor, list[Tensor], list[Tensor]]
"""Predictions, laid out as `empty_like_tokens` does; the weights after the last mini-batch, on a GPU also M of the
tokens after it; and what is kept for the backward pass."""


class Pass(NamedTuple):
    """What both passes of an operation are given.

    Attributes:
        given: tokens and weights; its tensors are those of `flat`.
        group: mini-batches of a group.
        keep: whether a backward pass will follow.
        final: whether the weights at the end are wanted; on the CPU they are always made.
        documents: bounds `[N + 1]` of documents in one row of tokens, which only a GPU takes; None: each row is a
            sequence.
    """

    given: MiniBatches
    group: int
    keep: bool
    final: bool = True
    documents: Tensor | None = None

    @property
    def sequences(self) -> int:
        return self.given.tokens.views.k.shape[0] if self.documents is None else self.documents.shape[0] - 1


class Operation(Kernel):
    """Both passes over whole mini-batches in groups, of which the weights at the start are kept for the backward
    pass."""

    largest_group: int  #: mini-batches; bounds what is held while a group is computed
    operator: Callable[..., list[Tensor]]  #: by `register_operators`
    decode_operator: Callable[..., Tensor]  #: by `register_operators`
    uses_after = False  #: the backward pass begins at the weights after the last mini-batch

    @abstractmethod
    def forward(self, call: Pass) -> Results:
        """Computes the results."""

    @abstractmethod
    def backward(
        self, call: Pass, kept: Sequence[Tensor], dy: Tensor | None, dweights: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Cotangents of the tensors of a call, in the order of `flat`, laid out as `empty_gradients` does.

        Args:
            kept: ends with what `forward` kept; what it returned besides may come before.
            dweights: cotangents of what `forward` returned besides predictions, in order.
        """

    def results(self, call: Pass) -> Results:
        """What `forward` returns, uninitialized. On the CPU the weights at the start of each group are kept: `[B·H,
        groups, numbers of a learner]`."""
        (views, gates), weights = call.given.tokens, list(call.given.weights.values())
        k, eta = views.k, gates.eta
        groups = -(-k.shape[2] // (call.given.size * call.group))
        size = sum([w.shape[-1] * (w.shape[-2] + 1) for w in weights if w.ndim == 4])  # matrices, with room for a bias
        kept = [eta.new_empty(k.shape[0] * k.shape[1], groups, size)] if call.keep else []
        return empty_like_tokens(k, eta.dtype), [w.new_empty(w.shape) for w in weights], kept

    def group_size(self, call: Pass) -> int:
        """Mini-batches per group: √n keeps as many weights between groups as inside one."""
        count = call.given.tokens.views.k.shape[2] // call.given.size
        return call.given.group_size or max(1, min(self.largest_group, round(math.sqrt(count))))

    def scan(self, given: MiniBatches, reference: Scan, documents: Tensor | None = None) -> tuple[Tensor, Tensors]:
        if type(self).device == "cpu" and given.matmul_dtype.itemsize == 2:
            given = wide(given)
        call, k = self.passed(given, documents=documents), given.tokens.views.k
        has_memory = type(self).device == "cpu" or (type(k) is Tensor and not k.is_meta)  # a fake one has none
        if torch.compiler.is_compiling() or RECORDING.get() or not has_memory:
            y, *after = self.operate(call)
        elif call.keep:
            y, *after = _Scan.apply(self, reference, call, *flat(call.given))
        else:
            with torch.cuda.device_of(k):
                y, after, _ = self.forward(call)
        return y.to(given.tokens.gates.eta.dtype), dict(zip(given.weights, after, strict=False))

    def one_token(
        self, q: Tensor, k: Tensor, v: Tensor, eta: Tensor, weights: Sequence[Tensor], update: Sequence[Tensor],
        scale: Tensor, shift: Tensor, tau: Tensor | None, phase: Tensor, size: int,
    ) -> Tensor:  # fmt: skip
        """As `advance`, for one token of each sequence, whose mini-batches are open at places of their own.

        Args:
            q, k, v, eta: `[B, H, d]` and `[B, H]`.
            weights, update: W_a and M `[B, H, ...]`, contiguous; both are written over.
            scale, shift, tau, size: as of `MiniBatches`.
            phase: `[B]` integers, the place of the token in its mini-batch.

        Returns:
            Predictions `[B, H, d]`, contiguous, in the type of q.
        """
        raise NotImplementedError(self.name)

    def passed(self, given: MiniBatches, final: bool = True, documents: Tensor | None = None) -> Pass:
        """A call: whether a backward pass will follow is known from grad mode and the tensors, the group from sizes."""
        keep = torch.is_grad_enabled() and any(map(attrgetter("requires_grad"), flat(given)))
        call = Pass(given, 0, keep, final, documents)
        return call._replace(group=self.group_size(call))

    def operate(self, call: Pass) -> list[Tensor]:
        """The operator: `Results` in a row."""
        given, *rest = call
        norm = given.slow["norm_scale"], given.slow["norm_bias"]
        tensors = *given.tokens.views[:3], given.tokens.gates.eta, given.tau, *norm, list(given.weights.values())
        return self.operator(*tensors, given.size, *rest, type(self).device)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernel: Operation, reference: Scan, call: Pass, *tensors: Tensor) -> tuple[Tensor, ...]:
        with torch.cuda.device_of(tensors[0]):  # Triton launches on the current device
            y, after, kept = kernel.forward(call)
        ctx.kernel, ctx.reference, ctx.call = kernel, reference, call._replace(given=shell(call.given))
        ctx.set_materialize_grads(False)
        ctx.count = len(tensors)
        ctx.save_for_backward(*tensors, *(after if kernel.uses_after else ()), *kept)
        return (y, *after)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: a block that is run again in the backward pass makes them for one reader
        tensors, kept = saved[: ctx.count], saved[ctx.count :]
        if for_torch(*cotangents):
            return (None, None, None, *by_reference(ctx, tensors, cotangents))
        call = ctx.call._replace(given=filled(ctx.call.given, tensors))
        with torch.cuda.device_of(tensors[0]):
            found = ctx.kernel.backward(call, kept, cotangents[0], cotangents[1:])
        wanted = zip(found, ctx.needs_input_grad[3:], strict=True)
        return (None, None, None, *(x if need else None for x, need in wanted))


def by_reference(ctx: Any, tensors: Sequence[Tensor], cotangents: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The backward pass through the generic dual form: a graph that can be differentiated, if someone wants to."""
    needed, again = ctx.needs_input_grad[-len(tensors) :], torch.is_grad_enabled()
    with torch.enable_grad():
        aliases = [x.view_as(x) if need else x for x, need in zip(tensors, needed, strict=True)]
        y, after = ctx.reference(filled(ctx.call.given, aliases))
    pairs = [
        (out, given.to(out.dtype))
        for out, given in zip((y, *after.values()), cotangents, strict=False)  # M, which a GPU adds, is not read
        if given is not None and out.requires_grad
    ]
    wanted = [x for x, need in zip(aliases, needed, strict=True) if need]
    outputs, given = [out for out, _ in pairs], [cotangent for _, cotangent in pairs]
    found = iter(torch.autograd.grad(outputs, wanted, given, create_graph=again, allow_unused=True))
    return [next(found) if need else None for need in needed]


# -- the tensors of a call, and those that it makes --------------------------------------------------------------------

SLOW = "norm_scale", "norm_bias"  #: slow weights of an operation that takes any, in order


def flat(given: MiniBatches) -> list[Tensor]:
    """The tensors of `given` in one row: an `autograd.Function` tracks its arguments only."""
    tokens = [x for x in given.tokens.tensors if x is not None]
    slow = map(given.slow.__getitem__, SLOW if given.slow else ())
    steps = () if given.tau is None else (given.tau,)
    return [*tokens, *steps, *slow, *given.weights.values(), *given.origin.values()]


def shell(given: MiniBatches) -> MiniBatches:
    """`given` without its tensors, which are saved by the Function; what was there is still to be seen."""
    nothing = torch.empty(0)
    tokens = Tokens.from_tensors([None if x is None else nothing for x in given.tokens.tensors])
    tau = None if given.tau is None else nothing
    weights, slow = dict.fromkeys(given.weights, nothing), dict.fromkeys(given.slow, nothing)
    origin = dict.fromkeys(given.origin, nothing)
    return given._replace(tokens=tokens, weights=weights, slow=slow, tau=tau, origin=origin)


def filled(given: MiniBatches, tensors: Sequence[Tensor]) -> MiniBatches:
    """A `shell` with tensors in the order of `flat`."""
    rest = iter(tensors)
    tokens = given.tokens.map(lambda x: next(rest))
    tau = None if given.tau is None else next(rest)
    slow = {name: next(rest) for name in SLOW} if given.slow else {}
    weights, origin = dict(zip(given.weights, rest, strict=False)), dict(zip(given.origin, rest, strict=True))
    return given._replace(tokens=tokens, weights=weights, slow=slow, tau=tau, origin=origin)


def wide(given: MiniBatches) -> MiniBatches:
    """`given` in fp32, in which kernels on the CPU compute: numbers of 16 bits, of autocast, become it exactly."""
    tensors = [x.float() if x.itemsize == 2 else x for x in flat(given)]
    return filled(shell(given), tensors)._replace(matmul_dtype=torch.float32)


def reason_not_widened(given: MiniBatches) -> str | None:
    """Why `wide` does not make it fp32, or None."""
    types = {given.matmul_dtype, *map(attrgetter("dtype"), flat(given))}
    if types <= {torch.float32, given.matmul_dtype} and given.matmul_dtype != torch.float64:
        return None
    return f"numbers of {', '.join(sorted(map(str, types)))}: it takes fp32, and views of 16 bits"


def empty_like_tokens(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Memory for `x` `[B, H, T, d]` in which the heads of a token lie side by side, as the layer goes on to use
    them."""
    batch, heads, length, width = x.shape
    return x.new_empty((batch, length, heads, width), dtype=dtype).transpose(1, 2)


def rows(x: Tensor) -> Tensor:
    """With the numbers of a token side by side, which a view, or a cotangent (that of a sum is expanded), may lack."""
    return x if x.stride(-1) == 1 else x.contiguous()


def dense(x: Tensor | None) -> Any:
    return None if x is None else x.contiguous()


def empty_gradients(tokens: Tokens) -> Tokens:
    """Memory for the cotangents of views and gates, each in the type of its tensor, whatever the strides of that."""
    return tokens.map(lambda x: empty_like_tokens(x) if x.ndim == 4 else x.new_empty(x.shape))


# -- operators ---------------------------------------------------------------------------------------------------------

ANY_STRIDES = (torch.Tag.flexible_layout,)
"""Without it Inductor asks for the strides of its first example, and compiles every length anew."""


LIBRARY = torch.library.Library("metattt", "FRAGMENT")  # (what `custom_op` makes costs a token three times as much)
BEHIND: dict[object, Callable[..., Any]] = {}
"""What computes an operator of `LIBRARY`: its call through torch takes as long as it does."""


def register_operators(name: str, kernels: Sequence[type[Operation]]) -> None:
    """Registers the kernels of an operation, one for each device, and makes its operators: `metattt::<name>`,
    `metattt::<name>_backward` and `metattt::<name>_decode`."""
    for kernel in kernels:
        register_kernel(kernel)
    made = {kernel.device: kernel() for kernel in kernels}
    learned = next(iter(made.values())).weights

    def passed(tensors: Sequence[Any], weights: Sequence[Tensor], size: int, *rest: Any) -> Pass:
        k, v, q, eta, tau, scale, shift = tensors
        names = learned if len(weights) == len(learned) else learned[::2]
        named, slow = dict(zip(names, weights, strict=True)), {"norm_scale": scale, "norm_bias": shift}
        tokens = Tokens(Views(k, v, q), Gates(eta))
        return Pass(MiniBatches(tokens, named, slow, tau, size, eta.dtype, None), *rest)

    @torch.library.custom_op(f"metattt::{name}", mutates_args=(), tags=ANY_STRIDES)
    def forward(
        k: Tensor, v: Tensor, q: Tensor, eta: Tensor, tau: Tensor | None, scale: Tensor, shift: Tensor,
        weights: Sequence[Tensor], size: int, group: int, keep: bool, final: bool, documents: Tensor | None, by: str,
    ) -> list[Tensor]:  # fmt: skip
        """`Results` in a row. `by`: the device whose kernels compute: that of the tensors, but for Triton's
        interpreter, which runs on the CPU."""
        tensors = k, v, q, eta, tau, scale, shift
        call = passed(tensors, weights, size, group, keep, final, documents)
        with torch.cuda.device_of(k):  # Triton launches on the current device
            y, after, kept = made[by].forward(call)
        return [y, *after, *kept]

    @forward.register_fake
    def _(*given: Any) -> list[Tensor]:
        *tensors, weights, size, group, keep, final, documents, by = given
        y, after, kept = made[by].results(passed(tensors, weights, size, group, keep, final, documents))
        return [y, *after, *kept]

    @torch.library.custom_op(f"metattt::{name}_backward", mutates_args=(), tags=ANY_STRIDES)
    def backward(
        dy: Tensor | None, dweights: Sequence[Tensor | None], kept: Sequence[Tensor],
        k: Tensor, v: Tensor, q: Tensor, eta: Tensor, tau: Tensor | None, scale: Tensor, shift: Tensor,
        weights: Sequence[Tensor], size: int, group: int, documents: Tensor | None, by: str,
    ) -> list[Tensor]:  # fmt: skip
        """Cotangents of the tensors at hand, in this order."""
        tensors = k, v, q, eta, tau, scale, shift
        call = passed(tensors, weights, size, group, True, True, documents)
        with torch.cuda.device_of(k):
            return made[by].backward(call, kept, dy, dweights)

    @backward.register_fake
    def _(dy: Any, dweights: Any, kept: Any, *given: Any) -> list[Tensor]:
        k, v, q, eta, tau, scale, shift, weights, *_ = given
        tokens = empty_gradients(Tokens(Views(k, v, q), Gates(eta)))
        others = [x for x in (tau, scale, shift, *weights) if x is not None]
        return [*(x for x in tokens.tensors if x is not None), *(x.new_empty(x.shape) for x in others)]

    def setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        *tensors, weights, size, group, keep, final, documents, by = inputs
        ctx.set_materialize_grads(False)
        ctx.sizes, ctx.kept = (size, group, keep, final, by), len(output) - 1
        ctx.save_for_backward(documents, *output[1:], *tensors, *weights)

    def differentiate(ctx: Any, cotangents: Sequence[Tensor | None]) -> tuple[Any, ...]:
        (documents, *saved), (size, group, keep, final, by) = ctx.saved_tensors, ctx.sizes
        kept, given = saved[: ctx.kept], saved[ctx.kept :]
        tensors, weights = given[:7], given[7:]
        if not keep:  # whoever called the operator did not expect derivatives
            kept = forward(*tensors, weights, size, group, True, final, documents, by)[1:]
        found = iter(backward(cotangents[0], cotangents[1:], kept, *tensors, weights, size, group, documents, by))
        return (*(None if x is None else next(found) for x in tensors), list(found), *(None,) * 6)

    def refuse(ctx: Any, *cotangents: Any) -> None:
        raise MetaTTTError(
            f"{name}_backward has no derivatives: for those of gradients (create_graph=True) set layer.form=dual, or, "
            "on the CPU, do not compile the layer"
        )

    forward.register_autograd(differentiate, setup_context=setup)
    backward.register_autograd(refuse)
    LIBRARY.define(
        f"{name}_decode(Tensor q, Tensor k, Tensor v, Tensor eta, Tensor(a!)[] weights, Tensor(b!)[] update, "
        "Tensor scale, Tensor shift, Tensor? tau, Tensor phase, int size, str by) -> Tensor"
    )

    def decode(*given: Any) -> Tensor:
        *tensors, by = given
        return made[by].one_token(*tensors)

    LIBRARY.impl(f"{name}_decode", decode, "CompositeExplicitAutograd")

    @torch.library.register_fake(f"metattt::{name}_decode", lib=LIBRARY)
    def _(q: Tensor, *rest: Any) -> Tensor:
        return torch.empty_like(q, memory_format=torch.contiguous_format)

    operator = getattr(torch.ops.metattt, f"{name}_decode").default
    BEHIND[operator] = decode
    for kernel in kernels:
        kernel.operator, kernel.decode_operator = getattr(torch.ops.metattt, name).default, operator
