"""A kernel in C++ as an operation of autograd: what the kernels of `native.h` are passed, and what their gradients
mean.

Every learner (one head of one sequence) is computed on its own, so that its weights stay in the cache; the learners are
divided among as many threads as torch may use. Nothing is kept for the backward pass but the inputs and the weights at
the start of each group.
"""

from __future__ import annotations

import ctypes
import math
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metattt.inner.tokens import MiniBatches, Scan
from metattt.kernels.base import Kernel
from metattt.kernels.cpu.closed_form import Layout, by_reference, flat, shell
from metattt.kernels.cpu.native import load
from metattt.kernels.cpu.native_advance import advance
from metattt.kernels.cpu.threads import divide
from metattt.state import Tensors

_functions: dict[tuple[Path | None, int, int, int], Any] = {}  # `advance` of libraries, by source and widths


class NativeForm(Kernel):
    """A kernel whose C++ source takes one group of mini-batches after the other. A subclass says which source, and its
    macros."""

    device = "cpu"
    source: Path
    source_of_tokens: Path | None = None  #: the one that takes token after token; None: there is none
    largest_group: int  #: mini-batches; bounds what a thread holds while it computes a group

    @abstractmethod
    def defines(self, given: MiniBatches) -> dict[str, int] | str:
        """The macros of the source for these tensors, all of them sizes or flags; or why there are none."""

    def accepts(self, given: MiniBatches) -> str | None:
        width = given.tokens.views.k.shape[-1]
        fits = width % 16 == 0 and 16 <= width <= 128 and given.size % 16 == 0 and 16 <= given.size <= 64
        misfit = None if fits else f"a head width of {width} with {given.size} tokens per mini-batch"
        return self._refused(given, misfit, self.source)

    def advances(self, given: MiniBatches) -> str | None:
        """Why `advance` cannot take these tensors, or None if it can: a matter of types, widths and gates, not of
        lengths."""
        width = given.tokens.views.k.shape[-1]
        if self.source_of_tokens is None:
            return "whole mini-batches only"
        misfit = None if width % 16 == 0 and 16 <= width <= 128 else f"a head width of {width}"
        return self._refused(given, misfit, self.source_of_tokens)

    def _refused(self, given: MiniBatches, misfit: str | None, source: Path) -> str | None:
        tokens = given.tokens
        if tokens.gates[1:].count(None) != len(tokens.gates) - 1:
            return "a gate besides the step size"
        if given.operand != torch.float32 or {x.dtype for x in flat(given)} != {torch.float32}:
            return "numbers other than fp32"
        if misfit is not None:
            return misfit
        key = source, *_sizes(given)
        if key not in _answers:
            defines = self.defines(given)
            if not isinstance(defines, str) and not load(source, _macros(defines, source is self.source)):
                defines = "no C++ compiler (see the debug log)"
            _answers[key] = defines if isinstance(defines, str) else None
        return _answers[key]

    def advance(
        self, given: MiniBatches, update: Tensors | None, phase: int | Tensor, own: bool
    ) -> tuple[Tensor, Tensors, Tensors | None]:
        """Tokens of an open mini-batch, without gradients; only what `advances` accepts.

        `M ← M − η_t ∇ℓ_t(W_a)`, `W_t = W_a + τ_t M`, `y_t = f(q_t; W_t)`, and place `b − 1` ends a mini-batch:
        `W_a ← W_t`, `M ← 0`.

        Args:
            given: n tokens, all of them real, and the weights W_a of the last commit.
            update: M by name `[B, H, *shape]`; None: zero.
            phase: place of the first token in its mini-batch, `phase + n <= b`; `[B]` int64 where sequences differ, and
                then n = 1.
            own: `given.weights` and `update` are given up and written in place; otherwise they stay as they are.

        Returns:
            Predictions `[B, H, n, d]`; W_a after the tokens; M after them, None if `phase + n == b` for all sequences.
        """
        self.check(given, update, phase, native=True)
        first = next(iter(given.weights.values()))
        key = self.source_of_tokens, given.tokens.views.k.shape[-1], first.shape[-1], len(given.weights)
        function = _functions.get(key)
        if function is None:
            function = _functions[key] = self._function(given)
        return advance(function, given, update, phase, own)

    def _function(self, given: MiniBatches) -> Any:
        defines = self.defines(given)
        assert self.source_of_tokens is not None and not isinstance(defines, str)  # `advances` saw it
        library = load(self.source_of_tokens, _macros(defines, False))
        assert library is not None
        library.advance.argtypes, library.advance.restype = (ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64), None
        return library.advance

    def scan(self, given: MiniBatches, reference: Scan) -> tuple[Tensor, Tensors]:
        tensors = flat(given)
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            y, *weights = _Scan.apply(self, reference, given, *tensors)
        else:
            y, weights, _ = self.forward(given, tensors, keep=False)
        return y, dict(zip(given.weights, weights, strict=True))

    def forward(
        self, given: MiniBatches, tensors: Sequence[Tensor], keep: bool
    ) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """Predictions, weights after the sequence, and those at the start of each group as the library lays them
        out."""
        self.check(given, native=True)
        call = Call(Layout(given, tensors, 1), self.group_size(given))
        library = self.library(given)
        y = call.layout.empty_like_tokens(call.layout.tokens.views.q)
        after = [torch.empty_like(w, memory_format=torch.contiguous_format) for w in call.layout.weights]
        call.views(y=y)
        call.arrays(after=after)
        kept = None
        if keep:
            kept = y.new_empty(call.learners, -(-call.count // call.passed.group), library.state_size())
            call.array(kept=kept)
            use_large_pages(library, kept)
        use_large_pages(library, y)
        call.run(library.forward)
        return y, after, kept

    def library(self, given: MiniBatches) -> ctypes.CDLL:
        key = self.source, *_sizes(given)
        if key not in _libraries:
            defines = self.defines(given)
            assert not isinstance(defines, str)
            library = load(self.source, defines)
            assert library is not None  # `accepts` saw it
            library.state_size.restype = ctypes.c_int64
            _libraries[key] = library
        return _libraries[key]

    def group_size(self, given: MiniBatches) -> int:
        """Mini-batches per group: √n keeps as many weights between groups as inside one."""
        count = given.tokens.views.k.shape[2] // given.size
        return given.group_size or max(1, min(self.largest_group, round(math.sqrt(count))))


def _sizes(given: MiniBatches) -> tuple[int, ...]:
    """What a library is compiled for."""
    weights = given.weights
    return given.size, given.tokens.views.k.shape[-1], next(iter(weights.values())).shape[-1], len(weights)


_libraries: dict[tuple[Any, ...], ctypes.CDLL] = {}
_answers: dict[tuple[Any, ...], str | None] = {}
"""Why there is no library for a source and these sizes; None: there is one."""


def _macros(defines: dict[str, int], whole: bool) -> dict[str, int]:
    """Those of a source; one that takes token after token takes mini-batches of any size."""
    return defines if whole else {name: value for name, value in defines.items() if name != "TOKENS"}


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernel: NativeForm, reference: Scan, given: MiniBatches, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        y, after, kept = kernel.forward(given, tensors, keep=True)
        ctx.reference, ctx.given, ctx.group = reference, shell(given), kernel.group_size(given)
        ctx.library = kernel.library(given)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, kept)
        return (y, *after)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *dweights: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, kept = ctx.saved_tensors
        if torch.is_grad_enabled():  # someone differentiates this backward pass again
            return (None, None, None, *by_reference(ctx, tensors, (dy, *dweights)))
        layout = Layout(ctx.given, tensors, 1)
        call = Call(layout, ctx.group)
        tokens, tau = layout.tokens, layout.tau
        if dy is None:
            dy = tokens.views.q.new_zeros(tokens.views.q.shape[-1:]).expand_as(tokens.views.q)
        found = {name: call.empty_like(getattr(tokens, name)) for name in ("k", "v", "q")} | {
            "eta": torch.empty_like(tokens.gates.eta)
        }
        use_large_pages(ctx.library, *found.values())
        dstart = [torch.empty_like(w, memory_format=torch.contiguous_format) for w in layout.weights]
        dscale, dshift = (x.new_zeros(layout.batch, *x.shape) for x in (layout.scale, layout.shift))
        dtau = dscale.new_zeros(layout.batch, layout.heads, layout.size)
        call.views(dy=dy, **{f"d{name}": x for name, x in found.items()})
        call.arrays(dafter=dweights, dstart=dstart)
        call.array(kept=kept, dscale=dscale, dshift=dshift, dtau=dtau)
        call.run(ctx.library.backward)
        steps = [] if tau is None else [dtau.sum(0) if tau.shape[0] == layout.heads else dtau.sum((0, 1)).unsqueeze(0)]
        gradients = [*found.values(), *steps, dscale.sum(0), dshift.sum(0), *dstart]
        wanted = zip(gradients, ctx.needs_input_grad[3:], strict=True)
        return (None, None, None, *(x if need else None for x, need in wanted))


def use_large_pages(library: ctypes.CDLL, *made: Tensor) -> None:
    """For new tensors: handing out the memory of a long sequence in small pages takes a fifth of the time of the
    forward pass."""
    for x in made:
        library.use_large_pages(ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(x.numel() * x.element_size()))


class _View(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("batch", "head", "token"))]


