"""Calls of the Triton operations: sizes, types, memory and launches, and what each is compared with in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from mini_batches import poisoned_memory
from torch import Tensor

from metattt.kernels.naive import naive
from metattt.kernels.triton.on_gpu import OnGPU
from metattt.kernels.ttt_linear import op as linear
from metattt.kernels.ttt_linear import tuning as linear_tuning
from metattt.kernels.ttt_mlp import backward as mlp_backward
from metattt.kernels.ttt_mlp import op as mlp
from metattt.kernels.ttt_mlp import tuning as mlp_tuning

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter knows no bf16
Given = dict[str, Tensor | None]


class Operation(NamedTuple):
    """The functions and the kernel of an operation, its state, the names of its weights, and the largest relative errors."""

    run: Callable[..., Any]
    decode: Callable[..., Any]
    kernel: OnGPU
    state: type[Any]
    weights: tuple[str, ...]
    tolerance: dict[torch.dtype, float]

    def naive(self, output_final_state: bool = False, **given: Any) -> tuple[Tensor, Any]:
        """Its equations; TTT-Linear's state has zeros for a bias that is not there."""
        o, state = naive(**given)
        if self.state is linear.LinearState:
            state = [state[at - 1].new_zeros(state[at - 1].shape[:-1]) if x is None else x for at, x in enumerate(state)]
        return o, self.state(*state)


OPERATIONS = {
    "ttt_linear": Operation(
        linear.ttt_linear, linear.ttt_linear_decode, linear.KERNEL, linear.LinearState, ("w", "b"),
        {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2},
    ),
    "ttt_mlp": Operation(
        mlp.ttt_mlp, mlp.ttt_mlp_decode, mlp.KERNEL, mlp.FinalState, ("w1", "b1", "w2", "b2"),
        {torch.float32: 1e-4 if DEVICE == "cuda" else 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2},
    ),
}  # fmt: skip
TOKENS = ("q", "k", "v", "eta")


class Case(NamedTuple):
    """A call, and how it is launched."""

    op: str = "ttt_linear"
    length: int = 37
    b: int = 16
    d: int = 32
    batch: int = 1
    heads: int = 1
    bias: bool = True
    tau: str = "heads"  # token steps none, shared or of each head
    carried: bool = False  # every sequence has weights of its own at the start
    documents: tuple[int, ...] | None = None  # lengths, packed in one row
    dtype: torch.dtype = torch.float32
    uses: str = "all"  # what the loss depends on: all, outputs, state, or the sum of outputs, whose cotangent is expanded
    layout: str = "dense"  # of q, k, v: dense; [B, H, T, d]; views of one projection; heads further than 2³¹ values apart
    segment: int = 2  # mini-batches between stored weights
    together: int = 264  # segments of TTT-MLP at the same time
    tile: int | None = None  # hidden units of TTT-MLP

    def __str__(self) -> str:
        fields = list(self._asdict().items())[1:]
        changed = [(key, str(value)) for key, value in fields if value != self._field_defaults[key]]
        said = [f"{key}={value.removeprefix('torch.').replace(' ', '')}" for key, value in changed]
        return "-".join([self.op, *said])


