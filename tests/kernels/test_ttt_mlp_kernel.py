"""TTT-MLP kernels against the equations in float64.

Without a GPU the kernels run in Triton's interpreter. That has to be chosen before triton is imported, and whoever
collects the tests may have imported it, so the cases run in a process of their own.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from metattt.errors import MetaTTTError

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-4 if DEVICE == "cuda" else 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter knows no bf16
NAMES = ("q", "k", "v", "eta", "w1", "b1", "w2", "b2", "norm_scale", "norm_bias", "tau")

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Calls a function of this module where kernels can run."""
    if DEVICE == "cuda":
        yield lambda function, *args: function(*args)
        return
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"), ProcessPoolExecutor(1, get_context("spawn")) as process:
        yield lambda function, *args: process.submit(function, *args).result()


class Case(NamedTuple):
    length: int = 37
    b: int = 16
    d: int = 32
    batch: int = 1
    heads: int = 1
    bias: bool = True
    tau: str = "heads"  # none, shared, heads
    carried: bool = False
    documents: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32
    final: bool = True  # cotangents for the final state, not only for the outputs
    tile: int | None = None
    segment: int = 16
    together: int = 264
    heads_first: bool = False  # q, k, v as transposed [B, H, T, d]
    head_stride: int | None = None  # values between two heads of q, k, v
    split: bool = False  # the kernels that run side by side

    def __str__(self) -> str:
        changed = {name: value for name, value in self._asdict().items() if value != self._field_defaults[name]}
        return (
            "-".join(f"{name}={str(value).removeprefix('torch.').replace(' ', '')}" for name, value in changed.items())
            or "plain"
        )


CASES = [
    # Lengths: one token, less than a mini-batch, whole ones, ragged.
    *(Case(length, 8) for length in (1, 5, 8, 27)),
    *(Case(length, 16) for length in (1, 9, 16, 40, 48)),
    *(Case(length, 32) for length in (1, 20, 32, 45)),
    *(Case(length, 64) for length in (3, 64, 70)),
    Case(17, 16, batch=2, heads=2),
    Case(17, 16, heads=2, tau="shared"),
    Case(17, 16, batch=2, heads=2, heads_first=True),
    Case(17, 16, heads=3, final=False, heads_first=True),
    # What is given and what is not.
    *(
        Case(20, bias=bias, tau=tau, carried=carried)
        for bias in (True, False)
        for tau in ("none", "shared", "heads")
        for carried in (True, False)
    ),
    Case(35, 8, bias=False, final=False),
    Case(32, 32, tau="none", final=False),
    Case(12, 8, batch=2, carried=True),
    # Packed documents.
    *(Case(b=8, documents=documents) for documents in ((8,), (5, 10, 1), (7, 8, 9))),
    *(Case(b=16, documents=documents) for documents in ((16,), (5, 20, 1), (33, 16))),
    Case(b=16, documents=(18, 5), carried=True),
    Case(b=8, documents=(0, 17, 3), carried=True, heads=2),
    Case(b=16, documents=(35, 14), bias=False, tau="none"),
    Case(b=32, documents=(33, 32), final=False),
    # Segments of the backward pass, and several groups of them.
    Case(28, 8, segment=1, together=1),
    Case(41, 8, segment=1, together=2),
    Case(40, 8, segment=3, together=1),
    Case(b=8, documents=(25, 8, 17), segment=2, together=3, carried=True),
    # More than 2³¹ values between the first and the last head.
    Case(9, 8, heads=3, head_stride=2**30, dtype=HALF, final=False),
    # Side by side, as far as there is such a way.
    Case(41, 8, segment=2, split=True),
    Case(35, 8, segment=3, batch=2, split=True, carried=True),
    Case(24, 8, segment=1, heads=2, split=True, tau="shared", heads_first=True),
    Case(48, 16, segment=2, split=True, bias=False, tau="none", final=False),
    Case(b=8, documents=(25, 0, 7, 8), segment=2, split=True, carried=True),
    Case(b=8, documents=(33, 16), segment=1, together=1, tile=64, split=True, tau="shared"),
    Case(40, 8, segment=2, together=2, tile=64, split=True),
    Case(36, 16, 64, segment=1, split=True),
    Case(41, 8, segment=2, split=True, dtype=HALF),
    Case(b=16, documents=(5, 34, 16), segment=1, split=True, carried=True, dtype=HALF),
    Case(33, 32, heads=2, split=True, tau="none", dtype=HALF),
    # Weights in device memory instead of registers.
    Case(40, 16, tile=64),
    Case(40, 8, tile=64, bias=False, segment=2, together=1),
    Case(20, 16, tile=64, carried=True, batch=2),
    Case(b=16, documents=(5, 34), tile=64, segment=1),
    Case(70, 64, tile=64, final=False),
    # Widths.
    Case(36, 16, 64),
    Case(20, 8, 64, bias=False),
    Case(33, 32, 64, tau="none"),
    Case(66, 64, 64, final=False),
    Case(20, 16, 96),
    Case(20, 16, 96, bias=False, carried=True),
    Case(b=8, d=96, documents=(11, 8)),
    Case(20, 16, 128),
    Case(18, 16, 48),
    # Two bytes.
    *(Case(length, b, dtype=HALF) for length, b in ((5, 8), (40, 16), (64, 32), (70, 64))),
    Case(37, 16, dtype=HALF, carried=True, bias=False),
    Case(36, 16, 64, dtype=HALF, tile=64),
    Case(20, 16, 64, dtype=HALF),
    Case(33, 16, 96, dtype=HALF),
    Case(16, 16, 128, dtype=HALF, final=False),
    Case(b=16, documents=(5, 34, 16), dtype=HALF, segment=1),
]


