"""Tokens that are learned and not answered, and tokens that are answered and not learned: `layer.learn`, `layer.read`."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from refusals_for_tests import refusal
from torch import Tensor

import metattt
from metattt.catalog.known_layers import known_layers
from metattt.nested import tensors_of

B = 4  # tokens of a mini-batch
SMALL = ("atlas", "lact", "lact_block", "titans", "ttt_linear", "ttt_mlp", "nested_transformer", "nested_ttt", "ttt3r")
PREVIOUS = ("lact", "nested_transformer", "nested_ttt", "ttt3r")  # what their queries read
COMMITTED = ("atlas", "memora", "moneta", "titans")
OTHERS = {  # a call answers at its end; log-linear reads change their levels; recurrences, and two layers in one
    *("mttt_linear", "mttt_mlp", "vittt", "self_attention", "linear_attention_image", "linear_attention_elu_image"),
    *("log_linear_mamba2", "log_linear_gated_delta_net", "longhorn", "mamba", "mamba2_mixer", "lact_block", "titans_mag", "titans_mal"),
}
INCLUSIVE = sorted(set(known_layers()) - OTHERS - {*PREVIOUS, *COMMITTED})


def build(name: str, *overrides: str) -> Any:
    size = [f"optimizer.mini_batch_size={B}"] if name in SMALL else []
    return metattt.build(f"layer={name}", "dim=16", "num_heads=2", *size, *overrides, seed=0).double()


def tokens(count: int, grad: bool = False) -> Tensor:
    x = torch.randn(2, count, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x.requires_grad_(grad)


def by_mini_batches(layer: Any, x: Tensor) -> Tensor:
    """Each mini-batch is read, then learned."""
    state, found = None, []
    for part in x.split(B, dim=1):
        found.append(layer.read(part, state))
        state = layer.learn(part, state)
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("name", PREVIOUS)
def test_read_then_learned_is_a_call(name: str) -> None:
    """`read=previous`: outputs and every derivative."""
    layer, derivatives = build(name), []
    for call in (lambda x: layer(x)[0], lambda x: by_mini_batches(layer, x)):
        layer.zero_grad()
        x = tokens(3 * B, grad=True)
        y = call(x)
        y.square().sum().backward()
        derivatives.append([y, x.grad, *(p.grad for p in layer.parameters())])
    torch.testing.assert_close(*reversed(derivatives), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", INCLUSIVE)
def test_learned_then_read_is_a_call(name: str) -> None:
    """`read=inclusive`: token t is answered by what was learned up to it. (By its views, as places and convolutions move
    on.)"""
    wide = ["learner.window=64"] if name == "window_attention" else []  # else the oldest token leaves it
    layer, x = build(name, *wide), tokens(2 * B + 3)
    with torch.no_grad():
        start = layer.start(x)
        call = layer.call(x, start)
        views, gates, start = layer.tokens(x, start, call.ctx)
        expected, _ = layer.inner_loop(views, gates, start, call)
        state = None
        for before, t in pairwise((0, 1, B, B + 2, 2 * B + 3)):
            state = layer.learn(x[:, before:t], state)
            own, of_token = (
                type(given)(*(None if x is None else x[:, :, t - 1 : t] for x in given)) for given in (views, gates)
            )
            ctx = layer.call(x[:, :1], state).ctx
            found = layer.predictions(own, of_token, state, ctx)
            torch.testing.assert_close(found, expected[:, :, t - 1 : t], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["log_linear_mamba2", "log_linear_gated_delta_net"])
def test_reading_is_learning_with_a_weight_of_zero(name: str) -> None:
    layer, x, asked = build(name), tokens(7), tokens(1)
    state = layer.learn(x)
    ctx = layer.call(asked, state).ctx
    views, gates, *_ = layer.tokens(asked, state, ctx)
    ones, decay = torch.ones_like(gates.write), None if gates.decay is None else 0 * gates.decay
    inert = gates._replace(write=0 * ones, keep=ones, decay=decay)
    expected, _ = layer.learner.scan(views, state.learner, ctx, inert)
    torch.testing.assert_close(layer.predictions(views, gates, state, ctx), expected)


def test_a_window_moves_on_with_the_place() -> None:
    """A query three tokens behind the last one sees as many fewer of them; sinks stay."""
    layer = build("window_attention", "learner.window=4", "learner.sinks=1", "task.rope=none")
    x, asked = tokens(9), tokens(3)
    found = layer.read(asked, layer.learn(x))
    task = layer.task.views(asked, {}, layer.call(asked, layer.start(asked)).ctx)[0].q
    k, v = (getattr(layer.task.views(x, {}, layer.call(x, layer.start(x)).ctx)[0], name) for name in "kv")
    for place in range(3):
        seen = [0, *range(9 + place - 3, 9)]
        y = torch.nn.functional.scaled_dot_product_attention(task[:, :, place : place + 1], k[:, :, seen], v[:, :, seen])
        torch.testing.assert_close(found[:, place : place + 1], layer.output(asked[:, place : place + 1], y))


@pytest.mark.parametrize("name", COMMITTED)
def test_tokens_of_an_open_mini_batch_read_the_last_commit(name: str) -> None:
    layer = build(name, f"optimizer.mini_batch_size={B}")
    x = tokens(3 * B)
    expected = layer(x)[0]
    state = layer.learn(x[:, : 2 * B])
    torch.testing.assert_close(layer.read(x[:, 2 * B : -1], state), expected[:, 2 * B : -1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["ttt_linear", "titans", "window_attention", "mesa_net", "lact_block", "titans_mag"])
def test_padding_and_the_state(name: str) -> None:
    """Padding changes no answer, and reading no state."""
    layer, x, asked = build(name), tokens(2 * B + 1), tokens(B + 2)
    state = layer.learn(x)
    before = [one.clone() for one in tensors_of(state)]
    mask = torch.ones(2, B + 2, dtype=torch.bool)
    mask[0, 1] = mask[1, 3:] = False
    found = layer.read(asked, state, mask=mask)
    assert found[~mask].eq(0).all()
    for one in range(2):
        alone = layer.read(asked[one : one + 1, mask[one]], state.select(torch.tensor([one])))
        torch.testing.assert_close(found[one, mask[one]], alone[0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(tensors_of(state), before, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["titans_mag", "titans_mal", "lact_block"])
def test_layers_of_two(name: str) -> None:
    """Both read. Beside the answers of one, the output depends on what the other has learned."""
    layer, x, asked = build(name), tokens(2 * B), tokens(B)
    state = layer.learn(x)
    plain = layer.read(asked, state)
    for which in ("first", "second"):
        other = layer.learn(x.flip(1))
        assert not torch.allclose(layer.read(asked, state._replace(**{which: getattr(other, which)})), plain)
    if name == "titans_mal":
        one = layer.first.read(asked, state.first)
        torch.testing.assert_close(plain, layer.second.read(one, state.second))


@pytest.mark.parametrize(
    ("name", "learned", "why"),
    [
        ("mamba", 4, "cannot read without learning"), ("self_attention", 0, "cannot read apart from learning"),
        ("nested_transformer", B + 1, "read where a mini-batch begins"), ("window_attention", 0, "learn first"),
        ("nearest", 0, "learn first"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_says_why(name: str, learned: int, why: str) -> None:
    layer = build(name)
    refusal(lambda: layer.read(tokens(3), layer.learn(tokens(learned)) if learned else None), why)
