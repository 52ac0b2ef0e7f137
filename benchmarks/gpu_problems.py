"""What `gpu.py` measures: TTT-Linear's and TTT-MLP's Triton operations checked and timed, peers, and other launches."""

from __future__ import annotations

import copy
import importlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from common import in_turn, product, rate, ratios, reading, summary
from operation import Operation
from peers import PEERS, forget_autotuning
from torch import Tensor

from metattt.composition.compose import build
from metattt.layer import TTTLayer
from metattt.testing.specimen import distance, randomize

Case = Mapping[str, Any]  # shapes, types and sizes; JSON values
Found = dict[str, Any]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
BOUNDS = {"bfloat16": (2e-2, 5e-2), "float16": (1e-2, 2e-2), "float32": (1e-4, 1e-4)}
"""Relative errors (Frobenius norm), at most: of outputs, and of gradients."""
ROUNDING = 4  #: times the dual form's error in the same type
OURS = ("ttt_linear", "ttt_mlp")
ONLINE = ("delta_net", "gated_delta_net", "comba", "kda", "gla", "rwkv7", "gated_delta_product")


def measure(kind: str, subject: str, case: Case, device: str) -> Found:
    """One result, as JSON can hold it."""
    return KINDS[kind](subject, case, device)


def through_kernels(layer: TTTLayer, subject: str, device: str) -> TTTLayer:
    """The layer with the Triton kernel of its operation alone: what that does not take is an error, and not computed by
    another form."""
    module = importlib.import_module(f"metattt.kernels.{subject}.on_gpu")
    kernel = {"ttt_linear": "TTTLinearOnGPU", "ttt_mlp": "TTTMLPOnGPU"}[subject]
    made = getattr(module, kernel)()
    made.device = device  # `cpu`: interpreted
    layer.plan.kernels, layer.plan.strict = [made], True
    return layer


