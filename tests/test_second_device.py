"""What runs on the host runs on another device, with the same results: nothing is left on the host, or brought together there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import hf_for_tests
import pytest
import torch
from models_for_tests import small_model
from second_device import DEVICE, There, moved, second_device
from torch import Tensor, nn

import metattt
from metattt.adaptation.adapter import Adapter
from metattt.generation.sampling import generate
from metattt.optimizers.block import Adam, BlockMomentum, BlockRule, Sign

X = torch.randn(3, 20, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
MASK = torch.arange(20) < torch.tensor([[20], [13], [7]])
RESET = torch.zeros(3, 20, dtype=torch.bool).index_put((torch.tensor([0, 1, 0]), torch.tensor([5, 11, 16])), torch.tensor(True))
IDS = torch.randint(0, 40, (3, 25), generator=torch.Generator().manual_seed(2))
LAYERS = ("ttt_linear", "ttt_mlp", "titans", "gated_delta_net", "atlas", "kda", "gka", "window_attention", "mamba2_mixer", "ttt3r")
Put = Callable[[Any], Any]


def same_there(call: Callable[[Put], Sequence[Tensor]]) -> None:
    """`call` puts tensors and modules on a device, and gives the same results on both."""
    torch.manual_seed(3)
    expected = call(lambda one: one.double() if isinstance(one, nn.Module) else one)
    with second_device():
        torch.manual_seed(3)
        found = call(lambda one: moved(one.double()) if isinstance(one, nn.Module) else one.to(DEVICE))
        assert all(isinstance(x, There) for x in found)
        here = [x.held for x in found]  # type: ignore[attr-defined]
    for ours, theirs in zip(here, expected, strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), atol=1e-9, rtol=1e-9, equal_nan=True)


def gradients(module: nn.Module, *losses: Tensor) -> list[Tensor]:
    sum(loss.square().sum() for loss in losses).backward()  # type: ignore[union-attr]
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def model(layer: str, *overrides: str) -> Any:
    given = (f"layer={layer}", "dim=16", "num_heads=2", "model.num_layers=3", "model.vocab_size=40", *overrides)
    return small_model(*given, dtype=torch.float32).train()


def llama() -> Any:
    return hf_for_tests.llama(vocab_size=40, max_position_embeddings=64).eval()


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    """Masks and documents may be on either device."""

    def call(put: Put) -> list[Tensor]:
        layer, x = put(metattt.build(name, dim=16, num_heads=2, seed=0)), put(X)
        y, state = layer(x, mask=MASK)
        more, _ = layer(x[:, :5], state, reset=put(RESET[:, :5]))
        packed, state = layer(x, reset=RESET)
        with torch.no_grad():
            token, _ = layer(x[:, :1], state.map(torch.clone), donate_state=True)
        return [y, more, packed, token, *gradients(layer, y, more, packed)]

    same_there(call)


@pytest.mark.parametrize("given", [
    ("ttt_linear", "model.checkpoint_blocks=true"),
    ("window_attention", "model=ttt_e2e", "model.mini_batch_size=8"),  # learns from its own loss
])  # fmt: skip
def test_a_language_model(given: tuple[str, ...]) -> None:
    def call(put: Put) -> list[Tensor]:
        lm = put(model(*given))
        nats, _ = lm.cross_entropy(put(IDS[:, :-1]), put(IDS[:, 1:]), reset=IDS[:, :-1] == 7)
        return [nats, torch.stack([*generate(lm.eval(), put(IDS[:2, :6]), 5, temperature=0)]), *gradients(lm, nats)]

    same_there(call)


CONSTANT: dict[str, Any] = {"lr": "constant", "lr_scale": "none", "mini_batch_size": 8}
ADAPTERS: dict[str, tuple[Callable[[], Any], str, Callable[[], BlockRule]]] = {
    "ours": (lambda: model("ttt_linear"), "lora", lambda: Adam(base_lr=1e-2, mini_batch_size=8)),
    "sign": (llama, "norms", lambda: Sign(base_lr=1e-2, **CONSTANT)),
    "all": (llama, "all", lambda: BlockMomentum(base_lr=0.1, momentum="constant", **CONSTANT)),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter(name: str) -> None:
    """Ids may be on the host; a document may be shorter than another."""
    make, fast, rule = ADAPTERS[name]

    def call(put: Put) -> list[Tensor]:
        adapter = Adapter(put(make()), fast=fast, rule=rule())
        scored = adapter.read([put(IDS[0, :20]), put(IDS[1, :11])])
        adapter.next_documents()
        again = adapter.read(IDS[:2], logits=True)
        assert again.logits is not None
        return [scored.nats, again.nats, again.logits, adapter.generate(put(IDS[:2, :5]), 4)]

    same_there(call)


@pytest.mark.parametrize(("pattern", "layer"), [
    ("model.layers.*.self_attn", "window_attention+ttt_linear"),
    ("model.layers.*.mlp.down_proj", "in_place"),
])  # fmt: skip
def test_attached_layers(pattern: str, layer: str) -> None:
    def call(put: Put) -> list[Tensor]:
        lm = llama()
        metattt.attach(lm, pattern, layer=layer)
        lm = put(lm)
        logits = lm(put(IDS)).logits
        with torch.no_grad():
            continued = lm.generate(put(IDS[:2, :6]), max_new_tokens=4, do_sample=False, pad_token_id=0)
            read = lm(put(IDS), use_cache=True)
            cache = getattr(read, "cache", None) or read.past_key_values
            cache.batch_repeat_interleave(2)
            again = lm(put(IDS.repeat_interleave(2, 0)[:, :4]), past_key_values=cache).logits
        return [logits, continued, again, *gradients(lm, logits)]

    same_there(call)
