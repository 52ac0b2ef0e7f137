"""The language model: state, padding, packing, and sampling from it."""

import pytest
import torch
from torch import Tensor

from metattt.composition.compose import compose
from metattt.composition.instantiate import instantiate_model
from metattt.generation.sampling import generate
from metattt.models.language_model import LanguageModel

TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}
LAYERS = ("ttt_linear", "ttt_mlp", "linear_attention", "attention", "delta_net", "nested_ttt")


def make(layer: str = "ttt_linear", *overrides: str) -> LanguageModel:
    torch.manual_seed(0)
    small = ("dim=16", "num_heads=2", "model.num_layers=2", "model.vocab_size=31", f"layer={layer}", *overrides)
    model = instantiate_model(compose(*small)).double().eval()
    with torch.no_grad():  # away from the symmetric start, where a lost state would not show
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def tokens(*shape: int) -> Tensor:
    return torch.randint(31, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("layer", "conv"), [*((layer, "true") for layer in LAYERS), ("ttt_mlp", "false")])
def test_any_split_gives_the_logits_of_one_call(layer: str, conv: str) -> None:
    model, ids = make(layer, f"model.pre_conv={conv}"), tokens(2, 41)
    whole = model(ids)
    for sizes in ([19, 1, 1, 20], [1, 1, 1, 1, 4, 11, 1, 21], [16, 1, 1, 1, 22]):
        pieces, state = [], None
        for piece in ids.split(sizes, 1):
            logits, state = model.step(piece, state)
            pieces.append(logits)
        torch.testing.assert_close(torch.cat(pieces, 1), whole, **TOLERANCE)


@pytest.mark.parametrize("side", ["left", "right", "inside"])
@pytest.mark.parametrize("layer", ["ttt_linear", "attention"])
def test_padding_changes_nothing(layer: str, side: str) -> None:
    model, ids = make(layer), tokens(1, 21)
    wide = torch.full((1, 30), 7)
    columns = {
        "left": torch.arange(9, 30),
        "right": torch.arange(21),
        "inside": torch.arange(30)[torch.arange(30) % 10 < 7],
    }[side]
    wide[:, columns] = ids
    mask = torch.zeros(1, 30, dtype=torch.bool)
    mask[:, columns] = True
    logits, state = model.step(wide, mask=mask)
    torch.testing.assert_close(logits[:, columns], model(ids), **TOLERANCE)
    after, expected = model.step(ids[:, :3], state)[0], model(torch.cat([ids, ids[:, :3]], 1))[:, -3:]
    torch.testing.assert_close(after, expected, **TOLERANCE)


def test_packed_documents_equal_the_documents_apart() -> None:
    model, ids = make(), tokens(1, 37)
    reset = torch.zeros(1, 37, dtype=torch.bool)
    reset[0, [0, 11, 30]] = True
    apart = torch.cat([model(ids[:, a:b]) for a, b in ((0, 11), (11, 30), (30, 37))], 1)
    torch.testing.assert_close(model(ids, reset=reset), apart, **TOLERANCE)


def test_tied_head_and_optional_convolution() -> None:
    tied, untied = make(), make("ttt_linear", "model.tie_embeddings=false")
    assert tied.head.weight is tied.embedding.weight
    assert untied.num_parameters() == tied.num_parameters() + 31 * 16
    without = make("ttt_linear", "model.pre_conv=false")
    assert without.blocks[0].conv is None
    assert without.step(tokens(1, 4))[1].tails == (None, None)


def test_every_new_token_is_one_step() -> None:
    model, lengths = make(), []
    model.embedding.register_forward_hook(lambda module, args, output: lengths.append(args[0].shape[1]))
    list(generate(model, tokens(1, 19), 5, seed=0))
    assert lengths == [19, 1, 1, 1, 1]


def test_seed_and_stop() -> None:
    model, ids = make(), tokens(1, 5)
    first, second = ([int(t) for t in generate(model, ids, 30, seed=3)] for _ in range(2))
    assert first == second and len(first) == 30
    stopped = [int(t) for t in generate(model, ids, 30, seed=3, stop=[first[4]])]
    assert stopped == first[: first.index(first[4]) + 1]
