"""The laws that hold for any sequence layer, ours or not: `metattt check module=my_package.layers:make`.

A module is called as `y = module(x)`, `y, state = module(x, state)`, and with `mask=` `[B, T]` (True for real
tokens) or `reset=` `[B, T]` (True at the first token of a packed document) where its `forward` has these parameters. A
layer that is called otherwise is checked through a module of a few lines that calls it so. A module whose states carry
no gradients says so by an attribute `detaches = True`.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from re import findall
from traceback import extract_tb
from typing import Any

import torch
from torch import Tensor, nn

from metattt.testing.specimen import (
    Found,
    NotApplicable,
    cotangent,
    difference_error,
    distance,
    gradient_distance,
    judged,
    told,
)

EXACT, SINGLE, DIFFERENCES = 1e-9, 1e-4, 1e-5
"""Bounds of relative errors: in float64; of float32 against it, or inside; of derivatives by differences."""


class Subject:
    """A module under test, in float64. What it trains that is zero at first, as an output projection often is, is moved
    away from it: all that is multiplied by it would go unseen.

    Args:
        make: makes it; a class or a function without arguments.
        dim: width D of its tokens, `[B, T, D]`.
        period: tokens after which something happens in it (a chunk, a mini-batch); sequences are cut around it.
    """

    def __init__(self, make: Callable[[], nn.Module], dim: int, period: int = 4):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.module = make().double().eval()
            for parameter in self.module.parameters():
                if parameter.requires_grad and not nn.parameter.is_lazy(parameter) and not parameter.any():
                    nn.init.normal_(parameter, std=0.1)
        self.first: Tensor | None = None  # what the very first call gave for `tokens()`
        self.rounds = False  # whether something inside is computed in float32, as norms often are
        self.dim, self.period = dim, period
        self.length = 2 * period + 11
        known = inspect.signature(self.module.forward).parameters
        self.has_state, self.has_mask, self.has_reset = ("state" in known, "mask" in known, "reset" in known)

    def tokens(self, length: int | None = None, seed: int = 1) -> Tensor:
        """Random tokens `[2, length, D]`."""
        return torch.randn(
            2, length or self.length, self.dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )

    def __call__(
        self, x: Tensor, state: Any = None, mask: Tensor | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Outputs and the state, None if the module has none."""
        given = {"state": state, "mask": mask, "reset": reset}
        found = self.module(x, **{name: value for name, value in given.items() if value is not None})
        return (found[0], found[-1]) if isinstance(found, tuple) else (found, None)

    def pieces(self, x: Tensor, cuts: Sequence[int], **marks: Tensor) -> Tensor:
        """Outputs of several calls, with the state handed on; `marks`: the whole `mask` or `reset`."""
        state, outputs = None, []
        for start, stop in zip([0, *cuts], [*cuts, x.shape[1]], strict=True):
            y, state = self(x[:, start:stop], state, **{name: mark[:, start:stop] for name, mark in marks.items()})
            outputs.append(y)
        return torch.cat(outputs, dim=1)

    def gradients(self, x: Tensor, outputs: Callable[[Tensor], Tensor]) -> dict[int, Tensor]:
        """Gradients of a weighted sum of outputs by the tokens and all parameters, in order."""
        x = x.clone().requires_grad_()
        leaves = [x, *(one for one in self.module.parameters() if one.requires_grad)]
        y = outputs(x)
        found = torch.autograd.grad((y * cotangent(y)).sum(), leaves, allow_unused=True, materialize_grads=True)
        return dict(enumerate(found))


def repeats(subject: Subject) -> float:
    """The same call gives the same, and so does it in training mode, unless it draws random numbers there (dropout)."""
    x = subject.tokens()
    first = subject(x)[0] if subject.first is None else subject.first
    again, _ = subject(x)
    subject.module.train()
    with torch.random.fork_rng(devices=[]):
        training, same, other = (subject(x)[0] for seed in (0, 0, 1) if torch.manual_seed(seed))
    random = distance(other, same) > 0
    return max(distance(again, first), distance(same, training), 0.0 if random else distance(training, first))


