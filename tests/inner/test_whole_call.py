"""`optimizer.mini_batch_size=null`: all tokens of a call, or of a document in it, are one mini-batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import metattt
from metattt.testing.specimen import randomize

CASES = {
    "linear": ("ttt_linear", "optimizer.token_steps=none"),
    "mlp": ("ttt_mlp", "optimizer.token_steps=none"),
    "steps": ("ttt_linear", "optimizer.token_steps=none", "optimizer.read=previous", "optimizer.steps=3"),
    "memory": ("lact",),
    "both": ("lact", "optimizer.read=block"),
    "set": ("lact", "optimizer.read=final"),
    "mixing": ("nested_transformer",),
    "mixing, both": ("nested_transformer", "optimizer.read=block"),
}
T = 12


def make(case: str, size: str = "null") -> Any:
    name, *words = CASES[case]
    layer = metattt.build(f"layer={name}", "dim=16", "num_heads=2", f"optimizer.mini_batch_size={size}", *words)
    torch.manual_seed(0)
    randomize(layer.double())
    return layer


def tokens() -> Tensor:
    return torch.randn(3, T, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("case", CASES)
def test_as_mini_batches_of_the_calls_length(case: str) -> None:
    layer, known, x = make(case), make(case, str(T)), tokens().requires_grad_()
    known.load_state_dict(layer.state_dict())
    state, other = None, None
    for _ in range(2):
        y, state = layer(x, state)
        z, other = known(x, other)
        torch.testing.assert_close(y, z)
        assert state.phase == 0
    grads = [torch.autograd.grad(out.square().sum(), x)[0] for out in (y, z)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("case", CASES)
def test_padding_and_documents(case: str) -> None:
    """A padded sequence, and every document, is a mini-batch of its own tokens; the next call starts another."""
    layer, x = make(case), tokens()
    mask = torch.ones(3, T, dtype=torch.bool)
    mask[0, 7:] = mask[1, :5] = False
    y, state = layer(x, mask=mask)
    later = layer(x, state)[0]
    for row in range(3):
        alone, before = layer(x[row : row + 1, mask[row]])
        torch.testing.assert_close(y[row : row + 1, mask[row]], alone)
        torch.testing.assert_close(later[row : row + 1], layer(x[row : row + 1], before)[0])
    reset = torch.zeros_like(mask)
    reset[0, 5] = reset[1, 3] = reset[1, 9] = True
    if case == "set":  # one set of weights for all queries of a call
        return
    y, state = layer(x, reset=reset)
    parts = [layer(x[1:2, a:b]) for a, b in ((0, 3), (3, 9), (9, T))]
    torch.testing.assert_close(y[1:2], torch.cat([part for part, _ in parts], dim=1))
    torch.testing.assert_close(layer(x, state)[0][1:2], layer(x[1:2], parts[-1][1])[0])


@pytest.mark.parametrize("read", ["previous", "block", "final"])
def test_a_sequence_without_tokens_beside_others_and_a_read(read: str) -> None:
    """What was learned is read as it stands: a rule with momentum takes no step of a read."""
    words = f"optimizer.read={read}", "optimizer.mini_batch_size=null", "optimizer.pool=logits"
    layer: Any = metattt.build("layer=lact", "dim=16", "num_heads=2", *words).double()
    randomize(layer)
    x, mask = tokens(), torch.tensor([[True], [False], [True]]).expand(3, T)
    before = layer.learn(x)
    found = layer.read(x, layer.learn(x.flip(1), before, mask=mask))
    for row in range(3):
        state = before.select(torch.tensor([row]))
        state = layer.learn(x[row : row + 1].flip(1), state) if mask[row, 0] else state
        torch.testing.assert_close(found[row : row + 1], layer.read(x[row : row + 1], state))