def draw(case: Case) -> tuple[dict[str, Tensor | None], tuple[Tensor | None, ...] | None]:
    """Arguments of the operation and an initial state, float64, with q, k and v rounded to the type of the case."""
    torch.manual_seed(len(str(case)))
    heads, d, b, f = case.heads, case.d, case.b, 4 * case.d
    length = sum(case.documents) if case.documents else case.length
    batch = 1 if case.documents else case.batch

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, device=DEVICE) * std

    def weights(*lead: int) -> list[Tensor | None]:
        b1, b2 = (normal(*lead, heads, width, std=0.1) if case.bias else None for width in (f, d))
        return [normal(*lead, heads, d, f, std=d**-0.5), b1, normal(*lead, heads, f, d, std=f**-0.5), b2]

    tokens = [normal(batch, length, heads, d).to(case.dtype).double() for _ in range(3)]
    eta = torch.rand(batch, length, heads, dtype=torch.float64, device=DEVICE) * 2 / b
    tau = (
        None
        if case.tau == "none"
        else 0.3 + torch.rand(heads if case.tau == "heads" else 1, b, dtype=torch.float64, device=DEVICE)
    )
    given = dict(
        zip(
            NAMES,
            [*tokens, eta, *weights(), 1 + normal(heads, d, std=0.2), normal(heads, d, std=0.2), tau],
            strict=True,
        )
    )
    # fp32 is what the kernels are given.
    given = {name: None if x is None else x.float().double() for name, x in given.items()}
    state = None
    if case.carried:
        state = tuple(
            None if w is None else w.float().double() for w in weights(len(case.documents) if case.documents else batch)
        )
    return given, state


def cast(name: str, x: Tensor | None, case: Case) -> Tensor | None:
    if x is None:
        return None
    if name not in ("q", "k", "v"):
        return x.float()
    x = x.to(case.dtype)
    if case.head_stride:  # memory that is never touched is only reserved
        far = torch.empty((case.heads - 1) * case.head_stride + x[0, :, 0].numel(), dtype=x.dtype, device=x.device)
        return far.as_strided(x.shape, (0, case.d, case.head_stride, 1)).copy_(x)
    return x.transpose(1, 2).contiguous().transpose(1, 2) if case.heads_first else x