def operation(subject: str, case: Case, device: str) -> Operation:
    sizes = (case["tokens"] // case["length"], case["length"], case["heads"], case["width"], case["size"])
    found = Operation(subject.removeprefix("ttt_"), *sizes, device, DTYPES[case["dtype"]])
    through_kernels(found.layer, subject, device)
    return found


def check(subject: str, case: Case, device: str) -> Found:
    """Outputs and every gradient against the dual form in float64, in memory that holds NaN until it is written.

    A gradient that cancels (of the token steps, over few tokens) may be as far off as the dual form in the same type
    makes it, several times: that is rounding.
    """
    given = operation(subject, case, device)
    with poisoned():
        found = given.training(partial(given.run, given.layer.plan))
    right = given.double()
    expected = right.training(partial(right.run, right.dual))
    plain = given.training(partial(given.run, given.dual))

    def errors(tensors: Sequence[Tensor]) -> list[float]:
        pairs = zip(tensors, expected, strict=True)
        return [((a.double() - b).norm() / b.norm().clamp(min=1e-30)).item() for a, b in pairs]

    output, gradient = BOUNDS[case["dtype"]]
    rows = list(zip(["outputs", *given.leaves], errors(found), errors(plain), strict=True))
    shares = {name: off / max(gradient, ROUNDING * dual if dual < math.inf else 0) for name, off, dual in rows[1:]}
    worst = max(shares, key=lambda name: shares[name] if shares[name] == shares[name] else math.inf)
    _, off, dual = next(row for row in rows if row[0] == worst)
    passed = rows[0][1] <= output and shares[worst] <= 1
    return {"passed": passed, "outputs": rows[0][1], "worst gradient": off, "of": worst, "dual form": dual}


def decode_check(subject: str, case: Case, device: str) -> Found:
    """A whole layer in fp32 token by token over three mini-batches, against the dual form in one call."""
    layer, dual = _layer(subject, case, device), _layer(subject, case, device, "dual")
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(case["batch"], 2 * case["size"] + 5, layer.dim, generator=generator).to(device)
    ys, state = [], None
    with torch.inference_mode(), poisoned():
        for token in x.split(1, dim=1):
            y, state = layer(token, state)
            ys.append(y)
        error = distance(torch.cat(ys, 1), dual(x)[0])
    return {"passed": error <= 1e-3, "outputs": error}


def online(subject: str, case: Case, device: str) -> Found:
    """A layer whose online rule flash-linear-attention may compute: one training step under autocast against the solved
    form in float64, what computed it, and its time beside that of the solved form."""
    words = f"layer={subject}", f"dim={case['heads'] * case['width']}", f"num_heads={case['heads']}", "seed=0"
    auto, dual = (build(*words, f"layer.form={form}").to(device) for form in ("auto", "dual"))
    exact = copy.deepcopy(dual).double()
    x = torch.randn(case["tokens"] // case["length"], case["length"], auto.dim, device=device)

    def step(layer: TTTLayer, given: Tensor, enabled: bool = True) -> list[Tensor]:
        given, leaves = given.detach().requires_grad_(), [p for p in layer.parameters() if p.requires_grad]
        with torch.autocast(device, DTYPES[case["dtype"]], enabled=enabled):
            y, _ = layer(given)
        return [y.detach(), *torch.autograd.grad(y.float().square().mean(), [given, *leaves])]

    expected, plain, found = step(exact, x.double(), False), step(dual, x), step(auto, x)
    off, rounding = ([distance(a.double(), b) for a, b in zip(one, expected, strict=True)] for one in (found, plain))
    output, gradient = BOUNDS[case["dtype"]]
    worst = max(range(1, len(off)), key=lambda i: off[i] / max(gradient, ROUNDING * rounding[i]))
    passed = off[0] <= max(output, ROUNDING * rounding[0]) and off[worst] <= max(gradient, ROUNDING * rounding[worst])
    times = [milliseconds(partial(step, layer, x), device)["ms, median"] for layer in (auto, dual)]
    return {
        "passed": passed, "outputs": off[0], "worst gradient": off[worst], "dual form": rounding[worst],
        "by": sorted(why for form, _, why in auto.plan.said if form == "fused"),
        "ms, median": times[0], "ms, dual form": times[1],
    }  # fmt: skip


def _layer(subject: str, case: Case, device: str, form: str = "auto") -> TTTLayer:
    dim, size = case["heads"] * case["width"], f"optimizer.mini_batch_size={case['size']}"
    sizes = (f"dim={dim}", f"num_heads={case['heads']}", size)
    layer = build(f"layer={subject}", *sizes, f"layer.form={form}", "seed=0").to(device)
    randomize(layer)
    return through_kernels(layer, subject, device) if form == "auto" else layer


def way(subject: str, case: Case, device: str) -> Callable[[], object]:
    """A call of ours, or of one of `peers.PEERS`. What its user has anyway is made before."""
    backward = case.get("pass") != "forward"
    if subject in OURS:
        given = operation(subject, case, device)
        run = partial(given.run, given.layer.plan)
        return partial(given.training, run) if backward else torch.no_grad()(run)
    operator, random = PEERS[subject](case["size"])
    shape = (case["tokens"] // case["length"], case["length"], case["heads"], case["width"])
    inputs = random(shape, DTYPES[case["dtype"]], device)
    cotangent, leaves = torch.randn_like(inputs[2]), [x for x in inputs if x.requires_grad]
    forget_autotuning()

    def call() -> object:
        with torch.set_grad_enabled(backward):
            o = operator(*inputs)
            return torch.autograd.grad(o, leaves, cotangent) if backward else o

    return call


def milliseconds(call: Callable[[], object], device: str) -> Found:
    """Least, median and most of calls that find nothing in the L2 cache."""
    if device == "cpu":
        return summary(in_turn({"call": call}, 1, 0)["call"]).columns("ms", 1000)
    from triton.testing import do_bench

    return dict(zip(("ms, least", "ms, median", "ms, most"), do_bench(call, quantiles=[0.0, 0.5, 1.0]), strict=True))


def timed(subject: str, case: Case, device: str) -> Found:
    """A call on sequences, and the most memory that a second one held, with its inputs."""
    call = way(subject, case, device)
    found: Found = {"first call, s": in_turn({"call": call}, 1, 0)["call"][0]}
    if device == "cuda":  # the first one may tune, and what is timed holds 0.27 GB that empty the cache
        torch.cuda.reset_peak_memory_stats()
        call()
        found["peak, GB"] = torch.cuda.max_memory_allocated() / 1e9
    return milliseconds(call, device) | found


def decode(subject: str, case: Case, device: str) -> Found:
    """A token for each of several sequences through a whole layer, from the state after half a mini-batch."""
    layer = _layer(subject, case, device)
    x = torch.randn(case["batch"], case["size"] // 2 + 1, layer.dim, device=device)
    with torch.inference_mode(), torch.autocast(device, DTYPES[case["dtype"]], enabled=case["dtype"] != "float32"):
        _, state = layer(x[:, 1:])
        return milliseconds(lambda: layer(x[:, :1], state), device) | {"state, MB": state.nbytes / 1e6}


def ceiling(subject: str, case: Case, device: str) -> Found:
    """Bytes that a product of a large matrix and a vector reads, and operations of a large product."""
    at, dtype = torch.device(device), DTYPES[case["dtype"]]
    return {"read, GB/s": rate(*reading(at, dtype)) / 1e9, "product, TFLOP/s": rate(*product(at, dtype)) / 1e12}


# -- other launches ----------------------------------------------------------------------------------------------------


def variants(subject: str, case: Case) -> dict[str, tuple[str, Any]]:
    """Other launches for a timed case, by name: a constant of the operation's `tuning` and another value for it; of
    `TABLE`, entries that are added."""
    tuning: Any = importlib.import_module(f"metattt.kernels.{subject}.tuning")
    width, size, found = case["width"], case["size"], dict[str, tuple[str, Any]]()
    if subject == "ttt_mlp":
        for kernel, (tile, warps) in itertools.product(("forward", "backward"), ((32, 4), (64, 4), (64, 8), (128, 8))):
            if (other := tuning.Config(tile, warps, 1)) != tuning.config(kernel, width, size):
                found[f"{kernel}: tiles of {tile}, {warps} warps"] = "TABLE", {tuning.key(kernel, width, size): other}
        return found
    dtype, warps = DTYPES[case["dtype"]], tuning.padded(width) // 16
    launches = ((warps, 168), (warps, 128), (2 * warps, None))
    for kernel, (count, registers) in itertools.product(tuning.KERNELS, launches):
        entry = {tuning.key(kernel, width, size, dtype.itemsize): [count, registers]}
        found[f"{kernel}: {count} warps, registers {registers}"] = "TABLE", entry
    found |= {f"segments of {length} mini-batches": ("SEGMENT", length) for length in (8, 32)}
    return found | ({"products of fp32 as ieee": ("FP32_PRODUCTS", "ieee")} if dtype == torch.float32 else {})


def variant(subject: str, case: Case, device: str) -> Found:
    """Another launch against the one that is used, three times in turn, and the entries of tables that it sets."""
    tuning = importlib.import_module(f"metattt.kernels.{subject}.tuning")
    (constant, value), used = variants(subject, case)[case["variant"]], way(subject, case, device)
    times: dict[str, list[float]] = {"used": [], "changed": []}
    for _ in range(3):
        times["used"].append(milliseconds(used, device)["ms, median"])
        with mock.patch.object(tuning, constant, tuning.TABLE | value if constant == "TABLE" else value):
            times["changed"].append(milliseconds(used, device)["ms, median"])
    ratio = ratios(times["changed"], times["used"]).columns("times used")
    return summary(times["changed"]).columns("ms") | ratio | {"sets": {constant: value} if constant == "TABLE" else {}}


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that is asked for holds NaN until it is written."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # which fills it; other operations may stay as they are
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


KINDS: dict[str, Callable[[str, Case, str], Found]] = {
    "check": check, "decode check": decode_check, "time": timed, "decode": decode, "ceilings": ceiling,
    "variant": variant, "online": online,
}  # fmt: skip
