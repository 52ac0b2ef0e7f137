"""The language model: state, padding, packing, and sampling from it."""

import pytest
import torch
from torch import Tensor

from metattt.composition.compose import compose
from metattt.composition.instantiate import instantiate_model
from metattt.errors import MetaTTTError
from metattt.generation.sampling import generate, sample
from metattt.models.language_model import LanguageModel

TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}
LAYERS = ("ttt_linear", "ttt_mlp", "linear_attention", "attention", "delta_net")


def make(layer: str = "ttt_linear", *overrides: str) -> LanguageModel:
    torch.manual_seed(0)
    small = ("dim=16", "num_heads=2", "model.num_layers=2", "model.vocab_size=31", f"layer={layer}", *overrides)
    return instantiate_model(compose(*small)).double().eval()


def tokens(*shape: int) -> Tensor:
    return torch.randint(31, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("layer", LAYERS)
def test_any_split_gives_the_logits_of_one_call(layer: str) -> None:
    model, ids = make(layer), tokens(2, 41)
    whole = model(ids)
    pieces, state, start = [], None, 0
    for length in (19, 1, 1, 20):
        logits, state = model.step(ids[:, start : start + length], state)
        pieces.append(logits)
        start += length
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


def test_logits_do_not_depend_on_later_tokens() -> None:
    model, ids = make(), tokens(1, 20)
    other = ids.clone()
    other[:, 12:] = (other[:, 12:] + 1) % 31
    torch.testing.assert_close(model(ids)[:, :12], model(other)[:, :12], rtol=0, atol=0)


def test_tied_head_and_optional_convolution() -> None:
    tied, untied = make(), make("ttt_linear", "model.tie_embeddings=false")
    assert tied.head.weight is tied.embedding.weight
    assert untied.num_parameters() == tied.num_parameters() + 31 * 16
    without = make("ttt_linear", "model.pre_conv=false")
    assert without.blocks[0].conv is None
    assert without.step(tokens(1, 4))[1].tails == (None, None)


def test_greedy_generation_equals_full_forwards() -> None:
    model, ids = make(), tokens(1, 19)
    drawn = torch.stack(list(generate(model, ids, 12, temperature=0)), 1)
    grown = ids
    for _ in range(12):
        grown = torch.cat([grown, model(grown)[:, -1:].argmax(-1)], 1)
    assert torch.equal(drawn, grown[:, 19:])


def test_prompts_of_different_lengths_are_continued_as_if_alone() -> None:
    model, ids = make(), tokens(2, 19)
    mask = torch.ones(2, 19, dtype=torch.bool)
    mask[1, :6] = False
    together = torch.stack(list(generate(model, ids, 8, temperature=0, mask=mask)), 1)
    alone = torch.stack(list(generate(model, ids[1:, 6:], 8, temperature=0)), 1)
    assert torch.equal(together[1:], alone)


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


def test_sampling_filters() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).expand(400, -1)
    generator = torch.Generator().manual_seed(0)
    assert set(sample(logits, top_k=2, generator=generator).tolist()) == {0, 1}
    assert set(sample(logits, top_p=0.75, generator=generator).tolist()) == {0, 1}
    assert set(sample(logits, top_p=0.01, generator=generator).tolist()) == {0}
    assert set(sample(logits, generator=generator).tolist()) == {0, 1, 2, 3}
    assert set(sample(logits, temperature=0).tolist()) == {0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_p": 1.5}, "top_p=1.5"),
    ],
)
def test_bad_sampling_settings_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(MetaTTTError, match=message):
        generate(make(), tokens(1, 3), 4, **settings)  # type: ignore[arg-type]
    with pytest.raises(MetaTTTError, match="prompts are token ids"):
        generate(make(), torch.zeros(1, 0, dtype=torch.long), 4)
    with pytest.raises(MetaTTTError, match="num_layers=0"):
        make("ttt_linear", "model.num_layers=0")
