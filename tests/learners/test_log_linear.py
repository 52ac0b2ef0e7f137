"""Log-linear attention: more buckets than short sequences have, long decays, and documents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import Call, outputs
from torch import Tensor

from metattt.learners import LogLinear, RecurrentRidge
from metattt.optimizers import Append
from metattt.state import Context, DataGates, Tensors
from metattt.tasks import Reconstruction, Views
from metattt.testing.specimen import Specimen


@pytest.mark.parametrize("levels", [9, 4])
@pytest.mark.parametrize("update", ["sum", "delta"])
def test_many_buckets_whatever_the_chunks_calls_and_documents(update: Any, levels: int) -> None:
    """Calls that end inside chunks of eight tokens; documents that start at several places; padding."""
    rule = lambda: Append(write="per_head", decay="per_head", levels=levels)  # noqa: E731
    layer = Specimen(lambda: LogLinear(update, 8), lambda: Reconstruction(normalize_qk=True), rule).make()
    reset = torch.zeros(2, 43, dtype=torch.bool)
    reset[1, 5] = reset[1, 39] = True
    mask = torch.ones(2, 43, dtype=torch.bool)
    mask[1, 9:12] = False
    x = torch.randn(2, 43, 8, dtype=torch.float64)
    calls = [Call(x[:, part], mask[:, part], reset[:, part]) for part in (slice(0, 13), slice(13, 14), slice(14, 43))]
    state = None
    with torch.no_grad():
        for call, expected in zip(calls, outputs(layer, calls), strict=True):
            y, state = layer(call.x, state, mask=call.mask, reset=call.reset)
            torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("update", ["sum", "delta"])
@pytest.mark.parametrize("low", [1e-4, 0.999])
def test_decays_over_thousands_of_tokens_are_exact_in_single_precision(update: Any, low: float) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.rand(1, 2, 4096, *shape, generator=generator, dtype=torch.float64)

    k, v, q = (random(4) - 0.5 for _ in range(3))
    keep = low ** random() if low < 0.5 else low + (1 - low) * random()  # from `low` to 1
    given = [x.float() for x in (k / k.norm(dim=-1, keepdim=True), v, q, random(), keep, random(14) + 0.1)]
    found = []
    for learner, (k, v, q, *gates) in ((LogLinear(update), given), (LogLinear(update, 1), [x.double() for x in given])):
        ctx = Context(torch.arange(4096).unsqueeze(0), None, None, 1)
        found.append(learner.scan(Views(k, v, q), {}, ctx, DataGates(*gates))[0])
    worst = ((found[0] - found[1]).norm(dim=-1) / found[1].norm(dim=-1).clamp(min=1e-2)).max().item()
    assert worst < 2e-5, worst


class OneGate(Append):
    """Gates of axes of length 1, which stand for all."""

    wide = False

    def gates(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[DataGates, Tensors]:
        gates, state = super().gates(x, state, ctx)
        keep = x.new_full((1, 1, 1), 0.9)
        return gates._replace(keep=keep.expand(len(x), 1, x.shape[1]) if self.wide else keep), state


@pytest.mark.parametrize("learner", [LogLinear, RecurrentRidge])
def test_one_gate_stands_for_all_tokens(learner: Any) -> None:
    x, layer = torch.randn(2, 9, 8, dtype=torch.float64), Specimen(learner, Reconstruction, OneGate).make()
    y = layer(x)[0]
    layer.optimizer.wide = True
    torch.testing.assert_close(y, layer(x)[0], rtol=0, atol=0)