def alone(subject: Subject) -> float:
    """A sequence has the outputs that it has without the others of its batch."""
    x = subject.tokens()
    both, _ = subject(x)
    return max(distance(subject(x[row : row + 1])[0], both[row : row + 1]) for row in range(2))


def causality(subject: Subject) -> float:
    """Outputs do not change with later tokens."""
    worst = 0.0
    for length in (subject.length, 4 * subject.period):  # whole chunks may be computed in another way
        x = subject.tokens(length)
        y = subject(x)[0]
        for t in range(length - 1):
            changed = torch.cat([x[:, : t + 1], 1 - x[:, t + 1 :]], dim=1)
            worst = max(worst, distance(subject(changed)[0][:, : t + 1], y[:, : t + 1]))
    return worst


def splits(subject: Subject) -> dict[str, float]:
    """A sequence in several calls has the outputs and the gradients of one call."""
    _needs(subject.has_state, "state")
    x, size = subject.tokens(), subject.period
    (whole, state), worst = subject(x), dict[str, float]()
    detaches = getattr(subject.module, "detaches", False)
    expected = {} if detaches else subject.gradients(x, lambda x: subject(x)[0])
    end = subject.length
    ways = {"tokens one by one": [*range(1, end)], "tokens one by one after several": [*range(size + 1, end)]}
    ways |= {"two calls": [size], "several calls": sorted({1, 3, size + 2, end - 2})}  # no empty piece
    for way, cuts in ways.items():
        with torch.no_grad():
            worst[way] = distance(subject.pieces(x, cuts), whole)
        if not detaches:
            found = subject.gradients(x, lambda x, cuts=cuts: subject.pieces(x, cuts))  # type: ignore[misc]
            worst[f"gradients, {way}"] = gradient_distance(found, expected)
    return {"no state came back": max(worst.values())} if state is None else worst


@torch.no_grad()
def padding(subject: Subject) -> dict[str, float]:
    """Padding before, between and after the tokens changes no output and no gradient of theirs, and no later output."""
    _needs(subject.has_mask, "mask")
    x, end, worst = subject.tokens(), subject.length, dict[str, float]()
    expected, state = subject(x)
    later = subject.tokens(5, seed=2)
    following = subject(later, state)[0] if subject.has_state else x
    with torch.enable_grad():
        gradients = subject.gradients(x, lambda x: subject(x)[0].flatten(0, 1))

    def same(kind: str, found: Tensor, expected: Tensor) -> None:
        worst[kind] = max(worst.get(kind, 0.0), distance(found, expected))

    for kind, real in (("after", slice(None, -3)), ("before", slice(3, None))):  # rows of unequal lengths
        mask = torch.ones(x.shape[:2], dtype=torch.bool)
        mask[1] = False
        mask[1, real] = True
        (y, kept), (short, after) = subject(x.clone(), mask=mask), subject(x[1:, real])
        same("in another row", y[0], expected[0])
        same(kind, y[1, real], short[0])
        if subject.has_state:
            same(f"{kind} (later outputs)", subject(later, kept)[0][1:], subject(later[1:], after)[0])
    places = (0, 1, subject.period, subject.period + 1, end)
    for place, count in itertools.product(places, (1, 2, subject.period + 1)):  # odd and even lengths
        padded, mask = _pad(x, place, count)
        y, kept = subject(padded, mask=mask)
        if count == 2:
            with torch.enable_grad():
                found = subject.gradients(x, lambda x: subject(_pad(x, place, 2)[0], mask=mask)[0][mask])  # noqa: B023
            worst["gradients"] = max(worst.get("gradients", 0.0), gradient_distance(found, gradients))
        for row, start in enumerate((place, end - place)):  # as in `_pad`
            kind = {0: "before", end: "after"}.get(start, "between")
            same(kind, y[row, mask[row]], expected[row])
            if subject.has_state:
                same(f"{kind} (later outputs)", subject(later, kept)[0][row], following[row])
        if subject.has_state:
            same("two calls", subject.pieces(padded, [3], mask=mask)[mask], expected.flatten(0, 1))
    return worst


