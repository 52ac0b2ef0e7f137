"""A whole call as one mini-batch: what it refuses to carry on, and steps on random parts of it. (What MTTT's layers
compute: `test_layer_table`.)"""

from __future__ import annotations

import pytest
import torch

from metattt import build
from metattt.errors import MetaTTTError
from metattt.measures.inner_steps import inner_losses
from metattt.testing.specimen import compare, run

SIZES = ("dim=32", "num_heads=4")
SGD = ("layer=mttt_mlp", "optimizer.steps=4", "optimizer.sampling=sgd", *SIZES)


def test_attention_to_all_tokens_is_not_carried_on() -> None:
    layer, x = build("layer=self_attention", *SIZES), torch.randn(2, 12, 32)
    for given in ({"state": layer(x)[1]}, {"reset": torch.eye(2, 12).bool()}):
        with pytest.raises(MetaTTTError, match="takes no state and no reset="):
            layer(x, **given)


def test_sgd_is_repeatable_with_a_seed_and_the_same_in_chunks() -> None:
    x, found = torch.randn(2, 40, 32, dtype=torch.float64), []
    for chunk in (3, 10, 2048):
        layer = build(*SGD, "seed=0", "optimizer.seed=3", f"optimizer.compute_chunk={chunk}").double()
        found.append(run(layer, x, grads=True))
        losses = inner_losses(layer, x)
        assert losses.shape == (5, 4) and torch.equal(losses, inner_losses(layer, x))
    assert max(compare(other, found[0]) for other in found[1:]) < 1e-9
    free = build(*SGD).double()
    assert not torch.equal(free(x)[0], free(x)[0])


def test_sgd_takes_parts_of_equal_size() -> None:
    layer = build(*SGD)
    with pytest.raises(MetaTTTError, match=r"10 tokens do not divide into optimizer\.steps=4 parts"):
        layer(torch.randn(2, 10, 32))
    with pytest.raises(MetaTTTError, match="padding makes them unequal"):
        layer(torch.randn(2, 12, 32), mask=torch.arange(12).expand(2, -1) < torch.tensor([[12], [8]]))
