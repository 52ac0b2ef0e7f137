"""Inner steps on parts of all tokens, drawn by chance. (What MTTT computes: `test_layer_table`, `test_drawn_compositions`.)"""

import torch

from metattt import build
from metattt.measures.inner_steps import inner_losses
from metattt.testing.specimen import cotangent, distance, gradients

SGD = ("layer=mttt_mlp", "optimizer.steps=4", "optimizer.sampling=sgd", "dim=32", "num_heads=4")


def test_sgd_is_repeatable_with_a_seed() -> None:
    x = torch.randn(2, 12, 32)
    seeded, free = build(*SGD, "optimizer.seed=3"), build(*SGD)
    assert torch.equal(seeded(x)[0], seeded(x)[0])
    assert not torch.equal(free(x)[0], free(x)[0])
    losses = inner_losses(seeded, x)
    assert losses.shape == (5, 4) and torch.equal(losses, inner_losses(seeded, x))


def test_sgd_in_chunks_equals_sgd_at_once() -> None:
    x, found = torch.randn(2, 40, 32, dtype=torch.float64, requires_grad=True), []
    for chunk in (3, 10, 2048):
        layer = build(*SGD, "seed=0", "optimizer.seed=0", f"optimizer.compute_chunk={chunk}").double()
        y, _ = layer(x)
        found.append([y.detach(), *gradients(layer, x, (y * cotangent(y)).sum()).values()])
    for other in found[1:]:
        assert max(distance(a, b) for a, b in zip(other, found[0], strict=True)) < 1e-9
