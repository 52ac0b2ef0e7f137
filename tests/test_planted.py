"""What the planted faults of `planted_faults.py` went through: each test finds one that no other test found."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from models_for_tests import small_model

from metattt.generation.sampling import generate
from metattt.inner.recompute import recompute
from metattt.modules import affine
from metattt.nested import tensors_of


def test_what_is_computed_again_draws_the_same_numbers() -> None:
    """`recomputation_draws_anew`"""
    x = torch.ones(64, requires_grad=True)
    (y,) = recompute(lambda x: [x * torch.rand_like(x)], x)
    torch.rand(3)  # what is drawn between the passes does not count
    y.sum().backward()
    assert torch.equal(x.grad, y)  # type: ignore[arg-type]


def test_gates_of_tokens_in_sixteen_bits_are_computed_in_thirty_two() -> None:
    """`gates_in_sixteen_bits`"""
    x, weight, bias = torch.randn(2, 5, 64).bfloat16(), torch.randn(3, 64), torch.randn(3)
    with torch.autocast("cpu", torch.bfloat16):
        found = affine(x, weight, bias)
    torch.testing.assert_close(found, F.linear(x.float(), weight, bias))


def test_generation_leaves_the_state_that_it_goes_on_from() -> None:
    """`generation_writes_over_the_state`"""
    small = ("dim=32", "num_heads=2", "model.ffn_dim=16", "model.vocab_size=31", "model.num_layers=1")
    made = small_model("layer=ttt_linear", *small, dtype=torch.float32)
    with torch.no_grad():
        _, state = made.step(torch.randint(31, (1, 21)))
    before = state.map(torch.clone)
    list(generate(made, torch.tensor([[3]]), 20, state=state))  # past the end of the open mini-batch
    assert all(torch.equal(one, other) for one, other in zip(tensors_of(state), tensors_of(before), strict=True))
