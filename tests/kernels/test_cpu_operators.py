"""The operators of the CPU's kernels: shapes and derivatives as torch checks them, one node in what is compiled, and
none in what is exported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from mini_batches import WEIGHTS, inputs
from refusals_for_tests import refusal
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.fx import GraphModule

import metattt
from metattt.kernels.base import kernels
from metattt.layer import TTTLayer

OPERATIONS = ["ttt_linear", "ttt_mlp"]


def arguments(name: str, tau: str = "none", bias: bool = True) -> list[Any]:
    """Two sequences of two heads, two mini-batches of 16 tokens, in the order of the operator."""
    kernels()  # registers the operators
    given = inputs(name.removeprefix("ttt_"), bias=bias, tau=tau, hidden=32, n=32)
    leaves = {key: x.detach().requires_grad_() for key, x in given.items()}
    tensors = [leaves.get(key) for key in ("k", "v", "q", "eta", "tau", "scale", "shift")]
    return [*tensors, [leaves[key] for key in WEIGHTS if key in leaves], 16, 1, True, True, None, "cpu"]


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize(("tau", "bias"), [("none", True), ("per_head", False)])
def test_shapes_and_derivatives(name: str, tau: str, bias: bool) -> None:
    given = arguments(name, tau, bias)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(getattr(torch.ops.metattt, name).default, given, test_utils=tests)


def small(name: str) -> TTTLayer:
    return metattt.build(f"layer={name}", "dim=32", "num_heads=2", seed=0)


def results(call: Any, layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    y = call(x)[0]
    names, parameters = zip(*layer.named_parameters(), strict=True)
    return {"y": y.detach(), **dict(zip(names, torch.autograd.grad(y.square().sum(), parameters), strict=True))}


def nodes(graph: GraphModule) -> list[str]:
    found = [node for part in graph.modules() if isinstance(part, GraphModule) for node in part.graph.nodes]
    return [str(node.target) for node in found if str(node.target).startswith("metattt")]


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_compiled_layer_has_one_node_of_the_operator_for_all_whole_mini_batches(name: str) -> None:
    graphs: list[list[str]] = []

    def keep(graph: GraphModule, _: Any) -> Any:
        graphs.append(nodes(graph))
        return make_boxed_func(graph.forward)

    layer = small(name)
    compiled = torch.compile(layer, fullgraph=True, backend=aot_autograd(fw_compiler=keep))
    for length in (64, 96, 128, 37):  # the second time compile leaves the length open; the last one has a rest
        x = torch.randn(2, length, 32)
        torch.testing.assert_close(results(compiled, layer, x), results(layer, layer, x), rtol=1e-4, atol=1e-5)
    assert graphs == [[f"metattt.{name}.default"], [f"metattt.{name}_backward.default"]] * 3


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_one_compilation_for_all_lengths_and_batches(name: str) -> None:
    """With Inductor, whose own convolutions and strides would make a graph for each."""
    counters.clear()
    layer = small(name)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for batch, length in ((2, 80), (2, 128), (3, 512), (2, 160)):
        x = torch.randn(batch, length, 32)
        found, expected = results(compiled, layer, x), results(layer, layer, x)
        for key, value in expected.items():  # a gradient sums over tokens: where it cancels, it is as wrong as its terms
            size = 1.0 if key == "y" else value.abs().max()
            torch.testing.assert_close(found[key] / size, value / size, rtol=1e-3, atol=1e-4)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(("name", "trained"), [("ttt_linear", True), ("ttt_mlp", False), ("nested_transformer", True)])
def test_an_exported_layer_has_none_and_can_be_trained(name: str, trained: bool) -> None:
    layer, x = small(name), torch.randn(2, 37, 32)
    with torch.set_grad_enabled(trained):
        program = torch.export.export(layer, (x,)).module()
    assert nodes(program) == []
    found, expected = results(program, program, x), results(layer, layer, x)
    torch.testing.assert_close(found.pop("y"), expected.pop("y"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_fused_form_is_not_exported() -> None:
    layer = metattt.build("layer=ttt_linear", "dim=32", "num_heads=2", "layer.form=fused", seed=0)
    x = torch.randn(2, 32, 32)
    refusal(lambda: torch.export.export(layer, (x,)), match=r"not under torch\.export.*set layer\.form=auto")
