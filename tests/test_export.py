"""`torch.export`: the program computes what the layer computes, or the reason is one line. (That it can be trained:
`kernels/test_cpu_operators`.)"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import metattt
from metattt import MetaTTTError, TTTLayer
from metattt.catalog.known_layers import known_layers
from metattt.learners import ModuleLearner
from metattt.models import LanguageModel
from metattt.optimizers import GradientDescent
from metattt.tasks import Reconstruction


class Shifted(nn.Linear):
    """With a buffer, which belongs to no part's parameters."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("shift", torch.linspace(0, 1, 8))

    shift: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh() + self.shift


def build(name: str) -> TTTLayer:
    small = {name: ["optimizer.mini_batch_size=8"] for name in ("lact", "lact_block", "titans")}
    small["window_attention"] = ["learner.window=4"]
    return metattt.build(f"layer={name}", "dim=16", "num_heads=2", *small.get(name, []), seed=0)


LAYERS: dict[str, Callable[[], TTTLayer]] = {
    **{name: partial(build, name) for name in known_layers()},
    "module": lambda: TTTLayer(16, 2, Reconstruction(), ModuleLearner(Shifted()), GradientDescent(4)),
}


def check(program: Any, expected: Any, *given: Tensor, rtol: float = 1e-4, atol: float = 1e-6) -> None:
    torch.manual_seed(0)
    torch.testing.assert_close(tree_leaves(program(*given)), tree_leaves(expected), rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", LAYERS)
def test_an_exported_layer(name: str) -> None:
    """In float64: the program may add in another order, and Newton-Schulz steps (LaCT, Atlas) enlarge what that
    changes in float32 to 4e-4."""
    layer, x = LAYERS[name]().double(), torch.randn(2, 9, 16, dtype=torch.float64)
    program = torch.export.export(layer, (x,)).module()
    for tokens in (x, torch.randn_like(x)):
        torch.manual_seed(0)
        check(program, layer(tokens), tokens, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("strict", [False, True])
def test_open_sizes_where_there_is_no_loop(strict: bool) -> None:
    layer, x = build("attention"), torch.randn(2, 9, 16)
    sizes = {"x": {0: torch.export.Dim("B", max=64), 1: torch.export.Dim("T", min=2, max=4096)}}
    program = torch.export.export(layer, (x,), dynamic_shapes=sizes, strict=strict).module()
    longer = torch.randn(3, 13, 16)
    check(program, layer(longer), longer)


def test_an_exported_program_is_saved_with_its_states() -> None:
    """And takes other masks than the one that it was exported with."""
    model, masks = LanguageModel(50, 16, 1, partial(build, "ttt_linear")), torch.rand(2, 2, 19) > 0.3
    for module, x in ((build("titans_mag"), torch.randn(2, 19, 16)), (model, torch.randint(50, (2, 19)))):
        file, expected = io.BytesIO(), module(x, mask=masks[1])
        torch.export.save(torch.export.export(module, (x,), {"mask": masks[0]}), file)
        file.seek(0)
        program = partial(torch.export.load(file).module(), mask=masks[1])
        assert type(program(x)[1]) is type(expected[1])
        check(program, expected, x)


def test_torch_jit_is_refused() -> None:
    """The results of a kernel would be constants of its program."""
    with pytest.raises(MetaTTTError, match=r"use torch\.export"):
        torch.jit.trace(build("gated_delta_net"), (torch.randn(2, 9, 16),), check_trace=False)


@pytest.mark.parametrize(("name", "axis"), [("ttt_linear", 0), ("ttt_linear", 1), ("linear_attention", 1)])
def test_open_sizes_of_a_loop_are_refused(name: str, axis: int) -> None:
    sizes = {"x": {axis: torch.export.Dim("N", min=2, max=64)}}
    with pytest.raises(MetaTTTError, match=r"leave (both|it) out of dynamic_shapes"):
        torch.export.export(build(name), (torch.randn(3, 9, 16),), dynamic_shapes=sizes)


@pytest.mark.parametrize("name", ["ttt_mlp", "nested_ttt"])
def test_strict_export_is_refused_where_it_cannot_follow(name: str) -> None:
    with pytest.raises(Exception, match=r"torch.export\(strict=True\) cannot trace the gradients inside a layer"):
        torch.export.export(build(name), (torch.randn(2, 9, 16),), strict=True)
