"""`metattt bench gpu`: the Triton kernels on the device at hand, against their oracle, the device's ceilings and other
libraries."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from metattt.bench.base import Benchmark, check_counts
from metattt.bench.peers import Peer, missing, peers
from metattt.bench.report import Check, Panel, Report, Row
from metattt.bench.timing import in_turn, ratios, summary
from metattt.errors import MetaTTTError, check_choice, check_number
from metattt.registry import register

OPERATIONS = ("ttt_linear", "ttt_mlp")
BOUNDS = {torch.bfloat16: (2e-2, 5e-2), torch.float16: (1e-2, 2e-2), torch.float32: (1e-4, 1e-4)}  # outputs, gradients
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Case(NamedTuple):
    """One shape of the correctness suite."""

    length: int
    width: int
    size: int
    dtype: str = "bfloat16"
    packed: bool = False
    batch: int = 2
    heads: int = 3


CASES = (
    Case(203, 64, 16),
    Case(203, 64, 16, packed=True, batch=1),
    Case(203, 64, 16, "float32"),
    Case(203, 64, 16, "float16"),
    Case(96, 64, 8),
    Case(150, 64, 32),
    Case(150, 64, 64),
    Case(100, 32, 16),
    Case(100, 96, 16),
    Case(100, 128, 16),
    Case(9, 64, 16),
    Case(1, 64, 16),
)


@register(group="benchmark", name="gpu")
class GPU(Benchmark):
    """Correctness, then time, of `ttt_linear` and `ttt_mlp` and their decoding steps, in one process and within a limit
    of time.

    Args:
        tokens: B·T of the timed calls.
        lengths: T of the timed calls.
        num_heads, head_dim, mini_batch_size: H, d and b of the timed calls; the defaults are those of the 1b models.
        dtype: of the operands of the timed calls.
        decode_batch: sequences that decode one token at a time.
        rounds: timed calls of each way, in turn.
        limit: seconds after which no further measurement is begun; what was left out is named in the report.
        cases: shapes of the correctness suite to take, of its first so many.
        device: `cuda`; `cpu` under TRITON_INTERPRET=1, to try the benchmark itself.
    """

    def __init__(
        self,
        tokens: int = 32768,
        lengths: Sequence[int] = (1024, 2048, 4096, 8192, 16384, 32768),
        num_heads: int = 32,
        head_dim: int = 64,
        mini_batch_size: int = 16,
        dtype: str = "bfloat16",
        decode_batch: int = 512,
        rounds: int = 10,
        limit: float = 480.0,
        cases: int = len(CASES),
        device: str = "cuda",
    ):
        if device == "cuda" and not torch.cuda.is_available():
            raise MetaTTTError("metattt bench gpu needs a CUDA device, and torch sees none here")
        check_choice("benchmark.device", device, ("cuda", "cpu"))
        check_counts(tokens=tokens, lengths=lengths, num_heads=num_heads, head_dim=head_dim, rounds=rounds)
        check_counts(mini_batch_size=mini_batch_size, decode_batch=decode_batch, cases=cases)
        check_number("benchmark.limit", limit, above=0)
        if any(tokens % length for length in lengths):
            raise MetaTTTError(
                f"benchmark.tokens={tokens} is no multiple of every length of benchmark.lengths={list(lengths)}"
            )
        if dtype not in DTYPES:
            raise MetaTTTError(f"benchmark.dtype={dtype} is not allowed: choose from {', '.join(DTYPES)}")
        self.tokens, self.lengths, self.num_heads, self.head_dim = tokens, list(lengths), num_heads, head_dim
        self.mini_batch_size, self.dtype, self.decode_batch = mini_batch_size, dtype, decode_batch
        self.rounds, self.limit, self.cases, self.device = rounds, limit, cases, device
        self._left_out: list[str] = []

    def run(self, say: Callable[[str], None]) -> Report:
        self._started = time.perf_counter()
        self._say = say
        timed = (self.head_dim, self.mini_batch_size, self.dtype)
        first = [case for case in CASES[: self.cases] if (case.width, case.size, case.dtype) == timed]
        checks, failed = self._correctness(first)
        decode_checks, decode_failed = self._decode_correctness()
        failed |= decode_failed
        ceilings = self._ceilings()
        sequences = self._sequences(ceilings, failed)
        decoding = self._decoding(ceilings, failed)
        others = self._correctness([case for case in CASES[: self.cases] if case not in first])[
            0
        ]  # each compiles kernels of its own
        checks = checks + decode_checks + others
        tuning = self._tuning(failed)
        tables: dict[str, Sequence[Row]] = {
            "Correctness": checks,
            "Ceilings": [ceilings],
            "Sequences": sequences,
            "Decoding": decoding,
        }
        tables["Tuning"] = tuning
        card = torch.cuda.get_device_name() if self.device == "cuda" else "interpreter"
        text = (
            f"{card}. H = {self.num_heads}, d = {self.head_dim}, b = {self.mini_batch_size}, {self.dtype} operands, B·T = {self.tokens}, "
            f"{self.rounds} calls of each in turn. Not timed, since they failed their check: {', '.join(sorted(failed)) or 'none'}. "
            f"Left out for time or because a library is not there: {'; '.join(self._left_out) or 'nothing'}.\n\n"
            "Bytes are the fewest that must move: every input read and every output and gradient written once (state: read and written "
            "once). Operations are those of the products, 2 per multiplication and addition."
        )
        settings = {key: value for key, value in vars(self).items() if not key.startswith("_")}
        passed = [
            Check(f"{row['operation']}, {row['case']}", row["error"], row["bound"])
            for row in checks
            if row["passed"] == "yes"
        ]
        curves: dict[str, tuple[list[float], list[float]]] = {}
        for row in sequences:
            if row["pass"] == "forward + backward":
                x, y = curves.setdefault(str(row["operation"]), ([], []))
                x.append(row["T"])
                y.append(row["ms, median"])
        panels = [Panel(f"forward + backward, {self.tokens} tokens", "T", "ms", curves)]
        name = "gpu/" + card.lower().replace(" ", "-")
        return Report(f"Triton kernels on {card}", text, tables, passed, settings, panels, name)

    def _time_is_left(self, what: str) -> bool:
        left = time.perf_counter() - self._started < self.limit
        if not left:
            self._left_out.append(what)
        return left

    # -- correctness ---------------------------------------------------------------------------------------------------

    def _correctness(self, cases: Sequence[Case]) -> tuple[list[Row], set[str]]:
        """Every operation against its oracle in float64; those that fail at the shape that is timed are reported, and
        not timed."""
        rows: list[Row] = []
        failed: set[str] = set()
        for case in cases:
            for operation in OPERATIONS:
                if not self._time_is_left(f"check of {operation} {case}"):
                    continue
                self._say(f"{operation}: {case}")
                for part, error, bound in self._errors(operation, case):
                    passed = error <= bound
                    rows.append({
                        "operation": operation, "case": " ".join(f"{k}={v}" for k, v in case._asdict().items()), "part": part,
                        "error": error, "bound": bound, "passed": "yes" if passed else "NO",
                    })  # fmt: skip
                    if not passed:
                        failed.add(operation)
        return rows, failed

    def _decode_correctness(self) -> tuple[list[Row], set[str]]:
        rows: list[Row] = []
        failed: set[str] = set()
        for operation in OPERATIONS:
            error = self._decode_error(operation)
            rows.append({
                "operation": f"{operation}_decode", "case": "mixed phases", "part": "outputs and state", "error": error, "bound": 1e-4,
                "passed": "yes" if error <= 1e-4 else "NO",
            })  # fmt: skip
            if not error <= 1e-4:
                failed.add(f"{operation}_decode")
        return rows, failed

    def _errors(self, operation: str, case: Case) -> Iterator[tuple[str, float, float]]:
        dtype = DTYPES[case.dtype]
        problem = make(
            operation, case.batch, case.length, case.heads, case.width, case.size, dtype, self.device, seed=case.length
        )
        if case.packed:
            problem.options["cu_seqlens"] = torch.tensor([0, 5, 37, 101, case.length], device=self.device)
        found = problem.gradients(function(operation))
        wide = problem.to(torch.float64)
        expected = wide.gradients(oracle(operation))
        output, gradient = BOUNDS[dtype]
        yield "outputs", relative(found["o"], expected["o"]), output
        errors = {name: relative(found[name], expected[name]) for name in expected if name != "o"}
        worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
        yield f"gradients, worst of {worst}", errors[worst], gradient

    def _decode_error(self, operation: str) -> float:
        problem = Decoding(operation, 5, 3, self.head_dim, self.mini_batch_size, torch.float32, self.device)
        return problem.error()

    # -- time ----------------------------------------------------------------------------------------------------------

    def _ceilings(self) -> Row:
        self._say("measuring the ceilings")
        size = 2**28 if self.device == "cuda" else 2**20
        source = torch.empty(size, dtype=torch.uint8, device=self.device).random_()
        target = torch.empty_like(source)
        side = 8192 if self.device == "cuda" else 128
        a, b = (torch.randn(side, side, device=self.device, dtype=DTYPES[self.dtype]) for _ in range(2))
        seconds = in_turn({"copy": lambda: target.copy_(source), "product": lambda: a @ b}, self.rounds, warmup=3)
        return {
            "copy, GB/s": 2 * size / min(seconds["copy"]) / 1e9,
            "product, TFLOP/s": 2 * side**3 / min(seconds["product"]) / 1e12,
        }

    def _sequences(self, ceilings: Row, failed: set[str]) -> list[Row]:
        rows: list[Row] = []
        dtype = DTYPES[self.dtype]
        if absent := missing():
            self._left_out.append(absent)
        for length in self.lengths:
            if not self._time_is_left(f"T = {length}"):
                continue
            batch = self.tokens // length
            self._say(f"timing T = {length}, B = {batch}")
            shape = (batch, length, self.num_heads, self.head_dim)
            for backward, title in ((True, "forward + backward"), (False, "forward")):
                ways: dict[str, Callable[[], object]] = {}
                for operation in OPERATIONS:
                    if operation not in failed:
                        problem = make(operation, *shape, self.mini_batch_size, dtype, self.device)
                        ways[operation] = partial(problem.step, function(operation), backward)
                for peer in peers(self.mini_batch_size):
                    ways[peer.name] = partial(_peer_step, peer, peer.inputs(shape, dtype, self.device), backward)
                seconds = self._in_turn(ways)
                for name, took in seconds.items():
                    rows.append(self._sequence_row(name, length, title, took, seconds, ceilings))
        return rows

    def _in_turn(self, ways: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
        """As `in_turn`, without the ways that fail when they are tried: what a library refuses is named, not hidden."""
        able = {}
        for name, way in ways.items():
            try:
                way()
                able[name] = way
            except Exception as error:  # another library's failure must not cost the measurement
                reason = f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
                if reason not in self._left_out:
                    self._left_out.append(reason)
        return in_turn(able, self.rounds, warmup=min(2, self.rounds))

    def _sequence_row(
        self,
        name: str,
        length: int,
        title: str,
        took: Sequence[float],
        all_: Mapping[str, Sequence[float]],
        ceilings: Row,
    ) -> Row:
        row: Row = {"operation": name, "T": length, "pass": title}
        row |= {f"ms, {key}": 1000 * value for key, value in summary(took)._asdict().items()}
        for ours in OPERATIONS:
            row[f"times {ours}, median"] = ratios(took, all_[ours]).median if ours in all_ else None
            row[f"times {ours}, least to most"] = (
                "{0.least:.2f} to {0.most:.2f}".format(ratios(took, all_[ours])) if ours in all_ else "–"
            )
        moved, operations = work(
            name, self.tokens, self.num_heads, self.head_dim, self.mini_batch_size, title != "forward", self._itemsize
        )
        row["share of copy bandwidth"] = None if moved is None else moved / min(took) / 1e9 / ceilings["copy, GB/s"]
        row["share of matrix rate"] = (
            None if operations is None else operations / min(took) / 1e12 / ceilings["product, TFLOP/s"]
        )
        return row

    @property
    def _itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    def _decoding(self, ceilings: Row, failed: set[str]) -> list[Row]:
        rows: list[Row] = []
        for operation in OPERATIONS:
            if f"{operation}_decode" in failed or not self._time_is_left(f"decoding of {operation}"):
                continue
            self._say(f"{operation}: decoding, {self.decode_batch} sequences")
            sizes = (self.decode_batch, self.num_heads, self.head_dim, self.mini_batch_size)
            problem = Decoding(operation, *sizes, DTYPES[self.dtype], self.device)
            took = in_turn({"decode": problem.step}, 3 * self.rounds, warmup=3)["decode"]
            moved = problem.bytes_moved
            row: Row = {"operation": operation, "sequences": self.decode_batch, "state, MB": problem.state_bytes / 1e6}
            row |= {f"µs, {key}": 1e6 * value for key, value in summary(took)._asdict().items()}
            rate = moved / summary(took).median / 1e9
            rows.append(row | {"GB/s": rate, "share of copy bandwidth": rate / ceilings["copy, GB/s"]})
        return rows

    def _tuning(self, failed: set[str]) -> list[Row]:
        """Other launch parameters at the shape in the middle of `lengths`, each against the ones that are used."""
        rows: list[Row] = []
        length = self.lengths[len(self.lengths) // 2]
        shape = (self.tokens // length, length, self.num_heads, self.head_dim)
        for operation in OPERATIONS:
            if operation in failed:
                continue
            problem = make(operation, *shape, self.mini_batch_size, DTYPES[self.dtype], self.device)
            for name, change in tuning(operation, self.head_dim, self.mini_batch_size, DTYPES[self.dtype]):
                if not self._time_is_left(f"tuning of {operation}: {name}"):
                    continue
                self._say(f"{operation}: {name}")

                def changed(
                    change: Callable[[], Callable[[], None]] = change,
                    problem: Problem = problem,
                    operation: str = operation,
                ) -> object:
                    undo = change()
                    try:
                        return problem.step(function(operation), True)
                    finally:
                        undo()

                seconds = self._in_turn({"used": partial(problem.step, function(operation), True), name: changed})
                if len(seconds) == 2:
                    ratio = ratios(seconds[name], seconds["used"])
                    rows.append({
                        "operation": operation, "T": length, "change": name, "ms, median": 1000 * summary(seconds[name]).median,
                        "times used, least": ratio.least, "times used, median": ratio.median, "times used, most": ratio.most,
                    })  # fmt: skip
        return rows


# -- problems ----------------------------------------------------------------------------------------------------------


class Problem:
    """Random inputs of one operation: leaves by name, and cotangents."""

    def __init__(self, leaves: dict[str, Tensor], options: dict[str, Any], cotangent: Tensor):
        self.leaves, self.options, self.cotangent = leaves, options, cotangent

    def to(self, dtype: torch.dtype) -> Problem:
        leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in self.leaves.items()}
        return Problem(leaves, dict(self.options), self.cotangent.to(dtype))

    def call(self, operation: Callable[..., tuple[Tensor, Any]]) -> tuple[Tensor, Any]:
        inputs = {name: x for name, x in self.leaves.items() if name != "tau"}
        return operation(*inputs.values(), tau=self.leaves["tau"], **self.options)

    def gradients(self, operation: Callable[..., tuple[Tensor, Any]]) -> dict[str, Tensor]:
        o, _ = self.call(operation)
        found = torch.autograd.grad(o, list(self.leaves.values()), self.cotangent.to(o.dtype))
        return {"o": o.detach(), **dict(zip(self.leaves, found, strict=True))}

    def step(self, operation: Callable[..., tuple[Tensor, Any]], backward: bool) -> object:
        """What is timed."""
        with torch.set_grad_enabled(backward):
            o, _ = self.call(operation)
            return torch.autograd.grad(o, list(self.leaves.values()), self.cotangent) if backward else o


def make(
    operation: str,
    batch: int,
    length: int,
    heads: int,
    width: int,
    size: int,
    dtype: torch.dtype,
    device: str,
    seed: int = 0,
) -> Problem:
    """Views as projections write them, `[B, T, H, d]`, and weights away from their initial values."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        return (torch.randn(*shape, generator=generator, device=device) * scale + shift).requires_grad_()

    def views(scale: float) -> Tensor:
        return normal(batch, length, heads, width, scale=scale).detach().to(dtype).requires_grad_()

    rate = (1.0 if operation == "ttt_linear" else 0.1) / width
    leaves = {"q": views(0.5), "k": views(0.5), "v": views(0.5)}
    leaves["eta"] = (torch.rand(batch, length, heads, generator=generator, device=device) * rate).requires_grad_()
    hidden = 4 * width
    if operation == "ttt_linear":
        leaves |= {"w": normal(heads, width, width, scale=0.02), "b": normal(heads, width, scale=0.02)}
    else:
        leaves |= {"w1": normal(heads, width, hidden, scale=0.02), "b1": normal(heads, hidden, scale=0.02)}
        leaves |= {"w2": normal(heads, hidden, width, scale=0.02), "b2": normal(heads, width, scale=0.02)}
    leaves |= {"norm_scale": normal(heads, width, scale=0.1, shift=1.0), "norm_bias": normal(heads, width, scale=0.1)}
    leaves["tau"] = (1 / torch.arange(1, size + 1, device=device)).unsqueeze(0).requires_grad_()
    cotangent = torch.randn(batch, length, heads, width, generator=generator, device=device).to(dtype)
    return Problem(leaves, {"mini_batch_size": size}, cotangent)


