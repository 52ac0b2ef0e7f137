"""The weights that a learner declares, and its options `trainable` and `step_scale`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from metattt.errors import MetaTTTError, check_number


@dataclass(frozen=True)
class Weight:
    """One weight of a learner, per head.

    Args:
        shape: shape without the head axis; matrices are `(d_in, d_out)`.
        std: standard deviation of the normal initial value; 0 gives zeros.
        bound: draw from U(−bound, bound) instead.
        value: initial value instead: a number (1 for a norm's scale) or a tensor of this shape, the same for all heads.
            `learn_init=false` keeps any initial value.
        fast: trained by the inner loop. A slow weight is an ordinary outer-loop parameter of `f`.
        layer: the name of its layer in `f`, for `step_scale=ρ`. None: the number at the end of its name.
    """

    shape: tuple[int, ...]
    std: float = 0.02
    bound: float | None = None
    value: float | Tensor | None = None
    fast: bool = True
    layer: str | None = None

    def sample(self, num_heads: int) -> Tensor:
        if isinstance(self.value, Tensor):
            sample = self.value.detach().expand(num_heads, *self.shape).clone()
            return sample if sample.is_meta else sample.to(torch.empty(0).device)  # where parameters are made now
        if self.value is not None:
            return torch.full((num_heads, *self.shape), float(self.value))
        if self.bound is not None:
            return torch.empty(num_heads, *self.shape).uniform_(-self.bound, self.bound)
        return torch.randn(num_heads, *self.shape) * self.std if self.std else torch.zeros(num_heads, *self.shape)


def declared(weights: object, kind: str, needed: bool) -> dict[str, Weight]:
    """What `weights` of a learner called `kind` has returned; `needed`: its hidden state is weights.

    Raises:
        MetaTTTError: not weights by name, or one whose shape is no tuple.
    """
    named = isinstance(weights, Mapping) and all(isinstance(weight, Weight) for weight in weights.values())
    if not isinstance(weights, Mapping) or not named or (needed and not weights):
        kinds = {name: type(weight).__name__ for name, weight in getattr(weights, "items", dict)()}
        raise MetaTTTError(
            f"{kind}.weights returns {kinds or weights}: it must return a Weight by name, such as "
            "{'w': Weight((d_in, d_out))}"
        )
    for name, weight in weights.items():
        if not isinstance(weight.shape, tuple | list):
            shape = weight.shape
            raise MetaTTTError(f"{kind}.weights gives {name!r} the shape {shape!r}: write Weight(({shape},))")
    return dict(weights)


def chosen(weights: Mapping[str, Weight], trainable: object, kind: str) -> dict[str, Weight]:
    """The weights of a learner called `kind`: fast if `trainable` names them, otherwise slow.

    Raises:
        MetaTTTError: not a list of names of weights.
    """
    known = ", ".join(weights)
    word = isinstance(trainable, str)
    if word or not isinstance(trainable, Sequence) or not all(isinstance(name, str) for name in trainable):
        raise MetaTTTError(f"learner.trainable={trainable} is not allowed: it must be a list of {known}, or null")
    if not trainable:
        raise MetaTTTError(
            f"learner.trainable=[] leaves the inner loop nothing to learn: name one of {known} or more, or set it to "
            "null"
        )
    unknown = [name for name in trainable if name not in weights]
    if unknown:
        raise MetaTTTError(f"learner.trainable names {', '.join(unknown)}: the weights of {kind} are {known}")
    return {name: replace(weight, fast=name in trainable) for name, weight in weights.items()}


def step_factors(weights: Mapping[str, Weight], given: Mapping[str, float] | float, kind: str) -> dict[str, float]:
    """The factors c of the fast weights of a learner called `kind`, where they are not 1: `given` by name, or one
    number ρ for layers, in the order in which `weights` names them.

    Raises:
        MetaTTTError: a factor that is not positive, a name that is not a fast weight, or names without layers.
    """
    fast = {name: weight for name, weight in weights.items() if weight.fast}
    if not isinstance(given, Mapping):
        check_number("learner.step_scale", given, above=0, advice=", or a factor for every weight by name")
        layers = {name: weight.layer if weight.layer is not None else _number(name) for name, weight in fast.items()}
        if None in layers.values():
            raise MetaTTTError(
                f"learner.step_scale={given} goes by layers, and the names of {kind}'s weights show none: "
                f"give factors by name, of {', '.join(fast)}"
            )
        order = list(dict.fromkeys(layers.values()))
        given = {name: float(given) ** (len(order) - 1 - order.index(layer)) for name, layer in layers.items()}
    unknown = [str(name) for name in given if name not in fast]
    if unknown:
        raise MetaTTTError(
            f"learner.step_scale names {', '.join(unknown)}: the fast weights of {kind} are {', '.join(fast)}"
        )
    for name, factor in given.items():
        check_number(f"learner.step_scale.{name}", factor, above=0, advice=" (learner.trainable makes a weight slow)")
    return {name: float(factor) for name, factor in given.items() if factor != 1}


def _number(name: str) -> str | None:
    """The number at the end of a name."""
    found = re.search(r"\d+$", name)
    return None if found is None else found[0]
