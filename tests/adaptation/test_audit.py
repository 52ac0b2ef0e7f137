"""The audit finds every planted leak, and none in an honest adapter."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from refusals_for_tests import refusal
from torch import Tensor

import metattt
from metattt import Adapter
from metattt.adaptation.adapter import Adapted, Score
from metattt.adaptation.audit import Scorer, leaks, repeated, unseen
from metattt.models import LanguageModel
from metattt.optimizers import Adam, BlockMomentum, BlockRule

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


def each(score: Callable[[Tensor], Tensor]) -> Scorer:
    """Documents are scored one after the other."""
    return lambda documents: [score(document) for document in documents]


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

    def score(document: Tensor) -> Tensor:
        made.reset()
        parts = []
        for number, part in enumerate(document.split(made.rule.mini_batch_size)):
            other = wrong(number, part, document)
            right = made.read(part[None], logits=True).logits[0]
            parts.append(right if other is None else other)
        return torch.cat(parts)

    return each(score)


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

    def score(document: Tensor) -> Tensor:
        made.reset()
        made.learn(document[None, : int(share * len(document))])
        now = state(made)
        made.state = now._replace(tokens=now.tokens[:, :0], position=0, waiting=0, model=None, ends=(None,))
        return made.read(document[None], logits=True).logits[0]

    return each(score)


def mixed_weights(share: float, made: Adapter) -> Scorer:
    """Every mini-batch is scored with a little of the weights that the whole document leaves."""

    def wrong(number: int, part: Tensor, document: Tensor) -> Tensor:
        now = state(made)
        other = adapter(made.rule.mini_batch_size)
        other.learn(document[None])
        final = state(other).weights["commit"]
        mixed = {name: (1 - share) * value + share * final[name] for name, value in now.weights["commit"].items()}
        return rows(made, part, weights=now.weights | {"commit": mixed})

    return by_mini_batch(made, wrong)


def looks_ahead(size: float, whole: bool, made: Adapter) -> Scorer:
    """Logits are centred by a mean over tokens that come later, too."""

    def score(document: Tensor) -> Tensor:
        parts = [document] if whole else document.split(made.rule.mini_batch_size)
        mean = torch.cat([part.double().mean().expand(len(part)) for part in parts])
        return honest(made)([document])[0].double() + size * mean[:, None]

    return each(score)


def planted() -> Iterator[tuple[str, Callable[[], Scorer]]]:
    """Name and scorer of every leak that `leaks` has to find."""
    setups = list(itertools.product((4, 6), RULES))
    for size, rule in setups:
        here, name = partial(adapter, size, rule), f"{size}-{rule}"
        for at in range(4):
            for length in range(2, size + 1):
                yield f"overlap-{at}-{length}-{name}", lambda a=at, n=length, h=here: learned_first(a, n, 0, h())
            yield f"learned-first-{at}-{name}", lambda a=at, h=here, s=size: learned_first(a, s, 0, h())
        for at, ahead in itertools.product(range(2), (1, 2)):
            yield f"order-{at}-{ahead}-{name}", lambda a=at, n=ahead, h=here, s=size: learned_first(a, s, n, h())
        for share in (0.3, 0.5, 1.0):
            yield f"second-epoch-{share}-{name}", lambda s=share, h=here: second_epoch(s, h())
        for share in (0.5, 0.1, 0.01, 0.001):
            yield f"final-weights-{share}-{name}", lambda s=share, h=here: mixed_weights(s, h())
        for fast in ("norms", "lora", "mlp"):
            yield f"no-reset-{fast}-{name}", lambda h=here, f=fast: honest(h(fast=f), carries=True)
    for size, at, layer in itertools.product((4, 6), range(4), ("linear_attention", "ttt_linear")):
        yield f"cache-{at}-{size}-{layer}", lambda a=at, s=size, name=layer: filled_cache(a, adapter(s, layer=name))
    for by in range(1, 7):
        yield f"shift-{by}", lambda n=by: shifted(n, adapter())
    for power, whole in itertools.product(range(1, 6), (False, True)):
        yield f"look-ahead-{power}-{whole}", lambda p=power, w=whole: looks_ahead(10.0**-p, w, adapter())


PLANTED = dict(planted())
SHOWN = ("overlap-1-2-4-adam", "order-0-1-6-momentum", "no-reset-norms-4-adam", "cache-1-4-linear_attention", "shift-1")


def found(name: str) -> bool:
    return next(leaks(PLANTED[name](), TEXT, V), None) is not None


@pytest.mark.parametrize("name", SHOWN)
def test_a_planted_leak_is_found(name: str) -> None:
    assert found(name)


@pytest.mark.slow
def test_all_planted_leaks_are_found() -> None:
    rewound = list(rewinds())
    copies = list(equal_documents())
    assert len(PLANTED) + len(rewound) + len(copies) >= 200
    missed = [name for name in PLANTED if not found(name)]
    missed += [f"rewind {number}" for number, score in enumerate(rewound) if unseen([score])]
    missed += [f"copy {number}" for number, (texts, pairs) in enumerate(copies) if repeated(texts) != pairs]
    assert not missed


def test_what_is_not_finite_is_no_leak_and_hides_none() -> None:
    def ruled_out(name: str, value: float, row: slice) -> Scorer:
        def scorer(documents: list[Tensor]) -> list[Tensor]:
            made = honest(adapter()) if name == "honest" else PLANTED[name]()
            logits = [one.clone() for one in made(documents)]
            for one in logits:
                one[row, 3] = value
            return logits

        return scorer

    places, every, last = [3, 9], slice(None), slice(-1, None)
    assert not list(leaks(ruled_out("honest", -torch.inf, every), TEXT, V, places))
    assert list(leaks(ruled_out("look-ahead-1-True", torch.nan, last), TEXT[:1], V, places))
    refusal(lambda: next(leaks(honest(adapter()), TEXT, V, [-1, 100])), "are in no document")
    refusal(lambda: next(leaks(honest(adapter()), [], V)), "hold no tokens")
    assert not list(leaks(honest(adapter(), together=True), [*TEXT, TEXT[0][:0]], V, places[:1]))
    refusal(lambda: next(leaks(lambda texts: honest(adapter())(texts)[:1], TEXT, V)), "of [26] tokens for documents of [26, 21]")
    refusal(lambda: next(leaks(each(lambda text: torch.zeros(len(text))), TEXT, V)), "return [n, V] for each")
    unpredicted = each(lambda text: F.pad(torch.zeros(len(text) - 1, V), (0, 0, 1, 0), value=torch.nan))
    assert not list(leaks(unpredicted, TEXT, V, places))
    drawn = each(lambda text: torch.randn(len(text), V))
    refusal(lambda: next(leaks(drawn, TEXT, V)), "behind which leaks would hide")
    assert repeated([TEXT[0], TEXT[0].int()]) == [(0, 1)]


def rewinds() -> Iterator[Score]:
    """Scores of tokens by an adapter that was set back to earlier ones, and kept what it had learned."""
    for size, back in itertools.product((4, 6), range(1, 9)):
        made = adapter(size)
        made.learn(TEXT[0][None, : 4 * size])
        now = state(made)
        made.state = now._replace(position=max(0, now.position - back))
        yield made.score(TEXT[0][None, :5])


def equal_documents() -> Iterator[tuple[list[Tensor], list[tuple[int, int]]]]:
    """Texts of which two are equal, and which."""
    for count in range(2, 6):
        for first, second in itertools.combinations(range(count), 2):
            texts = [torch.arange(number, number + 9) for number in range(count)]
            texts[second] = texts[first].clone()
            yield texts, [(first, second)]


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
    made.reset()
    assert unseen([made.read(part[None]) for part in TEXT[0].split(7)]) and not repeated(TEXT)