def resets(subject: Subject) -> float:
    """Packed documents have the outputs and gradients that they have alone."""
    _needs(subject.has_reset, "reset")
    end, size, worst = subject.length, subject.period, 0.0
    for length, starts in ((end, [size]), (end - 1, sorted({1, 2, size + 1})), (end, [3, 7, end - 1])):
        x = subject.tokens(length)
        rows = [[0, *starts], [0, *sorted(length - start for start in starts)]]  # as in `_pad`: not alike
        reset = torch.zeros(x.shape[:2], dtype=torch.bool)
        for row, places in enumerate(rows):
            reset[row, places] = True

        def apart(x: Tensor, rows: list[list[int]] = rows) -> Tensor:
            pairs = [itertools.pairwise([*places, x.shape[1]]) for places in rows]
            return torch.stack(
                [torch.cat([subject(x[r : r + 1, a:b])[0][0] for a, b in ends]) for r, ends in enumerate(pairs)]
            )

        expected = apart(x)
        worst = max(worst, distance(subject(x, reset=reset)[0], expected))
        found = subject.gradients(x, lambda x, reset=reset: subject(x, reset=reset)[0])  # type: ignore[misc]
        worst = max(worst, gradient_distance(found, subject.gradients(x, apart)))
        if subject.has_state:
            worst = max(worst, distance(subject.pieces(x, [2, length - 2], reset=reset), expected))
        if subject.has_mask:
            padded, mask = _pad(x, size, 2)
            marked = torch.zeros_like(mask).masked_scatter(mask, reset)
            worst = max(worst, distance(subject(padded, mask=mask, reset=marked)[0][mask], expected.flatten(0, 1)))
    return worst


def states(subject: Subject) -> float:
    """A later call does not change a state that it was given: it can be used again."""
    _needs(subject.has_state, "state")
    with torch.no_grad():
        _, state = subject(subject.tokens())
        kept = copy.deepcopy(state)
        later = subject.tokens(subject.period + 2, seed=2)
        expected = subject(later, kept)[0]
        subject(later, state)
        return distance(subject(later, state)[0], expected)


@torch.no_grad()
def borrowed(subject: Subject) -> float:
    """A call does not write to the tokens, mask and reset that it is given: they are the caller's."""
    x = subject.tokens()
    marks = {name: x[..., 0] > 0 for name in ("mask", "reset") if getattr(subject, f"has_{name}")}
    kept = copy.deepcopy([x, *marks.values()])
    subject(x, **marks)
    return max(distance(now.double(), then.double()) for now, then in zip([x, *marks.values()], kept, strict=True))


def derivatives(subject: Subject) -> float:
    """Gradients equal central differences, along one direction for the tokens and one for every parameter."""
    x, rounding = subject.tokens(), "differences are rounding where something inside is computed in float32"
    if subject.rounds:
        raise NotApplicable(rounding)
    gradients = list(subject.gradients(x, lambda x: subject(x)[0]).values())
    leaves = [x, *(one for one in subject.module.parameters() if one.requires_grad)]
    error = difference_error(lambda: subject(x)[0], leaves, gradients)
    if error > DIFFERENCES:  # by what is read in float32, as parameters of Transformers' Mamba, or by another
        exact = [one for one in zip(leaves, gradients, strict=True) if not _rounds(subject, one[:1])]
        error = difference_error(lambda: subject(x)[0], *zip(*exact, strict=True)) if exact else 0.0
        if error <= DIFFERENCES:
            raise NotApplicable(rounding)
    return error


def single(subject: Subject) -> float:
    """float32 gives the outputs of float64, in float32; and nothing inside is rounded to less, as to bfloat16."""
    x, step = subject.tokens(), 1e-5 * subject.tokens(seed=2)
    before, expected, after = (subject(x + sign * step)[0].double() for sign in (-1, 0, 1))
    subject.module.float()
    y, _ = subject(x.float())
    if y.dtype != torch.float32:
        raise TypeError(f"outputs are {y.dtype} for tokens of torch.float32")
    return max(distance(y.double(), expected), distance(before + after, 2 * expected))