class Decoding:
    """One token for each of several sequences at different places of their mini-batches; the state is updated in
    place."""

    def __init__(self, operation: str, batch: int, heads: int, width: int, size: int, dtype: torch.dtype, device: str):
        generator = torch.Generator(device).manual_seed(0)
        self.operation, self.size = operation, size

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device) * scale

        self.q, self.k, self.v = (normal(batch, heads, width, scale=0.5).to(dtype) for _ in range(3))
        self.eta = torch.rand(batch, heads, generator=generator, device=device) / width
        hidden = width if operation == "ttt_linear" else 4 * width
        shapes: list[tuple[int, ...]] = [(width, hidden), (hidden,)]
        shapes += [] if operation == "ttt_linear" else [(hidden, width), (width,)]
        self.weights = [normal(batch, heads, *shape, scale=0.02) for shape in shapes]
        self.updates = [normal(batch, heads, *shape, scale=0.02) for shape in shapes]
        self.norm = [normal(heads, width, scale=0.1) + 1, normal(heads, width, scale=0.1)]
        self.tau = (1 / torch.arange(1, size + 1, device=device)).unsqueeze(0)
        self.phase = torch.arange(batch, device=device) % size

    @property
    def state_bytes(self) -> int:
        return sum(x.nbytes for x in (*self.weights, *self.updates))

    @property
    def bytes_moved(self) -> float:
        """W is read, the update read and written, and W written where a mini-batch ends; one token's views besides."""
        share = (self.phase == self.size - 1).float().mean().item()
        weights = sum(x.nbytes for x in self.weights)
        return weights * (3 + share) + sum(x.nbytes for x in (self.q, self.k, self.v, self.q, self.eta))

    def step(self) -> Tensor:
        decode = getattr(_module(self.operation, "op"), f"{self.operation}_decode")
        state = [*self.weights, *self.updates]
        o: Tensor = decode(self.q, self.k, self.v, self.eta, *state, *self.norm, tau=self.tau, phase=self.phase)
        return o

    def error(self) -> float:
        """Outputs and state after one step against the equations in float64."""
        weights, updates = ([x.double() for x in state] for state in (self.weights, self.updates))
        expected, after, moved = reference_decode(
            self.operation, self.q.double(), self.k.double(), self.v.double(), self.eta.double(), weights, updates,
            [x.double() for x in self.norm], self.tau.double(), self.phase,
        )  # fmt: skip
        o = self.step()
        pairs = [(o, expected), *zip(self.weights, after, strict=True), *zip(self.updates, moved, strict=True)]
        return max(relative(found, right) for found, right in pairs)