class _Call(ctypes.Structure):
    """`Call` of `native.h`."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("heads", "count", "group")),
        *((name, _View) for name in ("k", "v", "q", "eta", "y", "dy", "dk", "dv", "dq", "deta")),
        ("tau", ctypes.c_void_p),
        ("tau_head", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("scale", "shift")),
        *((name, ctypes.c_void_p * 4) for name in ("start", "after")),
        ("kept", ctypes.c_void_p),
        *((name, ctypes.c_void_p * 4) for name in ("dafter", "dstart")),
        *((name, ctypes.c_void_p) for name in ("dscale", "dshift", "dtau")),
    ]


class Call:
    """One call of a library: fills in the structure and holds on to the tensors whose memory it names."""

    def __init__(self, layout: Layout, group: int):
        tokens = layout.tokens
        self.layout, self.learners, self.count = layout, layout.batch * layout.heads, layout.length // layout.size
        self.passed = _Call(heads=layout.heads, count=self.count, group=group)
        self.alive: list[Tensor] = []
        self.views(k=tokens.views.k, v=tokens.views.v, q=tokens.views.q, eta=tokens.gates.eta)
        tau = tokens.gates.eta.new_ones(1, layout.size) if layout.tau is None else layout.tau
        self.passed.tau_head = 0 if tau.shape[0] == 1 else layout.size
        self.array(tau=tau, scale=layout.scale, shift=layout.shift)
        self.arrays(start=layout.weights)

    def empty_like(self, x: Tensor) -> Tensor:
        """Like tokens `x` in memory if rows are contiguous there, which a kernel needs."""
        made = torch.empty_like(x)
        return made if made.stride(-1) == 1 else self.layout.empty_like_tokens(x)

    def views(self, **tensors: Tensor) -> None:
        for name, x in tensors.items():
            if x.ndim == 4 and x.stride(-1) != 1:
                x = x.contiguous()
            self.alive.append(x)
            setattr(self.passed, name, _View(x.data_ptr(), *x.stride()[:3]))

    def array(self, **tensors: Tensor) -> None:
        for name, x in tensors.items():
            setattr(self.passed, name, self._contiguous(x))

    def arrays(self, **lists: Sequence[Tensor | None]) -> None:
        for name, tensors in lists.items():
            setattr(
                self.passed, name, (ctypes.c_void_p * 4)(*(None if x is None else self._contiguous(x) for x in tensors))
            )

    def _contiguous(self, x: Tensor) -> int:
        self.alive.append(x.contiguous())
        return self.alive[-1].data_ptr()

    def run(self, function: Any) -> None:
        """`function` for all learners: this thread and others take equal shares. (ctypes gives up the lock of the
        interpreter.)

        Raises:
            MemoryError: no memory for what a thread holds.
        """
        threads = max(1, min(torch.get_num_threads(), self.learners, self.learners * self.count // SMALLEST_SHARE))
        passed = ctypes.byref(self.passed)
        if threads == 1:
            failed = [function(passed, ctypes.c_int64(0), ctypes.c_int64(self.learners))]
        else:
            failed = divide(
                lambda first, last: function(passed, ctypes.c_int64(first), ctypes.c_int64(last)),
                self.learners,
                threads,
            )
        if any(failed):
            raise MemoryError(
                f"no memory for {self.passed.group} mini-batches of a learner: a smaller layer.group_size needs less"
            )


SMALLEST_SHARE = 32  #: mini-batches of a learner that are worth a thread
