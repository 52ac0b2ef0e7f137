"""`form=fused`: every kernel against the dual form, for every combination of parts that it says it computes, and no
other."""

from __future__ import annotations

import itertools
import logging
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from refusals_for_tests import refusal
from torch import Tensor

from metattt import MetaTTTError, TTTLayer
from metattt.composition.compose import LAYER_PARTS, build, compose
from metattt.composition.instantiate import instantiate_layer
from metattt.inner.loop import InnerLoop
from metattt.kernels.base import Kernel, kernels
from metattt.kernels.cpu.native_scan import NativeForm
from metattt.learners import MLP, Linear
from metattt.optimizers.gradient_descent import GradientDescent
from metattt.registry import PARAMETERS
from metattt.state import Tensors
from metattt.tasks.reconstruction import Reconstruction
from metattt.testing.specimen import Specimen, compare, distance, run, state_distance

BOUND = 1e-4  # in fp32; of kernels that take float64 there, 1e-9
LEARNERS = {
    "linear": lambda: Linear(),
    "linear without bias": lambda: Linear(bias=False),
    "mlp": lambda: MLP(),
    "mlp without bias": lambda: MLP(bias=False, expansion=2),
}
RULES = {
    "plain": lambda: GradientDescent(16, lr="constant"),
    "token steps": lambda: GradientDescent(16, token_steps="shared"),
    "token steps per head": lambda: GradientDescent(32, token_steps="per_head"),
}


def specimen(learner: str, rule: str, **options: Any) -> Specimen:
    return Specimen(
        LEARNERS[learner], lambda: Reconstruction(views="shared_qk", rope="mini_batch"), RULES[rule], 32, 2, options, 32
    )


def only(layer: TTTLayer, *chosen: Kernel) -> TTTLayer:
    """The layer, computed by these kernels or not at all."""
    layer.plan.kernels, layer.plan.strict = list(chosen), True
    return layer


@pytest.mark.parametrize("group_size", [None, 1, 3, 100])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("learner", LEARNERS)
def test_equals_the_dual_form(learner: str, rule: str, group_size: int | None) -> None:
    spec = specimen(learner, rule)
    assert spec.make().form == "fused"
    fused, dual = spec.make(form="fused", group_size=group_size).float(), spec.make(form="dual").float()
    b = fused.optimizer.mini_batch_size
    for length, cuts in ((5 * b, []), (5 * b + 1, []), (7 * b + 2, [1, 3 * b, 4 * b + 1]), (b - 1, []), (2 * b, [b])):
        x = torch.randn(2, length, 32, generator=torch.Generator().manual_seed(length))
        found, expected = run(fused, x, cuts, grads=True), run(dual, x, cuts, grads=True)
        assert compare(found, expected) < BOUND, (length, cuts)
        assert state_distance(dual, found.state, expected.state) < BOUND


@pytest.mark.parametrize("name", ["ttt_linear", "ttt_mlp", "gated_delta_net", "linear_attention"])
def test_views_of_16_bits(name: str) -> None:
    """Under autocast a kernel rounds nothing but the views, and is as near as the dual form to what fp32 computes."""
    x, errors = torch.randn(2, 67, 32, generator=torch.Generator().manual_seed(0)), []
    layers = [build(f"layer={name}", f"layer.form={form}", dim=32, num_heads=2, seed=0) for form in ("fused", "dual")]
    exact = run(layers[1], x, [40], grads=True)
    for layer in layers:
        with torch.autocast("cpu", torch.bfloat16):
            found = run(layer, x, [40, 41], grads=True)
        errors.append([distance(found.y.float(), exact.y), distance(found.grads["x"], exact.grads["x"])])
    assert all(fused < min(1.2 * dual, 0.03) for fused, dual in zip(*errors, strict=True)), errors