def reference_decode(
    operation: str, q: Tensor, k: Tensor, v: Tensor, eta: Tensor, weights: list[Tensor], updates: list[Tensor], norm: list[Tensor],
    tau: Tensor, phase: Tensor,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:  # fmt: skip
    """One token by differentiating the loss: outputs, weights and updates."""
    scale, shift = norm

    def predict(x: Tensor, w: Sequence[Tensor]) -> Tensor:
        z = x
        for i in range(0, len(w), 2):
            z = torch.einsum("bhi,bhij->bhj", z, w[i]) + w[i + 1]
            z = F.gelu(z, approximate="tanh") if i + 2 < len(w) else z
        return x + scale * F.layer_norm(z, z.shape[-1:], eps=1e-6) + shift

    with torch.enable_grad():
        leaves = [w.detach().requires_grad_() for w in weights]
        gradients = torch.autograd.grad(0.5 * (predict(k, leaves) - v).square().sum(), leaves)

    def spread_(x: Tensor, like: Tensor) -> Tensor:
        return x.view(*x.shape, *(1,) * (like.ndim - x.ndim))

    moved = [m - spread_(eta, g) * g for m, g in zip(updates, gradients, strict=True)]
    steps = tau[0][phase]
    at = [w + spread_(steps, w) * m for w, m in zip(weights, moved, strict=True)]
    ends = phase == tau.shape[1] - 1
    after = [torch.where(spread_(ends, w), new, w) for new, w in zip(at, weights, strict=True)]
    return predict(q, at), after, [torch.where(spread_(ends, m), 0, m) for m in moved]


def relative(found: Tensor, expected: Tensor) -> float:
    """Relative Frobenius error; not a number if anything is not finite."""
    return ((found.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def work(
    name: str, tokens: int, heads: int, d: int, b: int, backward: bool, itemsize: int
) -> tuple[float | None, float | None]:
    """Bytes that must move and operations of the products for our operations; None for others."""
    if name not in OPERATIONS:
        return None, None
    views = tokens * heads * d * itemsize
    moved = views * (4 + (7 if backward else 0)) + tokens * heads * 4 * (1 + 2 * backward)
    f = 4 * d
    if name == "ttt_linear":
        count = 3 * d * d + 2 * b * d + (9 * d * d + 6 * b * d if backward else 0)
    else:
        count = 7 * d * f + 2 * b * (d + f) + (21 * d * f + 6 * b * (d + f) if backward else 0)
    return float(moved), 2.0 * count * tokens * heads


def function(operation: str) -> Callable[..., tuple[Tensor, Any]]:
    found: Callable[..., tuple[Tensor, Any]] = getattr(_module(operation, "op"), operation)
    return found


def oracle(operation: str) -> Callable[..., tuple[Tensor, Any]]:
    module = _module(operation, "naive")
    found: Callable[..., tuple[Tensor, Any]] = getattr(module, f"{operation}_naive", None) or getattr(
        module, f"naive_{operation}"
    )
    return found


def tuning(
    operation: str, width: int, size: int, dtype: torch.dtype
) -> Iterator[tuple[str, Callable[[], Callable[[], None]]]]:
    """Changes of the launch parameters: a name, and a function that makes the change and returns the one that takes it
    back."""
    yield from _module(operation, "tuning").variants(width, size, dtype)


def _module(operation: str, name: str) -> ModuleType:
    import importlib

    return importlib.import_module(f"metattt.kernels.{operation}.{name}")


def _peer_step(peer: Peer, inputs: Sequence[Tensor], backward: bool) -> object:
    with torch.set_grad_enabled(backward):
        o = peer.call(*inputs)
        return torch.autograd.grad(o, [x for x in inputs if x.requires_grad], torch.ones_like(o)) if backward else o
