"""The audit finds every planted leak, and none in an honest adapter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import metattt
from metattt import Adapter
from metattt.adaptation.adapter import Adapted
from metattt.adaptation.audit import Scorer, leaks, repeated
from metattt.models import LanguageModel
from metattt.optimizers import Adam, BlockMomentum
from metattt.optimizers.block import BlockRule

V = 24
TEXT = [torch.randint(0, V, (n,), generator=torch.Generator().manual_seed(n)) for n in (26, 21)]
RULES: dict[str, Callable[[int], BlockRule]] = {
    "adam": lambda size: Adam(base_lr=0.01, mini_batch_size=size),
    "momentum": lambda size: BlockMomentum(lr="constant", momentum="constant", base_lr=0.3, mini_batch_size=size),
}


def adapter(
    size: int = 4, rule: str = "adam", fast: str = "norms", layer: str = "linear_attention", **settings: int
) -> Adapter:
    make = partial(metattt.build, layer, dim=8, num_heads=1, seed=0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LanguageModel(V, 8, 1, make, pre_conv=False).eval()
    return Adapter(model, fast, RULES[rule](size), **settings)


def honest(made: Adapter, carries: bool = False, together: bool = False) -> Scorer:
    def scorer(documents: list[Tensor]) -> list[Tensor]:
        made.reset()
        if together:
            logits = made.read(documents, logits=True).logits
            assert logits is not None
            return [one[: len(document)] for one, document in zip(logits, documents, strict=True)]
        found = []
        for document in documents:
            made.next_documents() if carries else made.reset()
            found.append(made.read(document[None], logits=True).logits[0])
        return found

    return scorer


def state(made: Adapter) -> Adapted:
    return made._begun(1) if made.state is None else made.state


def rows(made: Adapter, part: Tensor, **changes: object) -> Tensor:
    """Logits of the next tokens by a state that is changed for them."""
    before = made.state
    made.state = state(made)._replace(**changes)
    logits = made.score(part[None], logits=True).logits
    made.state = before
    assert logits is not None
    return logits[0]


def learned(made: Adapter, part: Tensor) -> object:
    """Weights that have learned tokens as the next mini-batch, which the adapter has not."""
    now = state(made)
    after = now._replace(tokens=torch.cat([now.tokens, part[None]], 1), waiting=len(part))
    return made._learned(after, len(part), False)[1].weights


def by_mini_batch(made: Adapter, wrong: Callable[[int, Tensor, Tensor], Tensor | None]) -> Scorer:
    """An honest scorer but for `wrong(number, mini-batch, document)`, which may give other logits."""

    def scorer(documents: list[Tensor]) -> list[Tensor]:
        found = []
        for document in documents:
            made.reset()
            parts = []
            for number, part in enumerate(document.split(made.rule.mini_batch_size)):
                other = wrong(number, part, document)
                right = made.read(part[None], logits=True).logits[0]
                parts.append(right if other is None else other)
            found.append(torch.cat(parts))
        return found

    return scorer


def learned_first(at: int, length: int, ahead: int, made: Adapter) -> Scorer:
    """Mini-batch `at` is scored after `length` of its tokens were learned, or of a later mini-batch."""

    def wrong(number: int, part: Tensor, document: Tensor) -> Tensor | None:
        size = made.rule.mini_batch_size
        later = document[(number + ahead) * size :][:length]
        return rows(made, part, weights=learned(made, later)) if number == at and len(later) > 1 else None

    return by_mini_batch(made, wrong)


def filled_cache(at: int, made: Adapter) -> Scorer:
    """The state from before mini-batch `at` has read it already."""

    def wrong(number: int, part: Tensor, document: Tensor) -> Tensor | None:
        if number != at:
            return None
        now = state(made)
        tokens = torch.cat([now.tokens, part[None]], 1)
        return rows(made, part, model=made.fast(now.weights["commit"], tokens, now.model, 1)[1])

    return by_mini_batch(made, wrong)


def shifted(by: int, made: Adapter) -> Scorer:
    """Labels `by` tokens off: a prediction has read its own token."""
    return lambda documents: [one.roll(-by, 0) for one in honest(made)(documents)]


PLANTED: dict[str, Callable[[], Scorer]] = {
    "two tokens of a mini-batch were learned": lambda: learned_first(1, 2, 0, adapter()),
    "the last mini-batch was learned": lambda: learned_first(3, 6, 0, adapter(6, "momentum")),
    "a later mini-batch was learned": lambda: learned_first(0, 6, 1, adapter(6, "momentum")),
    "what another document left": lambda: honest(adapter(fast="lora"), carries=True),
    "a state that has read too far": lambda: filled_cache(1, adapter()),
    "another layer's state": lambda: filled_cache(3, adapter(6, layer="ttt_linear")),
    "labels one token off": lambda: shifted(1, adapter()),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_leak_is_found(name: str) -> None:
    assert next(leaks(PLANTED[name](), TEXT, V), None) is not None


def test_equal_documents_are_found() -> None:
    texts = [torch.arange(number, number + 9) for number in (0, 1, 2, 1)]
    assert repeated(texts) == [(1, 3)] and not repeated(TEXT)


HONEST = {
    f"{layer}-{fast}-{rule}-{size}-{kind}": (layer, fast, rule, size, kind)
    for layer, fast, rule, size in (
        ("linear_attention", "norms", "adam", 4), ("linear_attention", "lora", "momentum", 6),
        ("ttt_linear", "all", "adam", 4), ("attention", "mlp", "momentum", 5),
    )
    for kind in ("alone", "carried", "together", "context")
}  # fmt: skip


FIRST = ("linear_attention-norms-adam-4-carried", "ttt_linear-all-adam-4-together", "attention-mlp-momentum-5-alone")


@pytest.mark.parametrize(
    "name", [name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in HONEST]
)
def test_an_honest_adapter_has_no_leak(name: str) -> None:
    layer, fast, rule, size, kind = HONEST[name]
    made = adapter(size, rule, fast, layer, **({"context": 3} if kind == "context" else {}))
    places = None if name not in FIRST else [3, 4, 6, 20]
    carries = kind == "carried"
    assert not list(leaks(honest(made, carries, kind == "together"), TEXT, V, places, carries))
