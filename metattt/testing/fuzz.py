"""Random configurations and random tensors: only a `MetaTTTError` may come out of them, or numbers that are finite.

    python -m metattt.testing.fuzz --seconds 30 --seed 0

A trial draws a job, choices for its groups and values for the keys of what was chosen, as the schemas have them: most
are ordinary, some are odd. Then it makes the object, and calls it forward and backward with tensors that may be odd as
well. A trial is its seed, and a failure prints the overrides that repeat it.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import re
import sys
import time
import typing
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metattt.combined import Combined
from metattt.composition.choices import choices
from metattt.composition.compose import compose
from metattt.composition.instantiate import instantiate_layer, instantiate_model, instantiate_part
from metattt.errors import MetaTTTError
from metattt.layer import TTTLayer
from metattt.mixers.base import Mixer
from metattt.models.language_model import LanguageModel
from metattt.registry import PARAMETERS, REGISTERED, SCHEMAS
from metattt.testing.answers import TooLong, memory_limit, time_limit

SECONDS = 60.0  # of one trial, at most
ROOM = 6 * 2**30  # bytes
ODD = 0.12  # share of the values, and of the inputs
WORDS = {  # ordinary values of the fields that are texts without a list of what is allowed
    "activation": ("gelu_tanh", "relu", "silu", "tanh", "identity"),
    "form": ("auto", "auto", "dual", "primal", "summed", "fused"),
}
INTEGERS, ODD_INTEGERS = (1, 2, 3, 4), (0, -1, -7, 2**31, 10**12, 10**20)
NUMBERS, ODD_NUMBERS = (0.1, 0.5, 1.0, 2.0), (0.0, -1.0, "nan", "inf", "-inf", 1e-40, 1e-12, 1e30, 1e300)
ODD_ANYTHING = ("null", "nobody", "[1,2]", "maybe", "{a:1}", "''")
BY_HAND = ("learner.module", "learner.layer")  # made of nodes of their own


class Job(NamedTuple):
    """What is composed and made.

    Attributes:
        groups: chosen from; of some, these choices alone.
        make: from the configuration to an object that is called, or None.
    """

    groups: dict[str, tuple[str, ...]]
    make: Callable[[Any], Any]


def _recipe(cfg: Any) -> None:
    instantiate_part(cfg, "training")
    instantiate_part(cfg, "data")


LAYER: dict[str, tuple[str, ...]] = {"layer": (), "task": (), "learner": (), "optimizer": ()}
JOBS = {
    "build": Job(LAYER, instantiate_layer),
    "language_model": Job(LAYER | {"model": ("language_model", "mamba_backbone", "transformer_backbone")}, instantiate_model),
    "train": Job({"training": ("adamw", "zeroth_order"), "data": ("text", "shards")}, _recipe),
}
WEIGHTS = (6, 3, 1)  # of the jobs


class Trial(NamedTuple):
    """One draw.

    Attributes:
        job: of `JOBS`.
        overrides: as on the command line.
        ordinary: nothing odd is among them.
    """

    job: str
    overrides: list[str]
    ordinary: bool


def draw(rng: random.Random) -> Trial:
    """A random configuration."""
    job = rng.choices(list(JOBS), WEIGHTS)[0]
    width, heads = rng.choice((4, 8)), rng.choice((1, 2))
    words, ordinary = [f"dim={width * heads}", f"num_heads={heads}"], True
    if job == "language_model":
        words += ["model.vocab_size=11", "model.num_layers=1"]
    if job == "train":
        words = []
    chosen = {}
    known = rng.random() < 0.7  # a known layer with its own parts, or parts at random
    for group, allowed in JOBS[job].groups.items():
        if group == "layer" and not known:
            words.append("layer=custom")
        elif group not in LAYER or (group == "layer") == known:
            names = allowed or tuple(name for name in sorted(choices(group)) if name not in ("custom", "module"))
            chosen[group] = rng.choice(names)
            words.append(f"{group}={chosen[group]}")
    chosen |= _parts_of(chosen["layer"]) if "layer" in chosen else {}
    if not known and chosen.get("learner", "").startswith(("kernel", "global")) and rng.random() < 0.9:
        words = [word for word in words if not word.startswith("optimizer=")] + ["optimizer=append"]
        chosen["optimizer"] = "append"
    fields = [(f"{group}.{name}", kind, allowed) for group, name, kind, allowed in _fields(chosen)]
    for key, kind, allowed in rng.sample(fields, min(len(fields), rng.randint(0, 5))):
        odd = rng.random() < ODD
        ordinary = ordinary and not odd
        words.append(f"{key}={_odd(rng, kind) if odd else _value(rng, key.rpartition('.')[2], kind, allowed)}")
    if rng.random() < 0.03:
        words.append(rng.choice(("dim=0", "num_heads=3", "seed=-1", "+anything=1", "dim=10000000000", "learner.nobody=1")))
    return Trial(job, words, ordinary)


def _fields(chosen: dict[str, str]) -> Iterator[tuple[str, str, Any, tuple[Any, ...]]]:
    """Group, name, type and allowed values of every key of what was chosen."""
    for group, choice in chosen.items():
        if group == "layer":
            yield from (("layer", name, kind, ()) for name, kind in (("form", str), ("gate", bool), ("group_size", int)))
            continue
        target = _target(group, choice)
        if target is None:
            continue
        for field in dataclasses.fields(SCHEMAS[target]):
            if field.name != "_target_" and f"{group}.{field.name}" not in BY_HAND and field.name not in ("dim", "layer"):
                yield group, field.name, field.type, PARAMETERS[target].get(field.name, ())


@cache
def _parts_of(layer: str) -> dict[str, str]:
    """What a known layer chooses for the three parts."""
    text = (files("metattt.configs") / "layer" / f"{layer}.yaml").read_text(encoding="utf-8")
    return {group: choice for group, choice in re.findall(r"override /(task|learner|optimizer): (\w+)", text) if choice != "null"}


@cache
def _target(group: str, choice: str) -> str | None:
    """The class that a choice of a group makes."""
    text = (files("metattt.configs") / group / f"{choice}.yaml").read_text(encoding="utf-8")
    found = re.search(rf"/schema/{group}/(\w+)@", text)
    return REGISTERED.get((group, found[1])) if found else None


def _value(rng: random.Random, name: str, kind: Any, allowed: tuple[Any, ...]) -> object:
    """One that the schema allows, and a constructor does too, as a rule."""
    kinds = typing.get_args(kind) or (kind,)
    if type(None) in kinds and rng.random() < 0.3:
        return "null"
    kinds = tuple(one for one in kinds if one is not type(None))
    if allowed or name in WORDS:
        value = rng.choice([one for one in allowed if one is not None] or WORDS[name])
        return str(value)
    if bool in kinds:
        return rng.choice(("true", "false"))
    if int in kinds:
        return rng.choice(INTEGERS)
    return rng.choice(NUMBERS) if float in kinds else "null"


def _odd(rng: random.Random, kind: Any) -> object:
    """One of the type, or of another, that hardly any constructor allows."""
    kinds = typing.get_args(kind) or (kind,)
    of_its_type: tuple[object, ...] = ODD_INTEGERS if int in kinds else ODD_NUMBERS if float in kinds else ODD_ANYTHING
    return rng.choice((*of_its_type, rng.choice(ODD_ANYTHING)))


# -- calls -------------------------------------------------------------------------------------------------------------


def call_layer(layer: TTTLayer | Combined | Mixer, rng: random.Random, ordinary: bool) -> str | None:
    """Two calls with a state between them, and the derivatives; what was not finite, if anything."""
    batch, dim = rng.choice((0, 1, 2, 3)), layer.dim
    scale = rng.choice((1.0, 1.0, 1.0, 0.0, 1e-30, 1e4))
    x, state = (_noise(rng, (batch, length, dim)) * scale for length in (rng.randint(1, 20), rng.randint(1, 9))), None
    outputs = []
    for tokens in x:
        tokens, flags, fine = _maybe_odd(rng, tokens.requires_grad_(rng.random() < 0.7))
        ordinary = ordinary and fine and scale <= 1
        y, state = layer(tokens, state, **flags)
        outputs.append(y)
    total = torch.stack([y.float().square().sum() for y in outputs]).sum()
    if total.requires_grad:
        total.backward()
    grads = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    wrong = [name for name, value in ({"y": total} | grads).items() if not value.isfinite().all()]
    return f"not finite: {', '.join(wrong)}" if wrong and ordinary else None


def call_model(model: LanguageModel, rng: random.Random, ordinary: bool) -> str | None:
    """A loss with its derivatives, or some tokens of a text."""
    ids = torch.randint(0, model.vocab_size, (rng.choice((1, 2)), rng.randint(1, 12)))
    odd = rng.random()
    if odd < 0.03:
        ids = ids + model.vocab_size
    elif odd < 0.06:
        ids = ids.float()
    elif odd < 0.09:
        ids = ids[:, :0]
    loss, state = model.cross_entropy(ids, ids, reset=_flags(rng, ids) if rng.random() < 0.2 else None)
    loss.backward()
    with torch.no_grad():
        logits, _ = model.step(ids[:, :1], state)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    finite = all(bool(value.isfinite().all()) for value in (loss, logits, *grads))
    return "not finite" if ordinary and not finite else None


def _noise(rng: random.Random, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rng.getrandbits(32)))


def _flags(rng: random.Random, x: Tensor) -> Tensor:
    return _noise(rng, tuple(x.shape[:2])) > rng.choice((-1.0, 0.0, 1.0))


def _maybe_odd(rng: random.Random, x: Tensor) -> tuple[Any, dict[str, Any], bool]:
    """Tokens, with flags or without; now and then what no layer takes."""
    flags: dict[str, Any] = {name: _flags(rng, x) for name in ("mask", "reset") if rng.random() < 0.25}
    if rng.random() > ODD:
        return x, flags, True
    kinds: list[Callable[[], tuple[Any, dict[str, Any]]]] = [
        lambda: (x * float("nan"), flags),
        lambda: (x.detach() + float("inf"), flags),
        lambda: (x.detach().long(), flags),
        lambda: (x.double(), flags),
        lambda: (x.bfloat16(), flags),
        lambda: (x[..., :-1], flags),
        lambda: (x[:, :0], flags),
        lambda: (x[0] if len(x) else x.flatten(), flags),
        lambda: (x.tolist(), flags),
        lambda: (x, {"mask": _flags(rng, x)[:, :-1]}),
        lambda: (x, {"mask": _flags(rng, x).float()}),
        lambda: (x, {"reset": "first"}),
        lambda: (x.detach() * 1e30, flags),
    ]
    return *rng.choice(kinds)(), False


# -- trials ------------------------------------------------------------------------------------------------------------


def attempt(seed: str) -> tuple[Trial, str, str | None]:
    """One trial: what was drawn, how it ended (`refused`, `ran`), and its fault, if it has one."""
    rng = random.Random(seed)
    trial = draw(rng)
    torch.manual_seed(rng.getrandbits(32))
    try:
        with time_limit(SECONDS), memory_limit(ROOM):
            made = JOBS[trial.job].make(compose(*trial.overrides, job=trial.job))
            if isinstance(made, TTTLayer | Combined | Mixer):
                return trial, "ran", call_layer(made, rng, trial.ordinary)
            if isinstance(made, LanguageModel):
                return trial, "ran", call_model(made, rng, trial.ordinary)
            return trial, "made", None
    except MetaTTTError as error:
        lines = len(str(error).splitlines())
        return trial, "refused", None if lines <= 2 else f"a message of {lines} lines: {error}"
    except TooLong:
        return trial, "hung", f"no end after {SECONDS:g} s"
    except Exception as error:  # whatever else comes out is what is looked for
        return trial, "raised", f"{type(error).__name__}: {str(error)[:300]}"


def fuzz(seconds: float, seed: int, say: Callable[[str], None] = print) -> list[str]:
    """Trials one after the other for so long; returns what was found, each with the overrides that repeat it."""
    JOBS["train"].make(compose(job="train"))  # what is imported once is no trial's own time
    end, count, found, ends = time.monotonic() + seconds, 0, list[str](), Counter[str]()
    while time.monotonic() < end:
        name = f"{seed}:{count}"
        trial, how, fault = attempt(name)
        ends[how] += 1
        count += 1
        if fault is not None:
            words = " ".join(f"'{word}'" if re.search(r"[\s\[{']", word) else word for word in trial.overrides)
            found.append(f"{fault}\n  job={trial.job} {words}\n  again: python -m metattt.testing.fuzz --only {name}")
            say(found[-1])
    say(f"{count} trials: {', '.join(f'{number} {how}' for how, number in sorted(ends.items()))}; {len(found)} faults")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m metattt.testing.fuzz", description="random configurations and tensors")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="repeat one trial, <seed>:<number>")
    given = parser.parse_args()
    if given.only:
        trial, how, fault = attempt(given.only)
        print(f"job={trial.job} {' '.join(trial.overrides)}\n{how}: {fault or 'as it should be'}")
        return 1 if fault else 0
    return 1 if fuzz(given.seconds, given.seed) else 0


if __name__ == "__main__":
    sys.exit(main())