@contextmanager
def settings(case: Case) -> Iterator[None]:
    """Launches cut up as the case says, and memory that is full of NaN before it is written."""
    from metattt.kernels.ttt_mlp import backward, tuning

    def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def wrapped(*args: Any, **kwargs: Any) -> Tensor:
            x = make(*args, **kwargs)
            return x.fill_(torch.nan) if x.is_floating_point() else x

        return wrapped

    # In the interpreter every tile costs time: as few as there can be, unless the case is about them.
    tile = case.tile or (None if DEVICE == "cuda" else min(256, 4 * case.d & -(4 * case.d)))
    kernels = ("forward", "backward", "decode")
    forced = {
        tuning.key(kernel, case.d, case.b, case.dtype.itemsize, 0): tuning.Config(tile, 4, 1, case.split)
        for kernel in kernels
        if tile
    }
    with (
        mock.patch.dict(tuning.TABLE, forced),
        mock.patch.object(tuning, "SEGMENT", case.segment),
        mock.patch.object(backward, "PROGRAMS", case.together),
        mock.patch.object(torch, "empty", poisoned(torch.empty)),
        mock.patch.object(torch, "empty_like", poisoned(torch.empty_like)),
    ):
        yield


def with_gradients(
    function: Callable[..., Any], given: dict[str, Tensor | None], state: tuple[Tensor | None, ...] | None, case: Case
) -> dict[str, Tensor]:
    """Outputs, final state and gradients of a sum of both with random weights, by name."""
    leaves = {name: x.detach().requires_grad_() for name, x in given.items() if x is not None}
    if state is not None:
        state = tuple(None if w is None else w.detach().requires_grad_() for w in state)
        leaves |= {f"state{at}": w for at, w in enumerate(state) if w is not None}
    bounds = None
    if case.documents:
        bounds = torch.tensor([0, *case.documents], device=DEVICE).cumsum(0)
    arguments = {name: leaves.get(name) for name in NAMES}
    o, final = function(
        **arguments, mini_batch_size=case.b, initial_state=state, output_final_state=True, cu_seqlens=bounds
    )
    results = {"o": o} | {name: x for name, x in final._asdict().items() if x is not None}
    torch.manual_seed(1)
    loss = torch.zeros((), dtype=torch.float64, device=DEVICE)
    for name, x in results.items():
        cotangent = torch.randn(x.shape, dtype=torch.float64, device=DEVICE)
        if name == "o" or case.final:
            loss = loss + (x.double() * cotangent).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return results | {
        f"d{name}": torch.zeros_like(x) if g is None else g for (name, x), g in zip(leaves.items(), grads, strict=True)
    }


