"""Kernels in C++: what the functions of `native.h` are passed, and what their gradients mean.

Every learner (one head of one sequence) is computed on its own, so that its weights stay in the cache; the learners are
divided among as many threads as torch may use. Nothing is kept for the backward pass but the inputs and the weights at
the start of each group.
"""

from __future__ import annotations

import ctypes
import struct
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metattt.inner.tokens import MiniBatches
from metattt.kernels.cpu.native_advance import advance, one_token
from metattt.kernels.operator import Operation, Pass, Results, empty_gradients, reason_not_widened, wide
from metattt.native.library import load
from metattt.native.threads import divide
from metattt.state import Tensors


class NativeForm(Operation):
    """A kernel whose C++ source takes one group of mini-batches after the other. A subclass says which source, and its
    macros."""

    device = "cpu"
    documents = "inside"
    traceable = True
    source: Path
    source_of_tokens: Path  #: the one that takes token after token
    largest_group = 16

    @abstractmethod
    def defines(self, sizes: Sizes) -> dict[str, int] | str:
        """The macros of the source for these sizes, all of them numbers; or why there are none."""

    def reason_rejected(self, given: MiniBatches) -> str | None:
        width = given.tokens.views.k.shape[-1]
        fits = width % 16 == 0 and 16 <= width <= 128 and given.size % 16 == 0 and 16 <= given.size <= 64
        misfit = None if fits else f"a head width of {width} with {given.size} tokens per mini-batch"
        return self._refused(given, misfit, self.source)

    def reason_not_decoded(self, given: MiniBatches) -> str | None:
        width = given.tokens.views.k.shape[-1]
        misfit = None if width % 16 == 0 and 16 <= width <= 128 else f"a head width of {width}"
        return self._refused(given, misfit, self.source_of_tokens)

    def _refused(self, given: MiniBatches, misfit: str | None, source: Path) -> str | None:
        gates = given.tokens.gates[1:]
        if gates.count(None) != len(gates):
            return "a gate besides the step size"
        if (misfit := reason_not_widened(given) or misfit) is not None:
            return misfit
        if torch.compiler.is_compiling():  # which needs a C++ compiler itself
            found: Any = self.defines(sizes_of(given))
        else:
            found = self.library(source, sizes_of(given))
        return found if isinstance(found, str) else None

    def advance(
        self, given: MiniBatches, update: Tensors | None, phase: int | Tensor, donate_state: bool
    ) -> tuple[Tensor, Tensors, Tensors | None]:
        given = wide(given) if given.matmul_dtype.itemsize == 2 else given
        self.check(given, update, phase, native=True)
        if not isinstance(phase, Tensor):
            function = self.library(self.source_of_tokens, sizes_of(given)).advance
            return advance(function, given, update, phase, donate_state)
        k, v, q, eta = (x.squeeze(2) for x in (*given.tokens.views[:3], given.tokens.gates.eta))
        weights = {name: _own(w, donate_state) for name, w in given.weights.items()}
        if update is None:
            update = {name: torch.zeros_like(w) for name, w in weights.items()}
        else:
            update = {name: _own(update[name].to(w.dtype), donate_state) for name, w in weights.items()}
        state = list(weights.values()), list(update.values())
        rest = given.slow["norm_scale"], given.slow["norm_bias"], given.tau, phase, given.size, self.device
        return self.decode_operator(q, k, v, eta, *state, *rest).unsqueeze(2), weights, update

    def one_token(
        self, q: Tensor, k: Tensor, v: Tensor, eta: Tensor, weights: Sequence[Tensor], update: Sequence[Tensor],
        scale: Tensor, shift: Tensor, tau: Tensor | None, phase: Tensor, size: int,
    ) -> Tensor:  # fmt: skip
        sizes = Sizes(size, q.shape[-1], weights[0].shape[-1], len(weights))
        function = self.library(self.source_of_tokens, sizes).advance
        return one_token(function, q, k, v, eta, weights, update, scale, shift, tau, phase, size)

    def forward(self, call: Pass) -> Results:
        self.check(call.given, native=True)
        library = self.library(self.source, sizes_of(call.given))
        y, after, kept = self.results(call)
        assert not kept or kept[0].shape[-1] == library.state_size()
        use_large_pages(library, y, *kept)
        _run(library.forward, call, [y, *[None] * 5], after, kept[0] if kept else None)
        return y, after, kept

    def backward(
        self, call: Pass, kept: Sequence[Tensor], dy: Tensor | None, dweights: Sequence[Tensor | None]
    ) -> list[Tensor]:
        given, library = call.given, self.library(self.source, sizes_of(call.given))
        q, tau, scale = given.tokens.views.q, given.tau, given.slow["norm_scale"]
        batch, heads = q.shape[:2]
        if dy is None:
            dy = q.new_zeros(q.shape[-1:]).expand_as(q)
        found = empty_gradients(given.tokens)
        (dk, dv, dq), deta = found.views[:3], found.gates.eta
        use_large_pages(library, dk, dv, dq)
        dstart = [w.new_empty(w.shape) for w in given.weights.values()]
        dorigin = [w.new_empty(w.shape) for w in given.weights.values() if given.begins is not None]
        dscale, dshift = (scale.new_zeros(batch, *scale.shape) for _ in range(2))
        dtau = scale.new_zeros(batch, heads, given.size)
        views, cotangents = [None, dy, dk, dv, dq, deta], (dweights[: len(dstart)], dstart, dorigin)
        _run(library.backward, call, views, (), kept[-1], cotangents, (dscale, dshift, dtau))
        steps = [] if tau is None else [dtau.sum(0) if tau.shape[0] == heads else dtau.sum((0, 1)).unsqueeze(0)]
        origin = [d.sum(0, keepdim=True) for d in dorigin]
        return [dk, dv, dq, deta, *steps, dscale.sum(0), dshift.sum(0), *dstart, *origin]

    def library(self, source: Path, sizes: Sizes) -> Any:
        """The compiled source, a `ctypes.CDLL`; or why there is none, which `reason_rejected` and `reason_not_decoded`
        have asked."""
        key = source, *sizes
        if key not in _libraries:
            found: Any = self.defines(sizes)
            if not isinstance(found, str):
                if source is self.source_of_tokens:  # which takes mini-batches of any size
                    del found["TOKENS"]
                found = load(source, found) or "no library of a compiler (see warning)"
            if not isinstance(found, str) and source is self.source_of_tokens:
                found.advance.argtypes = ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64
            _libraries[key] = found
        return _libraries[key]


