"""The Triton operations in a layer: on a card, or on the CPU under Triton's interpreter."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from operation_cases import DEVICE
from refusals_for_tests import refusal

from metattt.kernels.triton.on_gpu import OnGPU
from metattt.kernels.ttt_linear.on_gpu import TTTLinearOnGPU
from metattt.kernels.ttt_mlp.on_gpu import TTTMLPOnGPU
from metattt.layer import TTTLayer
from metattt.learners import MLP, Linear
from metattt.optimizers.gradient_descent import GradientDescent
from metattt.tasks.reconstruction import Reconstruction
from metattt.testing.specimen import Specimen, compare, cotangent, distance, run, state_distance

pytestmark = pytest.mark.usefixtures("quick_interpreter")

KERNELS = {"linear": (TTTLinearOnGPU, Linear), "mlp": (TTTMLPOnGPU, MLP)}


def through(layer: TTTLayer, kind: type[OnGPU]) -> TTTLayer:
    """The layer on the device, computed by the kernel there or not at all."""
    kernel = kind()
    kernel.device, layer.plan.kernels, layer.plan.strict = DEVICE, [kernel], True
    return layer.to(DEVICE)


@pytest.mark.parametrize(("bias", "steps"), [(True, "shared"), (False, "none"), (True, "per_head")])
@pytest.mark.parametrize("name", KERNELS)
def test_a_layer_through_the_triton_operation(name: str, bias: bool, steps: Any) -> None:
    kernel, learner = KERNELS[name]
    task, rule = lambda: Reconstruction(rope="mini_batch"), lambda: GradientDescent(8, token_steps=steps)
    spec = Specimen(lambda: learner(bias=bias), task, rule, 64, longest_mini_batch=8)
    layer = through(spec.make(dtype=torch.float32), kernel)
    dual = spec.make(dtype=torch.float32, form="dual").to(DEVICE)
    x = torch.randn(2, 27, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for cuts in ([], [5]):
        found, expected = run(layer, x, cuts, grads=True), run(dual, x, cuts, grads=True)
        assert compare(found, expected) < 1e-3
        assert state_distance(dual, found.state, expected.state) < 1e-3
    reset = torch.zeros(2, 27, dtype=torch.bool, device=DEVICE)
    reset[0, 11] = reset[1, 3] = reset[1, 20] = True
    found, expected = (run(one, x, [6], reset=reset, grads=True) for one in (layer, dual))
    assert compare(found, expected) < 1e-3 and state_distance(dual, found.state, expected.state) < 1e-3


@pytest.mark.parametrize("name", KERNELS)
def test_second_derivatives(name: str) -> None:
    """By the dual form, where the first ones are asked for as a graph."""
    kernel, learner = KERNELS[name]
    spec = Specimen(learner, lambda: Reconstruction(), lambda: GradientDescent(8, token_steps="shared"), 32, 1, longest_mini_batch=8)
    found: list[torch.Tensor] = []
    reset = torch.arange(16, device=DEVICE)[None] == 5
    for layer in (through(spec.make(dtype=torch.float32), kernel), spec.make(dtype=torch.float32, form="dual")):
        x = torch.randn(1, 16, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE).requires_grad_()
        (first,) = torch.autograd.grad(layer.to(DEVICE)(x, reset=reset)[0].square().sum(), x, create_graph=True)
        found += torch.autograd.grad(first.square().sum(), x)
    assert distance(*found) < 1e-3


@pytest.mark.parametrize("name", KERNELS)
def test_compiled_in_one_graph(name: str) -> None:
    """`torch.compile` sees the operation as one node, with its derivative."""
    kernel, learner = KERNELS[name]
    layer = through(TTTLayer(32, 1, Reconstruction(), learner(), GradientDescent(8, token_steps="shared")), kernel)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for length in (19, 23):  # the second time compile leaves the length open
        x = torch.randn(1, length, 32, device=DEVICE)
        expected = run(layer, x, grads=True)
        tokens = x.clone().requires_grad_()
        y, _ = compiled(tokens)
        torch.testing.assert_close(y, expected.y)
        found = torch.autograd.grad((y * cotangent(y)).sum(), tokens)[0]
        torch.testing.assert_close(found, expected.grads["x"])


@pytest.mark.parametrize("name", KERNELS)
def test_float64_and_what_does_not_fit_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """(Gates, widths and sizes: `test_advance`.)"""
    kernel, learner = KERNELS[name]
    for dtype, told in ((torch.float64, "float64"), (torch.float32, "232,449 bytes of shared memory for head width 32, ")):
        layer = through(TTTLayer(64, 2, Reconstruction(), learner(), GradientDescent(8)).to(dtype), kernel)
        refusal(partial(layer, torch.randn(1, 8, 64, dtype=dtype, device=DEVICE)), told)
        monkeypatch.setattr(kernel, "shared_bytes", lambda self, width, size, dtype: 232_449)
