"""The kernels in C++ against their equations in float64, and what happens around them: compiling, threads, falling
back."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from mini_batches import Leaves, given_of, inputs, rearranged, written_out
from refusals_for_tests import refusal
from torch import Tensor

from metattt.kernels.cpu import native_scan
from metattt.kernels.cpu.native_scan import NativeForm
from metattt.kernels.ttt_linear.native import NativeTTTLinear
from metattt.kernels.ttt_mlp.native import NativeTTTMLP
from metattt.layer import TTTLayer
from metattt.learners import MLP, Linear
from metattt.native import library as native
from metattt.native.threads import divide
from metattt.optimizers import Gates, GradientDescent
from metattt.tasks import Reconstruction, Views

KERNELS: dict[str, NativeForm] = {"linear": NativeTTTLinear(), "mlp": NativeTTTMLP()}
BOUND = 1e-4
pytestmark = pytest.mark.skipif(native.load(KERNELS["linear"].source, {"WIDTH": 16, "TOKENS": 16, "BIAS": 1}) is None, reason="no compiler")


def by(kernel: NativeForm, b: int = 16, group_size: int | None = None) -> Callable[[Leaves], tuple[Tensor, Leaves]]:
    return lambda x: kernel.scan(given_of(x, b, group_size), lambda _: pytest.fail("the reference was taken"))


def results(call: Callable[[Leaves], tuple[Any, ...]], x: Leaves) -> Leaves:
    """Outputs, final weights and all gradients."""
    leaves = {name: value.detach().requires_grad_() for name, value in x.items()}
    y, after, *_ = call(leaves)
    outputs = {"y": y, **{f"final {name}": w for name, w in after.items()}}
    generator = torch.Generator().manual_seed(0)
    cotangents = [torch.randn(out.shape, generator=generator).to(out.dtype) for out in outputs.values()]
    gradients = torch.autograd.grad(list(outputs.values()), list(leaves.values()), cotangents)
    found = outputs | {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}
    return {name: one.detach() for name, one in found.items()}


def check(kind: str, x: Leaves, b: int = 16, group_size: int | None = None) -> None:
    kernel = KERNELS[kind]
    assert kernel.reason_rejected(given_of(x, b)) is None
    found = results(by(kernel, b, group_size), x)
    expected = results(partial(written_out, b=b), {name: value.double() for name, value in x.items()})
    for name, value in expected.items():
        assert found[name].shape == value.shape and found[name].dtype == torch.float32
        error = (found[name].double() - value).norm() / value.norm()
        assert error < BOUND, f"{name}: {error:.2g}"


@pytest.mark.parametrize(
    ("kind", "d", "hidden", "b", "bias", "tau", "group_size"),
    [
        ("linear", 16, 0, 16, True, "none", None), ("linear", 32, 0, 32, False, "shared", 1), ("linear", 64, 0, 16, True, "per_head", 3),
        ("linear", 96, 0, 16, False, "per_head", None), ("linear", 128, 0, 32, True, "shared", 100),
        ("mlp", 16, 64, 16, True, "none", None), ("mlp", 32, 48, 32, False, "shared", 1), ("mlp", 64, 256, 16, True, "per_head", 3),
        ("mlp", 96, 384, 16, True, "shared", None), ("mlp", 128, 32, 16, False, "none", 100),
    ],
)  # fmt: skip
def test_equals_the_equations(kind: str, d: int, hidden: int, b: int, bias: bool, tau: str, group_size: int | None) -> None:
    check(kind, inputs(kind, d, b, bias, tau, hidden, n=96), b, group_size)


@pytest.mark.parametrize("kind", KERNELS)
def test_any_strides(kind: str) -> None:
    check(kind, rearranged(inputs(kind, tau="per_head")))


@pytest.mark.parametrize("kind", KERNELS)
def test_only_some_gradients(kind: str) -> None:
    """Of the last weights alone, or of the outputs alone, for some of the inputs."""
    x = inputs(kind, 16, 16, True, "none")
    double = {name: value.double() for name, value in x.items()}
    for pick in (lambda y, after, *_: after["w1"].square().sum(), lambda y, *_: y.square().sum()):
        found, expected = [], []
        for call, values, out in ((by(KERNELS[kind]), x, found), (written_out, double, expected)):
            leaves = {name: value.detach().requires_grad_(name in ("k", "w1")) for name, value in values.items()}
            pick(*call(leaves)).backward()
            out += [leaf.grad for leaf in leaves.values()]
        for a, e in zip(found, expected, strict=True):
            assert (a is None) == (e is None)
            assert a is None or (a.double() - e).norm() < BOUND * e.norm()


@pytest.mark.parametrize("kind", KERNELS)
def test_threads_and_no_gradients_give_the_same_bits(kind: str) -> None:
    x = inputs(kind, tau="none", n=480, batch=3)
    expected = results(by(KERNELS[kind]), x)
    torch.set_num_threads(4)
    for name, value in results(by(KERNELS[kind]), x).items():
        assert torch.equal(value, expected[name]), name
    leaves = {name: value.requires_grad_() for name, value in x.items()}
    with torch.no_grad():
        y, after = KERNELS[kind].scan(given_of(leaves), None)  # type: ignore[arg-type]
    assert torch.equal(y, expected["y"]) and torch.equal(after["w1"], expected["final w1"]) and not y.requires_grad


def test_a_thread_that_outlives_the_main_one_goes_on() -> None:
    """From then on no thread of a pool can begin."""
    program = (
        "import threading; from metattt.native.threads import divide\n"
        "def late():\n"
        "    threading.main_thread().join()\n"
        "    print(sorted(divide(lambda first, last: last - first, 10, 3)))\n"
        "threading.Thread(target=late).start()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[3, 3, 4]\n" and not done.stderr


def test_an_interrupted_call_ends_when_no_thread_writes_any_more() -> None:
    begun, ended = threading.Event(), list[int]()

    def share(first: int, last: int) -> int:
        if threading.current_thread() is threading.main_thread():
            begun.wait(10)
            raise KeyboardInterrupt
        begun.set()
        time.sleep(0.1)
        ended.append(first)
        return 0

    with pytest.raises(KeyboardInterrupt):
        divide(share, 3, 3)
    before = list(ended)
    time.sleep(0.2)
    assert len(before) > 0 and ended == before


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("name", ["k", "q", "eta", "w1", "scale"])
def test_nan_is_not_lost(kind: str, name: str) -> None:
    """It reaches all that depends on it, and no other head or sequence."""
    x = inputs(kind, tau="none")
    per_token = name in ("k", "v", "q", "eta")
    x[name][(0, 0, 20) if per_token else (0, 0)] = float("nan")
    found = {key: value.isnan() for key, value in results(by(KERNELS[kind]), x).items()}
    later = slice(20, 21 if name == "q" else None)
    assert found["y"][0, 0, later if per_token else slice(None)].all()
    assert found["dw1"][0, 0].any() and found["dk"][0, 0, :16].all() and found["deta"][0, 0, :16].all()
    if name != "q":
        assert found["final w1"][0, 0].any()
    for key in ("y", "dk", "dv", "dq", "deta", "dw1", "final w1"):
        assert not found[key][:, 1].any()
        assert name == "scale" or not found[key][1].any()


def test_hidden_units_of_any_size() -> None:
    """Where a GELU is flat the fifth power of its argument may be infinite in fp32: that is no derivative."""
    x = inputs("mlp", tau="none")
    check("mlp", x | {"k": 1e5 * x["k"], "q": 1e5 * x["q"]})


LEARNERS: dict[str, Any] = {"linear": Linear, "mlp": MLP}


# -- what a user's own part may give ----------------------------------------------------------------------------------


class Shared(GradientDescent):
    """A rule that gives one number for all along the `axes` of some gates."""

    axes: dict[str, tuple[int, ...]] = {}  # noqa: RUF012

    def gates(self, x: Tensor, state: Any, ctx: Any) -> tuple[Gates, Any]:
        gates, state = super().gates(x, state, ctx)
        eta = 20 * gates.eta
        made = {name: eta.mean(axes, keepdim=True) for name, axes in self.axes.items()}
        return gates._replace(**{name: x if name == "eta" else x.sigmoid() for name, x in made.items()}), state


class OneLabel(Reconstruction):
    """A task whose labels are the same along some axes."""

    axes: tuple[int, ...] = ()

    def views(self, x: Tensor, state: Any, ctx: Any) -> tuple[Views, Any]:
        views, state = super().views(x, state, ctx)
        return views._replace(v=views.v.mean(self.axes, keepdim=True) if self.axes else views.v), state


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize(
    ("label", "gates"),
    [
        *(((), {"eta": axes}) for axes in ((0,), (1,), (0, 1, 2))),
        *((axes, {}) for axes in ((0,), (2,), (3,))),
        ((), {"alpha": (1,)}),
        ((), {"kappa": (1,)}),
    ],
)
def test_one_number_for_all(kind: str, label: tuple[int, ...], gates: dict[str, tuple[int, ...]]) -> None:
    """A gate or a label that heads, sequences or tokens share is the same in every form; a kernel reads no further."""
    x, found = torch.randn(3, 41, 32), []
    for form in ("auto", "dual", "primal"):
        torch.manual_seed(0)
        task, rule = OneLabel(), Shared(16)
        task.axes, rule.axes = label, gates
        layer = TTTLayer(32, 2, task, LEARNERS[kind](), rule, form=form)
        leaf = x.clone().requires_grad_()
        y = layer(leaf)[0]
        gradients = torch.autograd.grad(y.square().sum(), [leaf, *layer.parameters()])
        with torch.no_grad():
            _, state = layer(x[:, :40])
            last, _ = layer(x[:, 40:], state)
        found.append([y.detach(), last, *gradients])
    largest = max(float(value.norm()) for value in found[2])
    for *values, expected in zip(*found, strict=True):
        for value in values:
            assert (value - expected).norm() <= BOUND * expected.norm() + 1e-6 * largest


@pytest.mark.parametrize(("name", "shape"), [("eta", (2, 40)), ("alpha", (40,)), ("beta", (3, 4, 40)), ("kappa", ())])
def test_a_gate_that_does_not_fit_is_refused(name: str, shape: tuple[int, ...]) -> None:
    rule = Shared(16)
    gates = Gates(torch.ones(3, 2, 40))._replace(**{name: torch.ones(shape)})
    rule.gates = lambda x, state, ctx: (gates, state)  # type: ignore[method-assign]
    made = partial(TTTLayer, 32, 2, Reconstruction(), Linear(), rule)
    refusal(lambda: made()(torch.randn(3, 40, 32)), f"the gate {name} has shape")


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("name", ["k", "v", "q", "eta", "tau", "scale", "w1", "b1"])
def test_a_kernel_checks_what_it_is_given(kind: str, name: str) -> None:
    """Nothing that is too short, of another type or elsewhere reaches a pointer, whoever calls."""
    kernel, x, taken = KERNELS[kind], inputs(kind), lambda _: pytest.fail("the reference was taken")
    good = given_of(x)
    for wrong in (x[name][..., :1], x[name][None], x[name].double(), x[name].to("meta"), x[name].unsqueeze(-1)):
        bad = given_of({**x, name: wrong}, 16)
        refusal(partial(kernel.scan, bad, taken), "was given")
        refusal(partial(kernel.advance, bad, None, 0, False), "was given")
    refusal(lambda: kernel.advance(good, {**good.weights, "w1": good.weights["w1"][:, :1]}, 0, False), "update w1")
    one = good._replace(tokens=good.tokens.map(lambda t: t[:, :, :1]))
    for given, phase in ((good, 0), (one, 16), (one, -1), (one, torch.tensor([0, 16])), (one, torch.tensor([3]))):
        refusal(partial(kernel.advance, given, None, phase, False), "from place")
    refusal(lambda: kernel.scan(good._replace(weights=dict(reversed(good.weights.items()))), taken), "weights")


# -- the compiler ------------------------------------------------------------------------------------------------------


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "_loaded", {})
    monkeypatch.setattr(native_scan, "_libraries", {})
    native._compiler.cache_clear()
    yield tmp_path / "metattt" / "native"
    native._compiler.cache_clear()


@pytest.mark.parametrize("command", ["no-such-compiler", "false", 'g++ "'])
def test_without_a_compiler_another_form_is_taken(
    command: str, empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", command)
    x = inputs("linear", tau="none")
    with caplog.at_level(logging.DEBUG, logger="metattt"):
        for _ in range(2):
            assert "compiler" in str(KERNELS["linear"].reason_rejected(given_of(x)))
        TTTLayer(32, 2, Reconstruction(), Linear(), GradientDescent(16, token_steps="shared"))(torch.randn(1, 32, 32))
    (line,) = [record.message for record in caplog.records if "is not compiled" in record.message]
    assert command in line or "No closing quotation" in line


def test_a_folder_that_cannot_be_written_is_named(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "_warned", set())
    empty_cache.parent.touch()  # a file in the place of a folder
    assert KERNELS["linear"].reason_rejected(given_of(inputs("linear", tau="none"))) is not None
    (line,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert str(empty_cache) in line and "XDG_CACHE_HOME" in line and "compiler" not in line


def test_a_fork_while_another_thread_compiles() -> None:
    with native._lock:
        child = os.fork()
        if not child:
            os._exit(0 if native._lock.acquire(timeout=1) else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_a_second_process_loads_what_the_first_compiled_if_it_is_whole(empty_cache: Path) -> None:
    source = KERNELS["linear"].source
    program = (
        "from pathlib import Path; from metattt.native import library as native\n"
        f"assert native.load(Path({str(source)!r}), {{'WIDTH': 16, 'TOKENS': 16, 'BIAS': 0}})"
    )
    times = []
    for size in (None, None, 5000):  # the last one finds a library that a full disk has cut off
        if size is not None:
            os.truncate(library, size)
        subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | {"CXX": "c++"})
        (library,) = empty_cache.iterdir()  # and nothing else is left
        times.append(library.stat().st_mtime_ns)
    assert times[0] == times[1] < times[2]


def test_a_compiler_that_does_not_know_this_processor(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "PROCESSOR_OPTIONS", (("-march=no-such",), ()))
    check("mlp", inputs("mlp"))
    assert len(list(empty_cache.iterdir())) == 1
