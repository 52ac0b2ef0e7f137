"""Layers that are no `TTTLayer`, mixers and two layers in the place of one: the laws that every layer obeys. (Those of a
`TTTLayer`: `metattt.testing`. What they compute: `mixers/test_mamba`, `test_combined`.)"""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import metattt
from metattt.composition.compose import compose
from metattt.composition.instantiate import instantiate_model
from metattt.errors import MetaTTTError
from metattt.generation.sampling import generate
from metattt.inner.causality import found_out
from metattt.parallel.cuts import check_cut
from metattt.testing.specimen import randomize

MIXERS = ("longhorn", "mamba", "mamba2_mixer")
SMALL = {
    "longhorn": ("layer.d_state=3", "layer.chunk_size=5"),
    "mamba": ("layer.d_state=3", "layer.chunk_size=5"),
    "mamba2_mixer": ("layer.d_state=5", "layer.chunk_size=5"),
    "lact_block": ("optimizer.mini_batch_size=4", "layer.first.learner.window=3"),
    "titans_mag": ("optimizer.mini_batch_size=4", "layer.first.learner.window=3"),
    "titans_mal": ("optimizer.mini_batch_size=4", "layer.second.learner.window=3"),
}
EXACT: dict[str, float] = {"rtol": 1e-9, "atol": 1e-9}
every_layer = pytest.mark.parametrize("name", SMALL)


def make(name: str) -> Any:
    layer = metattt.build(f"layer={name}", "dim=8", "num_heads=2", *SMALL[name]).double()
    randomize(layer)
    return layer


def tokens(length: int = 21) -> Tensor:
    return torch.randn(2, length, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def gradients(layer: nn.Module, x: Tensor, y: Tensor, keep: bool = False) -> dict[str, Tensor]:
    leaves = {"x": x} | dict(layer.named_parameters())
    total = (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).cos().view_as(y)).sum()
    options = {"retain_graph": keep, "allow_unused": True, "materialize_grads": True}
    return dict(zip(leaves, torch.autograd.grad(total, list(leaves.values()), **options), strict=True))


