"""Layers in layers in layers. (Of two levels: `test_layer_table`, `test_drawn_compositions`.)"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from metattt import TTTLayer, build
from metattt.learners import Learner, Linear, NestedTTT
from metattt.optimizers import GradientDescent
from metattt.tasks import Reconstruction
from metattt.testing.specimen import cotangent, gradient_distance, gradients, randomize


def layer_in(learner: Learner, rule: GradientDescent) -> Callable[..., TTTLayer]:
    return partial(TTTLayer, num_heads=1, task=Reconstruction(), learner=learner, optimizer=rule)


def test_three_levels_of_learning() -> None:
    """Splits, causality and all gradients of a layer in a layer in a layer; all sequences at once or one after the
    other."""

    def layer(group_size: int | None) -> TTTLayer:
        torch.manual_seed(0)
        middle = layer_in(NestedTTT(layer_in(Linear(), GradientDescent(2))), GradientDescent(3, read="previous"))
        rule = GradientDescent(4, read="previous")
        made = TTTLayer(4, 1, Reconstruction(), NestedTTT(middle), rule, group_size=group_size).double()
        randomize(made)
        return made

    x = torch.randn(2, 9, 4, dtype=torch.float64, requires_grad=True)
    results = []
    for made in (layer(None), layer(0)):
        y = made(x)[0]
        found = gradients(made, x, (y * cotangent(y)).sum())
        assert all(found[name].any() for name in found if name.endswith(("w1", "out/weight")))
        results.append(found)
        first, state = made(x[:, :6])
        assert torch.allclose(torch.cat([first, made(x[:, 6:], state)[0]], dim=1), y, rtol=1e-9, atol=1e-12)
        (leak,) = torch.autograd.grad(made(x)[0][:, 5].sum(), x)
        assert leak[:, :6].any() and not leak[:, 6:].any()
    assert gradient_distance(results[1], results[0]) < 1e-9


def test_a_module_and_deeper_nesting_from_the_command_line() -> None:
    linear = ("learner=module", "learner.module._target_=torch.nn.Linear", "learner.module._args_=[4,4]")
    assert build(*linear, "dim=8", "num_heads=2").form == "dual"
    deeper = ("learner@learner.layer.learner=nested_ttt", "learner.layer.optimizer.read=previous")
    assert build("layer=nested_ttt", *deeper, "dim=8", "num_heads=2").form == "summed"


def test_keys_of_unit_length_inside_and_padding() -> None:
    """Padding is zeros for the layer inside, and a key of length 0 has second derivatives."""
    inside = partial(layer_in(Linear(), GradientDescent(2)), task=Reconstruction(normalize_qk=True))
    layer = TTTLayer(4, 1, Reconstruction(), NestedTTT(inside), GradientDescent(3, read="previous")).double()
    randomize(layer)
    x = torch.randn(1, 7, 4, dtype=torch.float64, requires_grad=True)
    y, padded = layer(x[:, :5])[0], layer(x, mask=torch.arange(7)[None] < 5)[0][:, :5]
    expected, found = (gradients(layer, x, (one * cotangent(one)).sum()) for one in (y, padded))
    assert gradient_distance(found, expected) < 1e-9
