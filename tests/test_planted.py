"""What the planted faults of `planted_faults.py` went through: each test finds one that no other test found."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from models_for_tests import small_model
from torch import Tensor

from metattt import TTTLayer
from metattt.generation.sampling import generate
from metattt.inner.recompute import recompute
from metattt.learners import MLP, Convolution
from metattt.learners.fast_weights import FastWeights
from metattt.models import LanguageModel
from metattt.modules import affine
from metattt.nested import tensors_of
from metattt.optimizers import GradientDescent
from metattt.tasks import Reconstruction
from metattt.testing.specimen import randomize


def model(*overrides: str) -> LanguageModel:
    small = ("dim=32", "num_heads=2", "model.ffn_dim=16", "model.vocab_size=31")
    return small_model(*small, *overrides, dtype=torch.float32)


def test_layers_of_other_mini_batches_have_layouts_of_their_own() -> None:
    """`layout_shared_by_other_mini_batches`"""
    made = model(
        "model.num_layers=2", "model.blocks=[ttt_linear,ttt_mlp]", "model.blocks.ttt_linear.optimizer.mini_batch_size=4",
        "model.blocks.ttt_mlp.optimizer.mini_batch_size=6",
    ).double()  # fmt: skip
    ids = torch.randint(31, (2, 23))
    reset = torch.zeros(2, 23, dtype=torch.bool)
    reset[0, 9] = reset[1, 14] = True
    found = made(ids, reset=reset)
    for row, start in enumerate((9, 14)):
        one = ids[row : row + 1]
        alone = torch.cat([made(one[:, :start]), made(one[:, start:])], 1)
        torch.testing.assert_close(found[row : row + 1], alone, rtol=1e-9, atol=1e-9)


def test_a_setting_of_a_learner_that_is_assigned_later_changes_the_layer() -> None:
    """`plan_not_made_anew`"""
    layer, x = TTTLayer(32, 2, Reconstruction(), MLP(), GradientDescent(16)), torch.randn(2, 48, 32)
    randomize(layer)
    assert layer.form == "fused"
    layer(x)
    layer.learner.activation = "relu"
    assert layer.form == "dual"
    other = TTTLayer(32, 2, Reconstruction(), MLP(activation="relu"), GradientDescent(16))
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x)[0], other(x)[0])


def test_what_is_computed_again_draws_the_same_numbers() -> None:
    """`recomputation_draws_anew`"""
    x = torch.ones(64, requires_grad=True)
    (y,) = recompute(lambda x: [x * torch.rand_like(x)], x)
    torch.rand(3)  # what is drawn between the passes does not count
    y.sum().backward()
    assert torch.equal(x.grad, y)  # type: ignore[arg-type]


def test_a_convolution_of_an_even_width_is_padded_as_torch_pads() -> None:
    """`convolution_padded_on_the_other_side`"""
    layer = TTTLayer(16, 2, Reconstruction(), Convolution(width=4, residual=False, norm=False), GradientDescent(4))
    x, weights = torch.randn(1, 2, 3, 8), {name: torch.randn(1, *w.shape) for name, w in layer.learner.init.items()}

    def conv(x: Tensor, head: int, number: int) -> Tensor:
        weight, bias = (weights[f"{kind}{number}"][0, head] for kind in "wb")
        return F.conv1d(x, weight.permute(2, 1, 0), bias, padding="same")

    found = layer.learner.forward(FastWeights(weights, {}, torch.float32), x)
    for head in range(2):
        hidden = F.gelu(conv(x[0, head].unsqueeze(1), head, 1), approximate="tanh")
        torch.testing.assert_close(found[0, head], conv(hidden, head, 2).squeeze(1))


def test_gates_of_tokens_in_sixteen_bits_are_computed_in_thirty_two() -> None:
    """`gates_in_sixteen_bits`"""
    x, weight, bias = torch.randn(2, 5, 64).bfloat16(), torch.randn(3, 64), torch.randn(3)
    with torch.autocast("cpu", torch.bfloat16):
        found = affine(x, weight, bias)
    torch.testing.assert_close(found, F.linear(x.float(), weight, bias))


def test_generation_leaves_the_state_that_it_goes_on_from() -> None:
    """`generation_writes_over_the_state`"""
    made = model("layer=ttt_linear", "model.num_layers=1")
    with torch.no_grad():
        _, state = made.step(torch.randint(31, (1, 21)))
    before = state.map(torch.clone)
    list(generate(made, torch.tensor([[3]]), 20, state=state))  # past the end of the open mini-batch
    assert all(torch.equal(one, other) for one, other in zip(tensors_of(state), tensors_of(before), strict=True))