def worst(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    return max(((found[key] - g).norm() / g.norm().clamp(min=1e-6)).item() for key, g in wanted.items())


@every_layer
@pytest.mark.parametrize("cuts", [[5, 6, 7, 19], list(range(1, 21)), [12]], ids=["ragged", "tokens", "two"])
def test_any_split_is_one_call(name: str, cuts: list[int]) -> None:
    layer, x = make(name), tokens().requires_grad_()
    state, pieces = None, []
    for start, end in zip([0, *cuts], [*cuts, 21], strict=True):
        y, state = layer(x[:, start:end], state)
        pieces.append(y)
    (whole, last), cut = layer(x), torch.cat(pieces, 1)
    torch.testing.assert_close(cut, whole, **EXACT)
    assert bool((state.pos == 21).all())
    torch.testing.assert_close(tree_leaves(state), tree_leaves(last), **EXACT)
    assert worst(gradients(layer, x, cut), gradients(layer, x, whole)) < 1e-8


@every_layer
def test_no_later_token_is_seen(name: str) -> None:
    layer, x = make(name), tokens(13).requires_grad_()
    assert layer.causal and found_out(layer, 8) is False
    check_cut(layer, 8)
    y = layer(x)[0]
    for t in range(12):
        (gradient,) = torch.autograd.grad(y[:, t].sum(), x, retain_graph=True)
        assert not gradient[:, t + 1 :].any() and gradient[:, t].any()


@every_layer
def test_padding_and_documents(name: str) -> None:
    """Padding anywhere, with junk in it, and a document that starts inside: outputs, gradients, and over two calls."""
    layer, x = make(name), tokens(24)
    generator = torch.Generator().manual_seed(3)
    mask, reset = torch.rand(2, 24, generator=generator) < 0.7, torch.zeros(2, 24, dtype=torch.bool)
    mask[:, 11] = reset[:, 11] = True
    junk = torch.where(mask.unsqueeze(-1), x, torch.nan).requires_grad_()
    alone, rows = x.clone().requires_grad_(), []
    for row in range(2):
        rows.append(torch.zeros_like(x[0]))
        for document in (torch.arange(24) < 11, torch.arange(24) >= 11):
            columns = mask[row] & document
            rows[row] = rows[row].index_put((columns,), layer(alone[row : row + 1, columns])[0][0])
    wanted = torch.stack(rows)
    expected = gradients(layer, alone, wanted, keep=True)
    for sizes in ([24], [9, 15], [11, 13], [14, 10]):
        pieces, state = [], None
        for part, some, starts in zip(*(one.split(sizes, 1) for one in (junk, mask, reset)), strict=True):
            y, state = layer(part, state, mask=some, reset=starts)
            pieces.append(y)
        y = torch.cat(pieces, 1)
        assert not y[~mask].any()
        torch.testing.assert_close(y, wanted, **EXACT)
        assert worst(gradients(layer, junk, y), expected) < 1e-8


@every_layer
def test_a_state_is_like_that_of_a_layer(name: str) -> None:
    layer, x = make(name), tokens(10)
    state = layer(x)[1]
    file = io.BytesIO()
    torch.save(state.detach(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    expected = layer(x[:, :3], state)[0]
    assert not torch.equal(expected, layer(x[:, :3])[0])
    for other in (loaded, copy.deepcopy(state.detach()), state.to("cpu")):
        assert type(other) is type(state) and torch.equal(layer(x[:, :3], other)[0], expected)
    swapped = layer(x[[1, 0], :3], state.select(torch.tensor([1, 0])))[0]
    torch.testing.assert_close(swapped, expected[[1, 0]], **EXACT)
    assert torch.equal(copy.deepcopy(layer)(x)[0], layer(x)[0]) and state.nbytes > 0


@every_layer
def test_calls_that_are_refused(name: str) -> None:
    """Also NaN, which mixers would carry on for ever; in padding anything may stand."""
    layer, x = make(name), tokens(5)
    state, other = layer(x)[1], metattt.build("layer=ttt_linear", "dim=8", "num_heads=2").double()(x)[1]
    spoiled = x.clone()
    spoiled[0, 2, 3] = torch.nan
    for arguments, options, message in (
        ((x[..., :5],), {}, r"x has shape \[2, 5, 5\], expected \[B, T, 8\]"),
        ((x[:, :0],), {}, "x has shape"),
        ((x, other), {}, "the state is from another layer"),
        ((x[:1], state), {}, "the state is for 2 sequences, x holds 1"),
        ((x,), {"mask": torch.ones(2, 3, dtype=torch.bool)}, r"mask is torch.bool of shape \[2, 3\]"),
        ((x,), {"reset": torch.ones(2, 5)}, "reset is torch.float32"),
        ((spoiled,), {}, "x contains NaN"),
    ):
        with pytest.raises(MetaTTTError, match=message) as error:
            layer(*arguments, **options)
        assert len(str(error.value).splitlines()) <= 2
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[0, 2] = False
    assert layer(spoiled, mask=mask)[0].isfinite().all()


@every_layer
def test_autocast(name: str) -> None:
    """What is remembered stays wide. (Muon lifts what bf16 rounds away in small singular values: LaCT's outputs are its own.)"""
    layer = metattt.build(f"layer={name}", "dim=32", "num_heads=2")
    x = torch.randn(2, 100, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    expected = layer(x)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = layer(x)
        y.float().square().mean().backward()
    memory = {"titans_mal": "first", "titans_mag": "second", "lact_block": "second"}.get(name)
    kept = [state.learner["memory"]] if memory is None else getattr(state, memory).weights["commit"].values()
    assert {one.dtype for one in kept} == {torch.float32} and y.isfinite().all()
    assert x.grad is not None and bool(x.grad.isfinite().all())
    assert name == "lact_block" or ((y.float() - expected).norm() / expected.norm()).item() < 2e-2


@pytest.mark.parametrize("choice", [*(f"layer={name}" for name in SMALL), "model.blocks=mamba*2+window_attention+mamba2_mixer"])
def test_in_a_language_model(choice: str) -> None:
    """Prefill, one token, several at any offset; learns a text, and continues it as a full forward pass does."""
    small = SMALL[choice.removeprefix("layer=")] if choice.startswith("layer") else ("model.num_layers=4",)
    sizes = ("dim=16", "num_heads=2", "model.num_layers=2", "model.ffn_dim=16", "model.vocab_size=31")
    torch.manual_seed(0)
    model = instantiate_model(compose(*sizes, choice, *small, job="language_model"))
    ids = torch.randint(31, (2, 22), generator=torch.Generator().manual_seed(0))
    whole, state, pieces = model(ids), None, []
    for piece in ids.split([9, 1, 1, 7, 4], 1):
        logits, state = model.step(piece, state)
        pieces.append(logits)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-5, atol=1e-5)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(30):
        loss, _ = model.cross_entropy(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert losses[-1] < losses[0] / 2
    with torch.no_grad():
        grown = ids[:, :8]
        for _ in range(6):
            grown = torch.cat([grown, model(grown)[:, -1:].argmax(-1)], 1)
    assert torch.equal(torch.stack(list(generate(model, ids[:, :8], 6, temperature=0)), 1), grown[:, 8:])