SHARED: list[dict[str, Any]] = [
    # Lengths: one token, less than a mini-batch, whole ones, ragged.
    *({"length": 1, "b": b, "batch": 3, "heads": 3} for b in (8, 16)),  # (of one head, a cotangent of η or τ is one number)
    *({"length": length, "b": 8, "heads": 2} for length in (5, 8, 27)),
    {"length": 48, "b": 16, "heads": 2},
    {"length": 45, "b": 32},
    *({"length": length, "b": 64} for length in (64, 70)),
    # What is given and what is not.
    *({"length": 20, "bias": bias, "tau": tau, "heads": 2} for bias in (True, False) for tau in ("none", "shared", "heads")),
    *({"length": 20, "bias": bias, "batch": 2, "heads": 2, "carried": True, "tau": "shared"} for bias in (True, False)),
    {"length": 12, "b": 8, "batch": 2, "carried": True},
    {"length": 35, "b": 8, "bias": False, "uses": "outputs"},
    {"length": 16, "batch": 2, "uses": "state", "tau": "shared"},
    {"length": 37, "batch": 2, "uses": "sum", "carried": True},
    # Packed documents, one of them empty, and one ending with a mini-batch.
    *({"b": 8, "documents": documents} for documents in ((8,), (5, 10, 1), (7, 8, 9))),
    {"b": 16, "documents": (33, 16), "uses": "outputs"},
    {"b": 16, "documents": (18, 5), "carried": True},
    {"b": 8, "documents": (0, 17, 3), "carried": True, "heads": 2},
    {"b": 16, "documents": (17, 0, 32, 5), "bias": False, "tau": "none"},
    {"b": 32, "documents": (33, 32)},
    # Segments only bound rounding.
    *({"length": 41, "b": 8, "segment": segment, "tau": "none"} for segment in (1, 64)),
    {"b": 8, "documents": (25, 8, 17), "segment": 3, "carried": True},
    # Memory.
    {"length": 17, "batch": 2, "heads": 2, "layout": "heads first"},
    {"length": 17, "batch": 2, "heads": 2, "layout": "fused", "tau": "shared"},
    {"length": 9, "b": 8, "heads": 3, "layout": "far", "dtype": HALF, "uses": "outputs"},
    # Widths.
    *({"length": 20, "b": b, "d": 64, "bias": b > 8} for b in (8, 16)),
    {"length": 35, "b": 32, "d": 64, "tau": "none"},
    {"length": 20, "d": 96, "bias": False, "carried": True},
    {"length": 20, "d": 128},
    # Two bytes.
    *({"length": length, "b": b, "dtype": HALF} for length, b in ((5, 8), (70, 64))),
    {"length": 37, "batch": 2, "heads": 2, "dtype": HALF, "carried": True, "bias": False},
    {"length": 33, "d": 96, "dtype": HALF},
    {"length": 16, "d": 128, "dtype": HALF},
    {"b": 16, "documents": (5, 34, 16), "dtype": HALF, "segment": 1},
]  # fmt: skip
CASES = [
    *(Case(op, **case) for op in OPERATIONS for case in SHARED),
    # TTT-MLP: several groups of segments, and several tiles of hidden units.
    *(Case("ttt_mlp", 41, 8, segment=1, together=together) for together in (1, 2)),
    Case("ttt_mlp", b=8, documents=(25, 8, 17), segment=2, together=3, carried=True, tile=64),
    Case("ttt_mlp", 40, 8, bias=False, segment=2, together=1, tile=64),
    Case("ttt_mlp", 20, batch=2, carried=True, tile=64),
    Case("ttt_mlp", 70, 64, uses="outputs", tile=64),
    Case("ttt_mlp", 36, 16, 64, dtype=HALF, tile=64),
    Case("ttt_mlp", 18, 16, 48),
]  # fmt: skip
if DEVICE == "cuda":
    CASES += [case._replace(dtype=torch.float16) for case in CASES if case.dtype == HALF]


def draw(case: Case) -> tuple[Given, tuple[Tensor | None, ...] | None]:
    """Arguments of the operation and an initial state, float64 with values of the types that the kernels are given. Inner steps
    change the weights by as much as they are."""
    torch.manual_seed(len(str(case)))
    heads, d, b = case.heads, case.d, case.b
    length, batch = (sum(case.documents), 1) if case.documents else (case.length, case.batch)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device=DEVICE) * std).double()

    def weights(*lead: int) -> dict[str, Tensor | None]:
        hidden = 4 * d if case.op == "ttt_mlp" else d
        shapes = ((d, hidden), (hidden,), (hidden, d), (d,))
        made: dict[str, Tensor | None] = {}
        for name, shape in zip(OPERATIONS[case.op].weights, shapes, strict=False):
            deviation = shape[0] ** -0.5 if name.startswith("w") else 0.1
            made[name] = normal(*lead, heads, *shape, std=deviation) if case.bias or name.startswith("w") else None
        return made

    given: Given = {name: normal(batch, length, heads, d).to(case.dtype).double() for name in "qkv"}
    given["eta"] = torch.rand(batch, length, heads, device=DEVICE).double() * 2 / b
    given |= weights() | {"norm_scale": 1 + normal(heads, d, std=0.2), "norm_bias": normal(heads, d, std=0.2)}
    steps = 0.3 + torch.rand(heads if case.tau == "heads" else 1, b, device=DEVICE)
    given["tau"] = None if case.tau == "none" else steps.double()
    given = {name: None if x is None else x.float().double() for name, x in given.items()}
    if not case.carried:
        return given, None
    sequences = len(case.documents) if case.documents else batch
    return given, tuple(None if w is None else w.float().double() for w in weights(sequences).values())


