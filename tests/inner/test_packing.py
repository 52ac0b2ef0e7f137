"""Masks and documents: planned once for all layers. (That no block waits for the device: `test_device_syncs`.)"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import metattt
from metattt import MetaTTTError, TTTLayer
from metattt.composition.compose import compose
from metattt.composition.instantiate import instantiate_model
from metattt.inner import packing
from metattt.learners import Linear, kernel_estimator
from metattt.optimizers import BlockRule, GradientDescent
from metattt.tasks import Reconstruction


def layer() -> TTTLayer:
    torch.manual_seed(0)
    task, rule = Reconstruction("shared_qk", rope="mini_batch"), GradientDescent(4, token_steps="shared")
    return TTTLayer(16, 2, task, Linear(), rule, form="dual")


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[int]:
    """Has a 1 for every call of a function from now on."""
    calls, function = [], getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given: calls.append(1) or function(*given))
    return calls


def test_a_model_plans_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = compose("preset=tiny", "layer=ttt_linear", "dim=16", "num_heads=2", "model.num_layers=3", job="language_model")
    model, planned = instantiate_model(cfg), counted(monkeypatch, packing, "make_layout")
    with torch.no_grad():
        model.step(torch.randint(256, (2, 40)), None, torch.rand(2, 40) > 0.2, torch.rand(2, 40) > 0.9)
    assert len(planned) == 1


def test_token_steps_and_commits_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, x = layer(), torch.randn(2, 128, 16)
    steps, commits = counted(monkeypatch, GradientDescent, "token_steps"), counted(monkeypatch, BlockRule, "commit")
    titans = metattt.build("titans", "optimizer.mini_batch_size=4", dim=16, num_heads=2)
    with torch.no_grad():
        made(x)
        state = titans(x[:, :8], mask=torch.arange(8) < torch.tensor([[5], [6]]))[1]  # at places 1 and 2
        commits.clear()
        for token in x[:, :5].split(1, 1):  # one sequence ends a mini-batch with the second of them, one with the third
            state = titans(token, state)[1]
    assert len(steps) <= 2 == len(commits)


def test_a_reset_on_padding_is_never_dropped() -> None:
    """It belongs to the next token of the call; where none follows, the next call would not know of it."""
    made, x = layer().double(), torch.randn(2, 9, 16, dtype=torch.float64)
    mask = torch.tensor([[True, True, True, False, False, True, True, True, True]] * 2)
    reset = torch.zeros_like(mask)
    reset[1, 3] = True
    with torch.no_grad():
        whole, _ = made(x, mask=mask, reset=reset)
        with pytest.raises(MetaTTTError, match="reset marks padding of sequence 1 that no token of this call follows"):
            made(x[:, :5], mask=mask[:, :5], reset=reset[:, :5])
        _, state = made(x[:, :4], mask=mask[:, :4])
        reset[1, 3:5] = torch.tensor([False, True])
        parts, _ = made(x[:, 4:], state, mask=mask[:, 4:], reset=reset[:, 4:])
    assert torch.allclose(parts, whole[:, 4:], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["delta_net", "ttt_linear", "titans", "mamba"])
def test_flags_are_read_once(name: str) -> None:
    """A loader fills its buffers again before the backward pass, as with several forward passes to one loss."""
    made, x = metattt.build(name, dim=32, num_heads=2, seed=0), torch.randn(2, 40, 32)
    found = []
    for refilled in (False, True):
        reset, mask = (torch.arange(40) == 16).repeat(2, 1), (torch.arange(40) < 36).repeat(2, 1)
        y = made(x, mask=mask, reset=reset)[0].square().sum()
        if refilled:
            reset.logical_not_(), mask.logical_not_()
        leaves = [x for x in made.parameters() if x.requires_grad]
        found.append(torch.autograd.grad(y, leaves, materialize_grads=True))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("settings", [["learner.learn_init=true"], ["learner.kernel=nearest"], ["task.kv_heads=1"]])
def test_attention_to_packed_documents_is_computed_in_pieces(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    layer = metattt.build("attention", *settings, dim=16, num_heads=2).double()
    x = torch.randn(2, 40, 16, dtype=torch.float64, requires_grad=True)
    reset, mask = torch.rand(2, 40) < 0.1, torch.rand(2, 40) < 0.9
    estimator = kernel_estimator.KernelEstimator
    results, visible, counts = [], estimator.visible, []
    monkeypatch.setattr(estimator, "visible", lambda *given: counts.append(given[2]) or visible(*given))
    for piece in (40, 7):
        monkeypatch.setattr(kernel_estimator, "PIECE", piece)
        y, state = layer(x, reset=reset & mask, mask=mask)
        y = torch.cat([y, layer(x[:, :3], state)[0]], dim=1)
        results.append((y, torch.autograd.grad(y.square().sum(), x)[0]))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)
    assert counts == [40, 3, *[7] * 5, 40 % 7, 3]