def relative(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    norm = expected.norm().item()
    return (found.double() - expected).norm().item() / (norm or 1.0)


def errors(case: Case) -> dict[str, float]:
    """Relative error of every output, every part of the final state and every gradient."""
    from metattt.kernels.ttt_mlp.naive import naive_ttt_mlp
    from metattt.kernels.ttt_mlp.op import ttt_mlp

    given, state = draw(case)
    expected = with_gradients(naive_ttt_mlp, given, state, case)
    given = {name: cast(name, x, case) for name, x in given.items()}
    with settings(case):
        found = with_gradients(
            ttt_mlp, given, None if state is None else tuple(cast("w", w, case) for w in state), case
        )
    assert found["o"].dtype == case.dtype and found.keys() == expected.keys()
    return {name: relative(found[name], x) for name, x in expected.items()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_and_gradients(case: Case, run: Run) -> None:
    found = run(errors, case)
    wrong = {name: error for name, error in found.items() if not error < TOLERANCE[case.dtype]}
    assert not wrong
    assert len(found) == 13 + 6 * case.bias + (case.tau != "none") + case.carried * (2 + 2 * case.bias)


def decode_errors(b: int, d: int, heads: int, bias: bool, tau: str) -> dict[str, float]:
    """Sequences that were read to different places go on token by token; errors of the outputs and of the state at the
    end."""
    from metattt.kernels.ttt_mlp.naive import naive_ttt_mlp
    from metattt.kernels.ttt_mlp.op import ttt_mlp_decode

    starts, count = (b - 2, 0), 4
    case = Case(length=b + 2, b=b, d=d, batch=2, heads=heads, bias=bias, tau=tau)
    given, _ = draw(case)
    steps = given.pop("tau")

    def read(n: int, first: int, last: int) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        tokens = {name: given[name][n : n + 1, :last] for name in ("q", "k", "v", "eta")}
        o, state = naive_ttt_mlp(**(given | tokens), tau=steps, mini_batch_size=b, output_final_state=True)
        return o[:, first:], state

    prefilled = [read(n, 0, start)[1] for n, start in enumerate(starts)]
    state = [
        None if parts[0] is None else torch.cat(parts).float().contiguous() for parts in zip(*prefilled, strict=True)
    ]
    outputs = []
    norm = [given[name].float() for name in ("norm_scale", "norm_bias")]
    for j in range(count):
        places = [start + j for start in starts]
        token = [
            torch.stack([given[name][n, place] for n, place in enumerate(places)]).float()
            for name in ("q", "k", "v", "eta")
        ]
        phase = torch.tensor([place % b for place in places], device=DEVICE)
        with settings(case):
            outputs.append(ttt_mlp_decode(*token, *state, *norm, tau=steps.float(), phase=phase))
    expected = [read(n, start, start + count) for n, start in enumerate(starts)]
    found = {"o": relative(torch.stack(outputs, 1), torch.cat([o for o, _ in expected]))}
    for at, parts in enumerate(zip(*(final for _, final in expected), strict=True)):
        if parts[0] is not None:
            found[f"state{at}"] = relative(state[at], torch.cat(parts))
    return found


@pytest.mark.parametrize(
    ("b", "d", "heads", "bias", "tau"),
    [(8, 32, 2, True, "heads"), (16, 32, 1, False, "shared"), (8, 64, 1, True, "shared"), (8, 96, 1, True, "heads")],
)
def test_decode(b: int, d: int, heads: int, bias: bool, tau: str, run: Run) -> None:
    found = run(decode_errors, b, d, heads, bias, tau)
    assert len(found) == (9 if bias else 5)
    assert {name: error for name, error in found.items() if not error < 1e-4} == {}


def small(**changes: Any) -> dict[str, Tensor | None]:
    case = Case(**{"length": 35, "heads": 2} | changes)
    return {name: cast(name, x, case) for name, x in draw(case)[0].items()}


def operator_checks() -> dict[str, str]:
    """torch's own checks of the operator: schema, fake implementation, autograd registration, tracing with symbolic
    shapes."""
    from metattt.kernels.base import kernels

    kernels()  # registers the operators
    operators = torch.ops.metattt
    given = {name: x.requires_grad_() for name, x in small(length=20, heads=1).items()}
    views = [given[name].transpose(1, 2) for name in ("k", "v", "q", "eta")]
    rest = (None, None, given["tau"], given["norm_scale"], given["norm_bias"])
    weights = [given[name] for name in ("w1", "b1", "w2", "b2")]
    arguments = (*views, *rest, weights, 16, 1)
    found = torch.library.opcheck(operators.ttt_mlp.default, (*arguments, True, True, None, "cuda"))
    o, *made = (x.detach().to(DEVICE) for x in operators.ttt_mlp(*arguments, True, True, None, "cuda"))
    saved = [None if x is None else x.detach() for x in (*views, *rest)]
    arguments = (o, [None] * 8, made, *saved, [x.detach() for x in weights], 16, 1, None, "cuda")
    tests = ("test_schema", "test_faketensor")
    found |= torch.library.opcheck(operators.ttt_mlp_backward.default, arguments, test_utils=tests)
    state = [torch.zeros_like(made[at]) for at in range(8)]
    token = [given[name].detach()[:, 0].contiguous() for name in ("q", "k", "v", "eta")]
    phase = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    arguments = (*token, state[:4], state[4:], saved[7], saved[8], saved[6], phase, 16)
    checks = torch.library.opcheck(operators.ttt_mlp_decode.default, arguments, test_utils=tests)
    return found | {f"decode {name}": result for name, result in checks.items()}


def test_operators_pass_the_checks_of_torch(run: Run) -> None:
    found = run(operator_checks)
    assert len(found) >= 6 and set(found.values()) == {"SUCCESS"}


def compiled_difference() -> float:
    from metattt.kernels.ttt_mlp.op import ttt_mlp

    given = small()
    leaves = [x.requires_grad_() for x in given.values()]

    def loss(**args: Tensor) -> Tensor:
        o, final = ttt_mlp(**args, output_final_state=True)
        return o.square().sum() + final.w1.square().sum()

    eager = torch.autograd.grad(loss(**given), leaves)
    traced = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(**given), leaves)
    return max(relative(x, y.double()) for x, y in zip(traced, eager, strict=True))


def test_compiles_as_one_graph(run: Run) -> None:
    assert run(compiled_difference) < 1e-6


def without_gradients() -> tuple[bool, bool, str]:
    from metattt.kernels.ttt_mlp.op import ttt_mlp

    given = small()
    with torch.no_grad():
        inference, nothing = ttt_mlp(**given)
    training, _ = ttt_mlp(**given | {"q": given["q"].requires_grad_()})
    first = torch.autograd.grad(training.square().sum(), given["q"], create_graph=True)[0]
    try:
        first.square().sum().backward()
    except MetaTTTError as error:
        return bool((inference == training).all()), nothing is None, str(error)
    return False, False, "no error"


def test_inference_computes_the_same_and_second_derivatives_are_refused(run: Run) -> None:
    same, nothing, message = run(without_gradients)
    assert same and nothing and "ttt_mlp_backward" in message


def message(changes: dict[str, Any], sizes: dict[str, Any], decode: bool) -> str:
    from metattt.kernels.ttt_mlp.op import ttt_mlp, ttt_mlp_decode

    given = small(**sizes)
    changes = {key: value(given) if callable(value) else value for key, value in changes.items()}
    try:
        if decode:
            token = {name: given[name][:, 0] for name in ("q", "k", "v", "eta")}
            weights = {name: given[name].unsqueeze(0) for name in ("w1", "b1", "w2", "b2")}
            updates = {f"update_{name}": torch.zeros_like(w) for name, w in weights.items()}
            ttt_mlp_decode(**given | token | weights | updates | {"phase": torch.zeros(1, dtype=torch.int64)} | changes)
        else:
            ttt_mlp(**given | changes)
    except MetaTTTError as error:
        return str(error)
    return "no error"


class Half(NamedTuple):
    """Half of an argument along its last dimension (a class, to be sent to another process)."""

    name: str

    def __call__(self, given: dict[str, Tensor]) -> Tensor:
        return given[self.name][..., : given[self.name].shape[-1] // 2]


@pytest.mark.parametrize(
    ("changes", "sizes", "expected"),
    [
        ({"mini_batch_size": 12, "tau": None}, {}, "mini-batches of 12 tokens"),
        ({}, {"d": 24}, "head width 24"),
        ({"eta": Half("eta")}, {}, "eta has shape"),
        ({"b1": None}, {}, "b1 and b2"),
        ({"w1": Half("w1")}, {}, "w1 has shape"),
        ({"tau": Half("tau")}, {}, "tau has shape"),
        ({"k": Half("k")}, {}, "k has shape"),
        ({"norm_bias": Half("norm_bias")}, {}, "norm_bias has shape"),
        ({"cu_seqlens": torch.tensor([0, 35])}, {"batch": 2}, "B = 1"),
        ({"initial_state": (None, None)}, {}, "expected (w1, b1, w2, b2)"),
    ],
)
def test_errors_say_what_is_wrong(changes: dict[str, Any], sizes: dict[str, Any], expected: str, run: Run) -> None:
    found = run(message, changes, sizes, False)
    assert expected in found and len(found.splitlines()) == 1


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"phase": torch.zeros(3, dtype=torch.int64)}, "phase has shape"),
        ({"update_w2": Half("w2")}, "update_w2 has shape"),
        ({"w1": Half("q")}, "w1 has shape"),
    ],
)
def test_errors_of_decoding(changes: dict[str, Any], expected: str, run: Run) -> None:
    found = run(message, changes, {}, True)
    assert expected in found and len(found.splitlines()) == 1