@pytest.mark.parametrize("rule", ["plain", "token steps"])
@pytest.mark.parametrize("learner", ["linear", "mlp"])
def test_packed_documents_and_padding(learner: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All mini-batches are the kernel's but the last, to which goes what sequences of any length leave open. The same
    holds for a kernel that knows nothing of documents."""
    spec, by_forms = specimen(learner, rule), list[int]()
    fused, dual = spec.make(form="fused").float(), spec.make(form="dual").float()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 160, 32, generator=generator)
    reset, mask = (torch.rand(3, 160, generator=generator) < share for share in (0.03, 0.9))
    ends = torch.arange(160) < torch.tensor([[160], [75], [16]])
    cases = ({"reset": reset}, {"mask": mask}, {"reset": reset, "mask": mask}, {"mask": ends}, {"reset": reset & ends, "mask": ends})
    one = InnerLoop.mini_batch
    for flags, (cuts, takes) in itertools.product(cases, (([], True), ([], False), ([50, 53, 128], True))):
        expected = run(dual, x, cuts, grads=True, **flags)
        with monkeypatch.context() as patch, torch.device("meta"):  # where torch would make tensors by default
            by_forms.clear()
            patch.setattr(NativeForm, "documents", "inside" if takes else "apart")
            patch.setattr(InnerLoop, "mini_batch", lambda *given: (by_forms.append(1), one(*given))[1])
            found = run(fused, x, cuts, grads=True, **flags)
        assert compare(found, expected) < BOUND and state_distance(dual, found.state, expected.state) < BOUND
        assert cuts or len(by_forms) <= 2, "the last one, that sequences leave open, forward and again backward"


@pytest.mark.parametrize(("name", "bound"), [("ttt_linear", 1e-3), ("ttt_mlp", 1e-3), ("gated_delta_net", 1e-4)])
def test_gradients_of_gradients(name: str, bound: float) -> None:
    """Through the dual form; from a carried state as well, at a length that is no multiple of b."""
    x, found = torch.randn(2, 39, 32), []
    reset = torch.zeros(2, 39, dtype=torch.bool)
    reset[0, 5] = reset[1, 20] = reset[1, 30] = True
    for form in ("fused", "dual"):
        layer, tokens = build(f"layer={name}", f"layer.form={form}", dim=32, num_heads=2, seed=0), x.clone().requires_grad_()
        leaves = [tokens, *(p for p in layer.parameters() if p.requires_grad)]
        y, state = layer(tokens[:, :16], reset=reset[:, :16])
        y = torch.cat([y, layer(tokens[:, 16:], state, reset=reset[:, 16:])[0]], 1)
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        total = torch.stack([g.square().sum() for g in first]).sum()
        found.append([y, *first, *torch.autograd.grad(total, leaves, materialize_grads=True)])
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= bound * other.norm() + 1e-6


@pytest.mark.parametrize("name", ["ttt_linear", "ttt_mlp"])
def test_a_state_that_is_donated_before_the_backward_pass(name: str) -> None:
    """The kernel writes over weights that this needs, where autograd does not see it."""
    layer, x = build(f"layer={name}", dim=32, num_heads=2), torch.randn(1, 20, 32)
    with torch.no_grad():
        state = layer(x)[1]
    loss = layer(x, state)[0].sum()
    with torch.no_grad():
        layer(x, state, donate_state=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@torch.no_grad()
@pytest.mark.parametrize("name", ["ttt_linear", "ttt_mlp"])
def test_a_donated_state_leaves_the_one_that_it_came_from(name: str) -> None:
    """States of one mini-batch hold the same committed weights, and only the donated one may be written over."""
    layer, x = build(f"layer={name}", dim=32, num_heads=2), torch.randn(1, 40, 32)
    kept = layer(x[:, :5])[1]
    expected, branch = layer(x[:, 5:], kept)[0], layer(x[:, 5:6], kept)[1]
    for token in x[:, 6:].split(1, 1):
        branch = layer(token, branch, donate_state=True)[1]
    torch.testing.assert_close(layer(x[:, 5:], kept)[0], expected, rtol=0, atol=0)


# -- what a kernel says it computes ------------------------------------------------------------------------------------


def one_step_away() -> list[Callable[[], Any]]:
    """TTT-Linear and TTT-MLP with every choice of every part changed to each of its other values."""
    numbers = {"steps": [2], "max_norm": [0.5], "depth": [1, 3], "mini_batch_size": [3], "huber_delta": [0.5], "conv_width": [2]}
    numbers["activation"] = ["relu", "gelu", "tanh", "identity"]
    found: list[Callable[[], Any]] = []
    for layer in ("ttt_linear", "ttt_mlp"):
        base = compose(f"layer={layer}", "dim=32", "num_heads=2", job="build")
        for group in LAYER_PARTS:
            known = PARAMETERS[str(base[group]._target_)]
            for key, value in base[group].items():
                others = [*known.get(key, ()), *numbers.get(key, ()), *([not value] if isinstance(value, bool) else [])]
                for other in others:
                    if other != value:
                        changed = base.copy()
                        changed[group][key] = other
                        found.append(partial(instantiate_layer, changed))
    return found


def scan_of(kernel: Kernel, layer: TTTLayer, bound: float) -> bool:
    """Outputs and gradients by this kernel alone against the dual form; False if the kernel refuses the tensors."""
    assert layer.plan.form == "dual"
    shape = 2, 3 * layer.optimizer.mini_batch_size, layer.dim
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(layer.out.weight.dtype)
    try:
        found = run(only(layer, kernel), x, grads=True)
    except MetaTTTError:  # these sizes or types
        return False
    layer.plan.kernels = []
    assert compare(found, run(layer, x, grads=True)) < bound
    return True


def no_compiler() -> set[str]:
    """The kernels in C++ where nothing compiles them."""
    return set() if shutil.which("c++") else {kernel.name for kernel in kernels() if kernel.name.endswith(".native")}


def test_no_kernel_is_taken_for_what_it_does_not_compute() -> None:
    """All registered kernels × neighbours of what they compute: what one covers, it computes; a layer that none covers is not
    fused. (Other combinations of parts, fused where kernels cover them: `test_drawn_compositions`.)"""
    taken, refused = set[str](), 0
    for make in one_step_away():
        torch.manual_seed(0)
        try:
            layer = make()
        except MetaTTTError:  # the parts do not go together
            continue
        if not isinstance(layer, TTTLayer) or not layer.learner.has_weights:
            continue
        covered = layer.plan.kernels
        refused += not covered
        assert (layer.form == "fused") == bool(covered)
        check(layer, covered, taken)
    assert refused > 20 and taken == {
        kernel.name for kernel in kernels() if kernel.device == "cpu" and kernel.anchor == "minibatch"
    } - no_compiler()


def check(layer: TTTLayer, covered: list[Kernel], taken: set[str]) -> None:
    """Every kernel of the CPU that covers the layer gives what the dual form gives, in the widest type that it
    takes."""
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.3 / parameter.shape[-1] ** 0.5)
    for kernel in covered:
        if kernel.device == "cpu" and (scan_of(kernel, layer.double(), 1e-9) or scan_of(kernel, layer.float(), BOUND)):
            taken.add(kernel.name)


def test_a_rule_that_changes_the_commit_is_not_covered() -> None:
    """(A learner that changes the function: `docs/tutorials/kernel.md`, which `test_documents` runs.)"""

    class Twice(GradientDescent):
        def commit(self, memory: dict[str, Tensors], filled: int | Tensor) -> dict[str, Tensors]:
            return super().commit(super().commit(memory, filled), 0)

    assert TTTLayer(8, 2, Reconstruction(), Linear(), Twice(4)).form == "dual"


# -- what a user sees --------------------------------------------------------------------------------------------------


def test_fused_or_an_error() -> None:
    given = "layer=ttt_linear", "dim=8", "num_heads=2", "optimizer.read=exclusive", "layer.form=fused"
    refusal(lambda: build(*given), "has no kernel for this combination ", "read=exclusive", "layer.form=auto")
    refusal(lambda: build("layer=nested_transformer", "dim=8", "num_heads=2", "layer.form=fused"), "mixes tokens")
    layer = build("layer=ttt_linear", "dim=8", "num_heads=2", "layer.form=fused").double()
    refusal(lambda: layer(torch.randn(1, 32, 8).double()), match=r"float64.*layer.form=auto")


def test_auto_says_why_it_is_not_fused(caplog: pytest.LogCaptureFixture) -> None:
    layer, x = build("layer=ttt_linear", "dim=32", "num_heads=2").double(), torch.randn(1, 32, 32)
    caplog.set_level(logging.DEBUG, "metattt")
    for _ in range(2):
        layer(x.double())
    (said,) = [one.getMessage() for one in caplog.records if "form=dual" in one.getMessage()]  # once, not in every call
    assert "float64" in said
    layer.float()(x)
    assert "form=fused on cpu: ttt_linear.native" in caplog.text