def laid_out(given: Given, case: Case) -> Given:
    """In the types and the memory of the case."""
    made = {name: None if x is None else x.float() for name, x in given.items()}
    views = [given[name].to(case.dtype) for name in "qkv"]
    if case.layout == "heads first":
        views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in views]
    elif case.layout == "fused":
        views, made["eta"] = list(torch.stack(views, 2).unbind(2)), made["eta"].mT.contiguous().mT
    elif case.layout == "far":  # zeros that are never touched are only reserved; `launches` fills what is empty
        far, last = 2**30, views[0][0, :, 0].numel()
        memory = [torch.zeros((case.heads - 1) * far + last, dtype=case.dtype, device=DEVICE) for _ in views]
        views = [x.as_strided(y.shape, (0, case.d, far, 1)).copy_(y) for x, y in zip(memory, views, strict=True)]
    return made | dict(zip("qkv", views, strict=True))


@contextmanager
def launches(case: Case) -> Iterator[None]:
    """Cut up as the case says, with memory that is full of NaN before it is written."""
    # In the interpreter every tile costs time: as few as there can be, unless the case is about them.
    tile = case.tile or (None if DEVICE == "cuda" else min(256, 4 * case.d & -(4 * case.d)))
    keys = [mlp_tuning.key(one, case.d, case.b) for one in ("forward", "backward", "decode")]
    table = dict.fromkeys(keys, mlp_tuning.Config(tile, 4, 1)) if tile else {}
    with (
        mock.patch.object(linear_tuning, "SEGMENT", case.segment),
        mock.patch.dict(mlp_tuning.TABLE, table),
        mock.patch.object(mlp_tuning, "SEGMENT", case.segment),
        mock.patch.object(mlp_backward, "PROGRAMS", case.together),
        poisoned_memory(),
    ):
        yield


def with_gradients(function: Callable[..., Any], given: Given, state: tuple[Tensor | None, ...] | None, case: Case) -> dict[str, Tensor]:
    """Outputs, final state and gradients of a loss of them, by name."""
    leaves = {name: x.detach().requires_grad_() for name, x in given.items() if x is not None}
    if state is not None:
        state = tuple(None if w is None else w.detach().requires_grad_() for w in state)
        leaves |= {f"state{at}": w for at, w in enumerate(state) if w is not None}
    bounds = None if case.documents is None else torch.tensor([0, *case.documents], device=DEVICE).cumsum(0)
    arguments = {name: leaves.get(name) for name in given} | {"initial_state": state, "cu_seqlens": bounds}
    o, final = function(**arguments, mini_batch_size=case.b, output_final_state=True)
    results = {"o": o} | {name: x for name, x in final._asdict().items() if x is not None}
    torch.manual_seed(1)
    loss = o.sum() if case.uses == "sum" else torch.zeros((), device=DEVICE)
    for name, x in results.items():
        cotangent = torch.randn(x.shape, device=DEVICE).double()
        if case.uses in ("all", "outputs" if name == "o" else "state"):
            loss = loss + (x.double() * cotangent).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return results | {f"d{name}": torch.zeros_like(x) if g is None else g for (name, x), g in zip(leaves.items(), gradients, strict=True)}
