"""Generation: every layer type from carried state, prompts of different lengths, sampling filters, stop strings."""

from typing import Any

import pytest
import torch
from models_for_tests import small_model
from torch import Tensor

from metattt.catalog.known_layers import known_layers
from metattt.data import ByteTokenizer
from metattt.errors import NotFinite
from metattt.generation import sampling
from metattt.generation.sampling import draw, generate
from metattt.generation.text import Continuation, generate_text
from metattt.models import LanguageModel

TOKENIZER = ByteTokenizer()
NOT_CAUSAL = {"mttt_linear", "mttt_mlp", "vittt", "self_attention", "linear_attention_image", "linear_attention_elu_image"}
CAUSAL_LAYERS = [name for name in known_layers() if name not in NOT_CAUSAL]


def make(layer: str = "ttt_linear", *overrides: str) -> LanguageModel:
    """Far enough from the start that the most probable tokens differ from place to place."""
    return small_model("preset=tiny", "dim=32", f"layer={layer}", *overrides, noise=0.1)


def greedy(model: LanguageModel, ids: Tensor, count: int) -> Tensor:
    """Continuations by one full forward per token."""
    grown = ids
    with torch.no_grad():
        for _ in range(count):
            grown = torch.cat([grown, model(grown)[:, -1:].argmax(-1)], 1)
    return grown[:, ids.shape[1] :]


@pytest.mark.parametrize("layer", CAUSAL_LAYERS)
def test_prompts_of_different_lengths_are_continued_as_if_alone(layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(layer)
    prompts = [torch.randint(256, (1, length)) for length in (19, 1, 16, 7)]
    alone = [greedy(model, prompt, 6) for prompt in prompts]
    for side in ("left", "right"):
        ids, mask = torch.full((4, 23), 9), torch.zeros(4, 23, dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            columns = slice(0, prompt.shape[1]) if side == "right" else slice(23 - prompt.shape[1], 23)
            ids[row, columns], mask[row, columns] = prompt[0], True
        for piece in (sampling.PIECE, 6):  # prompts that end in a piece, or fill it; pieces without a token of theirs
            monkeypatch.setattr(sampling, "PIECE", piece)
            together = torch.stack(list(generate(model, ids, 6, temperature=0, mask=mask)), 1)
            assert torch.equal(together, torch.cat(alone))
    assert len(together.unique()) > 4


def test_draws_follow_the_filtered_distribution() -> None:
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1])
    logits, generator = probabilities.log().expand(20000, -1), torch.Generator().manual_seed(0)
    for settings, expected in (
        ({}, probabilities),
        ({"temperature": 0.5}, probabilities**2),
        ({"top_k": 3}, torch.tensor([0.4, 0.3, 0.2, 0])),
        ({"top_p": 0.65}, torch.tensor([0.4, 0.3, 0, 0])),
        ({"top_p": 0.01}, torch.tensor([1.0, 0, 0, 0])),
        ({"temperature": 2.0, "top_k": 2, "top_p": 0.9}, torch.tensor([0.4, 0.3, 0, 0]).sqrt()),
    ):
        drawn, _ = draw(logits, generator=generator, **settings)  # type: ignore[arg-type]
        share = drawn.bincount(minlength=4) / len(drawn)
        torch.testing.assert_close(share, expected / expected.sum(), rtol=0, atol=0.015)


class Parrot(LanguageModel):
    """Says a fixed text after any prompt, one byte per step."""

    def __init__(self, texts: list[bytes]):
        super().__init__(257, 8, 1, torch.nn.Identity)
        self.texts, self.calls = texts, 0

    def step(self, ids: Tensor, *_: object, last_only: bool = False, **options: object) -> Any:
        logits = torch.zeros(*ids.shape, 257)
        for row, text in enumerate(self.texts):
            logits[row, -1, text[self.calls] if self.calls < len(text) else TOKENIZER.separator] = 9.0
        self.calls += 1
        return logits[:, -1:] if last_only else logits, None


def test_stop_strings_end_each_text_by_itself() -> None:
    model = Parrot([b"one\n\ntwo", "längst STOP more".encode(), b"STO ST until the end", b"short"])
    texts = generate_text(model, TOKENIZER, ["", "a", "bb", ""], 40, temperature=0, stop=["\n\n", "STOP"])
    assert texts == ["one", "längst ", "STO ST until the end", "short"]
    assert model.calls == len("STO ST until the end") + 1  # and no further: all have ended
    model = Parrot([b"aXXb", b"XXb"])
    assert generate_text(model, TOKENIZER, ["", ""], 40, temperature=0, stop=["XX"]) == ["a", ""]
    assert model.calls == 3
    out_of_tokens = generate_text(Parrot([b"abSTOP"]), TOKENIZER, [""], 5, temperature=0, stop=["STOP"])
    assert out_of_tokens == ["abSTO"]


def test_text_is_handed_out_when_it_is_certain() -> None:
    text = Continuation(TOKENIZER, ["<end>", "<!"])
    seen = [text.add(byte) for byte in "a<eé<<end>b".encode()]
    assert seen == ["a", "", "", "<e", "é", "", "<", "", "", "", "", ""]
    assert text.ended and text.finish() == ""
    text = Continuation(TOKENIZER, ["xy"])
    assert [text.add(byte) for byte in b"ax"] == ["a", ""] and text.finish() == "x"
    assert Continuation(TOKENIZER).add(TOKENIZER.separator) == ""


def test_what_becomes_of_a_sequence_that_has_ended_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    model, step = make(), LanguageModel.step
    ids = torch.randint(40, (2, 7))
    end = int(greedy(model, ids, 1)[0, 0])
    expected = greedy(model, ids[1:], 6)[0]
    assert end not in expected

    def diverges(self: LanguageModel, ids: Tensor, *args: Any, **options: Any) -> Any:
        logits, state = step(self, ids, *args, **options)
        return logits.masked_fill((ids[:, -1:] == end).unsqueeze(-1), float("nan")), state

    monkeypatch.setattr(LanguageModel, "step", diverges)
    found = torch.stack([*generate(model, ids, 6, temperature=0, stop=[end])])
    torch.testing.assert_close(found[:, 1], expected)


def test_predictions_that_are_not_finite_are_found_at_their_token() -> None:
    model = make()
    tokens = generate(model, torch.randint(40, (3, 21)), 9)
    next(tokens), next(tokens)
    with torch.no_grad():
        model.final_norm.weight.fill_(float("nan"))
    with pytest.raises(NotFinite):
        next(tokens)
