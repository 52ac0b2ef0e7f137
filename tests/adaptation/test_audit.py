"""The audit finds every planted leak, and none in an honest adapter."""

from __future__ import annotations

import itertools
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
    size: int = 4, rule: str = "adam", fast: str = "norms", layer: str = "linear_attention", **settings: int,
) -> Adapter:  # fmt: skip
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


def second_epoch(share: float, made: Adapter) -> Scorer:
    """The first part of a document was learned before it is scored from its beginning."""

    def scorer(documents: list[Tensor]) -> list[Tensor]:
        found = []
        for document in documents:
            made.reset()
            made.learn(document[None, : int(share * len(document))])
            now = state(made)
            made.state = now._replace(tokens=now.tokens[:, :0], position=0, waiting=0, model=None, ends=(None,))
            found.append(made.read(document[None], logits=True).logits[0])
        return found

    return scorer


PLANTED: dict[str, Callable[[], Scorer]] = {}
"""Every leak that `leaks` has to find."""

for size, rule in itertools.product((4, 6), RULES):
    here = partial(adapter, size, rule)
    for at, ahead in itertools.product(range(2), range(3)):
        PLANTED[f"order-{at}-{ahead}-{size}-{rule}"] = lambda a=at, n=ahead, h=here, s=size: learned_first(a, s, n, h())
    PLANTED[f"overlap-{size}-{rule}"] = lambda h=here: learned_first(1, 2, 0, h())
    PLANTED[f"second-epoch-{size}-{rule}"] = lambda h=here: second_epoch(0.3, h())
    PLANTED[f"no-reset-{size}-{rule}"] = lambda h=here: honest(h(), carries=True)
    PLANTED[f"cache-{size}-{rule}"] = lambda h=here: filled_cache(1, h())
PLANTED |= {f"shift-{by}": lambda n=by: shifted(n, adapter()) for by in (1, 6)}
FIRST = ("order-0-1-6-momentum", "overlap-4-adam", "second-epoch-6-adam", "no-reset-4-adam", "cache-4-adam", "shift-1")


@pytest.mark.parametrize(
    "name", [name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in PLANTED]
)
def test_a_planted_leak_is_found(name: str) -> None:
    assert next(leaks(PLANTED[name](), TEXT, V), None) is not None


def test_equal_documents() -> None:
    texts = [torch.arange(number, number + 9) for number in range(5)]
    texts[4] = texts[1].clone()
    assert repeated(texts) == [(1, 4)]


HONEST = {  # layer, fast weights, rule, mini-batch, how documents are read
    "carried": ("linear_attention", "norms", "adam", 4),
    "together": ("ttt_linear", "all", "adam", 4),
    "alone": ("attention", "mlp", "momentum", 5),
    "context": ("linear_attention", "lora", "momentum", 6),
}


@pytest.mark.parametrize("kind", HONEST)
def test_an_honest_adapter_has_no_leak(kind: str) -> None:
    layer, fast, rule, size = HONEST[kind]
    made = adapter(size, rule, fast, layer, **({"context": 3} if kind == "context" else {}))
    carries = kind == "carried"
    assert not list(leaks(honest(made, carries, kind == "together"), TEXT, V, [3, 4, 6, 20], carries))
    assert not repeated(TEXT)
