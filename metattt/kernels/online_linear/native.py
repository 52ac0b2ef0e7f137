"""Online rules of a linear map in C++ on the CPU: delta rules with decays by head or channel, erase views and several
pairs a token, and linear attention with decays.

Token after token with the weights in the cache, forward and backward: for heads of common widths the products of a
chunk, its triangular system, and the tensors between them take longer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.inner.tokens import MiniBatches, Tokens
from metattt.kernels.cpu.native_scan import run, use_large_pages
from metattt.kernels.online_linear.rule import OnlineDot, OnlineLinear, Pairs, pairs_of
from metattt.kernels.operator import BEHIND, LIBRARY, Operation, Pass, Results, empty_like_tokens, reason_not_widened
from metattt.native.library import load

SOURCE = Path(__file__).with_name("native.cpp")
SMALLEST_SHARE = 512  # pairs that are worth a thread


class NativeOnlineLinear(OnlineLinear, Operation):
    """Of the squared loss."""

    name = "online_linear.native"
    device = "cpu"
    traceable = False
    documents = "inside"

    def reason_rejected(self, given: MiniBatches) -> str | None:
        gates = given.tokens.gates
        if gates.beta is not None or gates.weight_lr is not None:
            return "a momentum gate, or a step size for every weight"
        return reason_not_widened(given) or (None if load(SOURCE, {}) else "no library of a compiler (see warning)")

    def group_size(self, call: Pass) -> int:
        """Pairs whose weights the backward pass stores at once, whatever `layer.group_size` says of mini-batches. More
        need fewer to be kept, and no longer fit into the cache."""
        return max(32, min(256, round(math.sqrt(call.given.tokens.views.k.shape[2]))))

    def forward(self, call: Pass) -> Results:
        (w,), pairs = call.given.weights.values(), pairs_of(call.given.tokens)
        _check(pairs, w)
        k, v, q = pairs[:3]
        y = empty_like_tokens(q[..., :1].expand(*q.shape[:3], v.shape[3]))
        after, kept = _empty(w), []
        if call.keep:
            kept = [w.new_empty(*w.shape[:2], -(-k.shape[2] // call.group), *w.shape[2:])]
        arrays = [w.contiguous(), after, kept[0] if kept else None, None, None, None]
        self._run("forward", call, pairs, [y, *[None] * 8], arrays)
        return y, [after], kept

    def operate(self, call: Pass) -> list[Tensor]:
        given = call.given
        (w,), rule = given.weights.values(), (given.exclusive, given.decayed, self.erases)
        return list(torch.ops.metattt.online_linear.default(list(given.tokens.tensors), w, *rule, call.group))

    def backward(
        self, call: Pass, kept: Sequence[Tensor], dy: Tensor | None, dweights: Sequence[Tensor | None]
    ) -> list[Tensor]:
        (w,) = call.given.weights.values()
        with torch.enable_grad():
            given = call.given.tokens.map(lambda x: x.detach().requires_grad_())
            made = pairs_of(given)
        pairs = Pairs(*[None if x is None else x.detach() for x in made])  # type: ignore[arg-type]
        dy = torch.zeros_like(pairs.v[:, :, : pairs.q.shape[2]]) if dy is None else dy
        found = [None if x is None else empty_like_tokens(x) if x.ndim == 4 else _empty(x) for x in pairs]
        after, dstart = None if dweights[0] is None else dweights[0].contiguous(), _empty(w)
        dorigin = [] if call.given.begins is None else [w.new_zeros(w.shape)]
        arrays = [None, None, kept[-1], after, dstart, dorigin[0] if dorigin else None]
        self._run("backward", call, pairs, [None, dy, *found], arrays)
        outputs = [(x, d) for x, d in zip(made, found, strict=True) if x is not None and d is not None]
        inputs = [x for x in given.tensors if x is not None]
        origin = [d.sum(0, keepdim=True) for d in dorigin]
        return [*torch.autograd.grad([x for x, _ in outputs], inputs, [d for _, d in outputs]), dstart, *origin]

    def _run(
        self, name: str, call: Pass, pairs: Pairs, others: Sequence[Tensor | None], arrays: Sequence[Tensor | None]
    ) -> None:
        """Calls a function of the library with `Call` as 8-byte numbers: `pairs` and `others` are its views, in order,
        `arrays` are dense."""
        library = load(SOURCE, {})
        assert library is not None  # `reason_rejected` saw it
        batch, heads, count, rows = pairs.k.shape
        sizes = heads, count, count // pairs.q.shape[2], rows, pairs.v.shape[3], call.group
        flags = self.erases, call.given.decayed, call.given.exclusive, pairs.a is not None and pairs.a.ndim == 4
        arrays = [*arrays[:5], call.given.begins, *(call.given.origin.values() or [None]), arrays[5]]
        use_large_pages(library, others[0], *others[2:], *arrays[1:3])  # y or cotangents, and what is kept
        learners, function = batch * heads, getattr(library, name)
        shares = learners * count // SMALLEST_SHARE
        if run(function, (*sizes, *flags), (*pairs, *others), arrays, learners, shares):
            raise MemoryError("no memory for the weights of a chunk of tokens")


class NativeOnlineDot(OnlineDot, NativeOnlineLinear):
    """Of the dot product's loss."""

    name = "online_linear.native_dot"


def _empty(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _check(pairs: Pairs, w: Tensor) -> None:
    """Refuses tensors of other shapes than k and the weights imply: code that gets addresses would read past their
    ends."""
    k, q, a = pairs.k, pairs.q, pairs.a
    learners, (rows, columns), count = k.shape[:2], w.shape[2:], k.shape[2]
    shapes = ((count, rows), (count, columns), (q.shape[2], rows), (count, rows), (count, rows), (count,))
    for x, shape in zip([*pairs[:6], w], (*shapes, (rows, columns)), strict=True):
        if x is not None and x.shape != (*learners, *shape):
            raise MetaTTTError(f"online_linear was given {list(x.shape)}: it takes {[*learners, *shape]}")
    if count % q.shape[2] or (a is not None and a.shape not in (k.shape, k.shape[:3])):
        raise MetaTTTError(f"online_linear was given {count} pairs, and decays that are neither one nor {rows} a pair")


LIBRARY.define(
    "online_linear(Tensor?[] tokens, Tensor w, bool exclusive, bool decayed, bool erases, int group)"
    " -> (Tensor, Tensor)"
)


def online_linear(
    tensors: Sequence[Tensor | None], w: Tensor, exclusive: bool, decayed: bool, erases: bool, group: int
) -> tuple[Tensor, Tensor]:
    """The operator `metattt::online_linear`, without derivatives: `Tokens.tensors` and W `[B, H, rows, columns]` to
    predictions and the weights after the last token."""
    given = MiniBatches(Tokens.from_tensors(tensors), {"w": w}, {}, None, 1, w.dtype, None, exclusive, decayed)
    y, (after,), _ = (NativeOnlineLinear if erases else NativeOnlineDot)().forward(Pass(given, group, False))
    return y, after


LIBRARY.impl("online_linear", online_linear, "CPU")
BEHIND[torch.ops.metattt.online_linear.default] = online_linear


@torch.library.register_fake("metattt::online_linear", lib=LIBRARY)
def _(tensors: Sequence[Tensor | None], w: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    q = Tokens.from_tensors(tensors).views.q
    return empty_like_tokens(q[..., :1].expand(*q.shape[:3], w.shape[3])), _empty(w)