class Sizes(NamedTuple):
    """What a library is compiled for: tokens b of a mini-batch, widths of a head and of what its first matrix makes,
    and the number of weights."""

    tokens: int
    width: int
    hidden: int
    weights: int


def sizes_of(given: MiniBatches) -> Sizes:
    """Those of a call."""
    weights = given.weights
    return Sizes(given.size, given.tokens.views.k.shape[-1], next(iter(weights.values())).shape[-1], len(weights))


def _own(x: Tensor, donated: bool) -> Tensor:
    """`x` in memory that may be written over."""
    return x.contiguous() if donated else x.clone(memory_format=torch.contiguous_format)


_libraries: dict[tuple[Any, ...], ctypes.CDLL | str] = {}
"""By source and sizes, or why there is none."""


def use_large_pages(library: ctypes.CDLL, *made: Tensor | None) -> None:
    """For new tensors: handing out the memory of a long sequence in small pages takes a fifth of the time of the
    forward pass."""
    for x in made:
        if x is not None:
            library.use_large_pages(ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(x.nbytes))


def run(
    function: Any,
    sizes: Sequence[int],
    views: Sequence[Tensor | None],
    arrays: Sequence[Tensor | int | None],
    learners: int,
    shares: int,
) -> bool:
    """Calls a function of a library for all learners, and says whether it has failed for any. (ctypes gives up the lock
    of the interpreter.)

    Args:
        sizes, views, arrays: what the fields of the function's struct are made of, in order, 8 bytes each: numbers;
            tensors `[B, H, T]` or `[B, H, T, d]` of any strides; dense tensors, and numbers. None: a null pointer.
        shares: how many threads are worth it, at most; torch may allow fewer.
    """
    numbers, held = list(sizes), list[Tensor]()  # copies are held on to until the call ends
    for x in views:
        if x is None:
            numbers += 0, 0, 0, 0
        else:
            held.append(x if x.ndim == 3 or x.stride(3) == 1 else x.contiguous())
            numbers += held[-1].data_ptr(), *held[-1].stride()[:3]
    for array in arrays:
        if isinstance(array, Tensor):
            held.append(array.contiguous())
        numbers.append(held[-1].data_ptr() if isinstance(array, Tensor) else array or 0)
    packed, threads = struct.pack(f"={len(numbers)}q", *numbers), max(1, min(torch.get_num_threads(), learners, shares))

    def some(first: int, last: int) -> int:
        found: int = function(packed, ctypes.c_int64(first), ctypes.c_int64(last))
        return found

    return any([some(0, learners)] if threads == 1 else divide(some, learners, threads))


def _run(
    function: Any,
    call: Pass,
    views: Sequence[Tensor | None],
    after: Sequence[Tensor],
    kept: Tensor | None,
    cotangents: Sequence[Sequence[Tensor | None]] = ((), (), ()),
    sums: Sequence[Tensor | None] = (None, None, None),
) -> None:
    """Calls a function with `Call` of `native.h`.

    Args:
        views: y, its cotangent, and those of k, v, q and η; None where there is none.
        after, kept: the weights at the end, and at the start of each group.
        cotangents: of the weights at the end, at the start, and of those that documents begin with.
        sums: cotangents of scale and shift of each sequence, and of τ of each learner.
    """
    given, eta = call.given, call.given.tokens.gates.eta
    batch, heads, length = eta.shape
    learners, count = batch * heads, length // given.size
    tau = eta.new_ones(1, given.size) if given.tau is None else given.tau
    none = (None,) * len(given.weights)
    pad = (None,) * (4 - len(none))
    dafter, dstart, dorigin = cotangents
    arrays: list[Tensor | int | None] = [tau, 0 if tau.shape[0] == 1 else given.size]
    arrays += given.slow["norm_scale"], given.slow["norm_bias"], *given.weights.values(), *pad, *(after or none), *pad
    arrays += kept, *(dafter or none), *pad, *(dstart or none), *pad, *sums
    arrays += given.begins, *(given.origin.values() or none), *pad, *(dorigin or none), *pad
    sizes, views = (heads, count, call.group), (*given.tokens.views[:3], eta, *views)
    if run(function, sizes, views, arrays, learners, learners * count // SMALLEST_SHARE):
        raise MemoryError(
            f"no memory for {call.group} mini-batches of a learner: a smaller layer.group_size needs less"
        )


SMALLEST_SHARE = 32  #: mini-batches of a learner that are worth a thread