LAWS: dict[str, tuple[Callable[[Subject], float | dict[str, float]], float]] = {
    "the same call gives the same": (repeats, EXACT),
    "alone = in a batch": (alone, EXACT),
    "no later token is seen": (causality, EXACT),
    "splits agree": (splits, EXACT),
    "padding changes nothing": (padding, EXACT),
    "packed = separate": (resets, EXACT),
    "later calls do not change a state": (states, EXACT),
    "what a call is given stays as it is": (borrowed, 0.0),
    "gradients = finite differences": (derivatives, DIFFERENCES),
    "float32 = float64": (single, SINGLE),
}
"""Title → law and the bound of its error, or of its errors by kind."""


def examine(subject: Subject) -> Iterator[tuple[str, Found]]:
    """Title and result of every law; where the module cannot read tokens at all, that alone."""
    x, note = subject.tokens(), ""
    try:
        subject.first = subject(x)[0].detach()
        if subject.first.shape[:2] != x.shape[:2]:  # laws that compare what is there would pass
            note = f"outputs are {list(subject.first.shape)}, expected one for each token, [B, T, ...]"
        subject.rounds = _rounds(subject)
    except Exception as failure:  # whatever a foreign module raises
        *_, place = (one for one in extract_tb(failure.__traceback__) if f"{os.sep}torch{os.sep}" not in one.filename)
        note = f"{told(failure)} ({place.filename}, line {place.lineno}), for tokens {list(x.shape)} of float64"
        if isinstance(failure, AssertionError) or {str(x.shape[2]), str(x.numel())} & {*findall(r"\d+", str(failure))}:
            note += ": if they have another width, set dim="
    if note:
        yield "it reads tokens", Found(None, EXACT, note, True)
        return
    for title, (law, bound) in LAWS.items():
        subject.module.double().eval()  # not a copy: a module may keep what cannot be copied, such as a loss
        bound = SINGLE if bound == EXACT and subject.rounds else bound
        yield title, judged(partial(_judge, law, subject, bound), bound)


@torch.no_grad()
def _rounds(subject: Subject, leaves: Sequence[Tensor] = ()) -> bool:
    """Whether outputs do not go straight along a step of the tokens, or of `leaves`, that is straight in float64."""
    x = subject.tokens()
    moved, outputs = leaves or [x], []
    kept = [one.clone() for one in moved]
    for count in range(3):
        generator = torch.Generator().manual_seed(5)
        for one, start in zip(moved, kept, strict=True):
            one.copy_(start + 1e-7 * count * torch.randn(one.shape, generator=generator, dtype=one.dtype))
        outputs.append(subject(x)[0].double())
    for one, start in zip(moved, kept, strict=True):
        one.copy_(start)
    bent = distance(outputs[0] + outputs[2], 2 * outputs[1])
    # rounding of a leaf may be small beside the outputs, but not beside what the step does to them
    return bent > (max(1e-13, 1e-3 * distance(outputs[2], outputs[0])) if leaves else EXACT)


def _judge(law: Callable[[Subject], float | dict[str, float]], subject: Subject, bound: float) -> Found:
    found = law(subject)
    kinds = found if isinstance(found, dict) else {"": found}
    broken, error = [kind for kind, error in kinds.items() if not error <= bound], max(kinds.values())
    note = f"{'; '.join(broken)}; " if any(broken) else ""
    return Found(error, bound, f"{note}expected: {law.__doc__}" if broken else "", bool(broken))


def _needs(offered: bool, name: str) -> None:
    if not offered:
        raise NotApplicable(f"forward has no parameter `{name}`")


def _pad(x: Tensor, place: int, count: int) -> tuple[Tensor, Tensor]:
    """`x` with `count` tokens of padding, from `place` on in one row and as far from the end in the other, so that the
    rows differ; and the mask."""
    mask = torch.ones(2, x.shape[1] + count, dtype=torch.bool)
    for row, start in enumerate((place, x.shape[1] - place)):
        mask[row, start : start + count] = False
    values = torch.randn(*mask.shape, x.shape[2], generator=torch.Generator().manual_seed(4), dtype=x.dtype)
    return (3 * values).masked_scatter(mask.unsqueeze(-1), x), mask  # not all equal: a norm would hide them
