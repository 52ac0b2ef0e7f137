"""Our operations as the benchmark measures them: checks against the oracle in float64, times, and other launches."""

from __future__ import annotations

import importlib
import inspect
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from metattt.bench.gpu.calls import Way, in_milliseconds, timed_call, under
from metattt.bench.gpu.decoding import Decoding
from metattt.bench.gpu.problems import DTYPES, Problem, make, relative, work
from metattt.bench.gpu.resources import compiled_kernels
from metattt.bench.timing import as_graph, on_device, ratios, summary

BOUNDS = {"bfloat16": (2e-2, 5e-2), "float16": (1e-2, 2e-2), "float32": (1e-4, 1e-4)}
"""Relative errors, at most: of outputs and states, and of gradients."""
DECODE_BOUND = 1e-4

Case = Mapping[str, Any]


class Operation:
    """One of ours, by the name of its folder under `metattt.kernels`.

    Args:
        name: `ttt_linear` or `ttt_mlp`.
    """

    def __init__(self, name: str):
        self.name = name

    def module(self, part: str) -> ModuleType:
        return importlib.import_module(f"metattt.kernels.{self.name}.{part}")

    @property
    def function(self) -> Callable[..., tuple[Tensor, Any]]:
        found: Callable[..., tuple[Tensor, Any]] = getattr(self.module("op"), self.name)
        return found

    @property
    def oracle(self) -> Callable[..., tuple[Tensor, Any]]:
        module = self.module("naive")
        found: Callable[..., tuple[Tensor, Any]] = getattr(module, f"{self.name}_naive", None) or getattr(
            module, f"naive_{self.name}"
        )
        return found

    def variants(self, case: Case) -> dict[str, Callable[[], Callable[[], None]]]:
        """Changes of the launch for a timed case, by name: each makes the change, and returns what takes it back.

        `tuning.variants` of the operation is given what it names of: `width`, `size`, `dtype`, `heads`, `length`,
        `programs` (sequences times heads), and `per_sm` (of those for each multiprocessor, rounded down, at most 4).
        """
        offered = {name: case[name] for name in ("width", "size", "heads", "length")}
        programs = case["tokens"] // case["length"] * case["heads"]
        offered |= {
            "dtype": DTYPES[case["dtype"]],
            "programs": programs,
            "per_sm": min(programs // multiprocessors(), 4),
        }
        function = self.module("tuning").variants
        named = inspect.signature(function).parameters
        return dict(function(**{name: value for name, value in offered.items() if name in named}))

    def measure(self, kind: str, case: dict[str, Any], device: str) -> dict[str, Any]:
        """As `subjects.Subject`: kinds `check`, `decode check`, `time`, `decode` and `variant`."""
        kinds = {
            "check": self.check,
            "decode check": self.decode_check,
            "time": self.time,
            "decode": self.decode,
            "variant": self.variant,
        }
        found = kinds[kind](case, device)
        return found | {"kernels": compiled_kernels(f"metattt.kernels.{self.name}")}

    # -- checks --------------------------------------------------------------------------------------------------------

    def check(self, case: Case, device: str) -> dict[str, Any]:
        """Outputs, final state and every gradient against the oracle in float64."""
        return {"parts": [passed(*part) for part in self.errors(case, device)]}

    def errors(self, case: Case, device: str) -> Iterator[tuple[str, float, float]]:
        """What is compared, its relative error, and the bound of that."""
        sizes = (case["batch"], case["length"], case["heads"], case["width"], case["size"])
        problem = make(self.name, *sizes, DTYPES[case["dtype"]], device, seed=case["length"])
        if case["packed"]:
            problem.options["cu_seqlens"] = torch.tensor([0, 5, 37, 101, case["length"]], device=device)
        problem.options["output_final_state"] = True
        with poisoned():
            found, state = problem.gradients(self.function)
        expected, right = problem.to(torch.float64).gradients(self.oracle)
        output, gradient = BOUNDS[case["dtype"]]
        yield "outputs", relative(found["o"], expected["o"]), output
        yield (
            "final state",
            _worst({str(i): relative(x, y) for i, (x, y) in enumerate(zip(state, right, strict=True))})[1],
            output,
        )
        name, error = _worst({name: relative(found[name], expected[name]) for name in expected if name != "o"})
        yield f"gradients, worst of {name}", error, gradient

    def decode_check(self, case: Case, device: str) -> dict[str, Any]:
        """One token of sequences at different places of their mini-batches, outputs and state, in fp32."""
        sizes = (case["batch"], case["heads"], case["width"], case["size"])
        with poisoned():
            error = Decoding(self.name, *sizes, torch.float32, device).error()
        return {"parts": [passed("outputs and state", error, DECODE_BOUND)]}

    # -- times ---------------------------------------------------------------------------------------------------------

    def problem(self, case: Case, device: str) -> Problem:
        batch = case["tokens"] // case["length"]
        sizes = (batch, case["length"], case["heads"], case["width"], case["size"])
        return make(self.name, *sizes, DTYPES[case["dtype"]], device)

    def way(self, case: Case, device: str, backward: bool = True) -> Way:
        """One timed call."""
        return partial(self.problem(case, device).step, self.function, backward)

    def time(self, case: Case, device: str) -> dict[str, Any]:
        """A call on sequences."""
        backward = case["pass"] != "forward"
        moved, operations = work(
            self.name,
            case["tokens"],
            case["heads"],
            case["width"],
            case["size"],
            backward,
            DTYPES[case["dtype"]].itemsize,
        )
        return timed_call(self.way(case, device, backward), case["rounds"], device) | {
            "bytes": moved,
            "operations": operations,
        }

    def decode(self, case: Case, device: str) -> dict[str, Any]:
        """A token for each of several sequences: replayed as a graph, and called as `generate` does."""
        sizes = (case["batch"], case["heads"], case["width"], case["size"])
        problem = Decoding(self.name, *sizes, DTYPES[case["dtype"]], device)
        called = timed_call(problem.step, case["rounds"], device)
        replay: Way = as_graph(problem.step) if device == "cuda" else problem.step
        took = on_device({"replay": replay}, 3 * case["rounds"], device)["replay"]
        replayed = {f"graph, ms, {key}": 1000 * value for key, value in summary(took.device)._asdict().items()}
        return called | replayed | {"bytes": problem.bytes_moved, "state, bytes": problem.state_bytes}

    def variant(self, case: Case, device: str) -> dict[str, Any]:
        """Another launch and the one that is used, in turn."""
        used, change = self.way(case, device), self.variants(case)[case["variant"]]
        changed = under(change, used)
        took = on_device({"used": used, "changed": changed}, case["rounds"], device)
        ratio = ratios(took["changed"].device, took["used"].device)
        return {
            "sets": what_it_sets(self.module("tuning"), change),
            **in_milliseconds(took["changed"]),
            "used, ms, median": 1000 * statistics.median(took["used"].device),
            **{f"times used, {key}": value for key, value in ratio._asdict().items()},
        }


def multiprocessors() -> int:
    """Of the device; elsewhere than on a GPU those of an H100."""
    return torch.cuda.get_device_properties().multi_processor_count if torch.cuda.is_available() else 132


def what_it_sets(module: ModuleType, change: Callable[[], Callable[[], None]]) -> dict[str, Any]:
    """The entries of a module's tables, and its constants, that a change gives other values, as JSON can hold them."""
    before = _tables(module)
    undo = change()
    try:
        after = _tables(module)
    finally:
        undo()
    return {
        name: {key: value[key] for key in value if key not in before[name] or before[name][key] != value[key]}
        if isinstance(value, dict)
        else value
        for name, value in after.items()
        if before[name] != value
    }


def _tables(module: ModuleType) -> dict[str, Any]:
    """Copies; the keys of dictionaries are texts."""
    return {
        name: {key if isinstance(key, str) else " ".join(map(str, key if isinstance(key, tuple) else (key,))): one
               for key, one in value.items()}
        if isinstance(value, dict) else value
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, dict | int | float | str)
    }  # fmt: skip


def passed(part: str, error: float, bound: float) -> dict[str, Any]:
    return {"part": part, "error": error, "bound": bound, "passed": bool(error <= bound)}


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that is asked for holds NaN until it is written."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # which fills it; other operations may stay as they are
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _worst(errors: Mapping[str, float]) -> tuple[str, float]:
    """The largest, or one that is not a number."""
    name = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    return name, errors[name]


ttt_linear, ttt_mlp = Operation("ttt_linear"), Operation("ttt_mlp")
