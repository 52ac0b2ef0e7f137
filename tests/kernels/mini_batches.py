"""What kernels of whole mini-batches and of single tokens are given, drawn at random."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from metattt.inner.tokens import MiniBatches, Tokens
from metattt.kernels.naive import naive
from metattt.optimizers.base import Gates
from metattt.tasks.base import Views

Leaves = dict[str, Tensor]
WEIGHTS = ("w1", "b1", "w2", "b2")


def inputs(
    kind: str, d: int = 16, b: int = 16, bias: bool = True, tau: str = "shared", hidden: int = 64,
    n: int = 64, batch: int = 2, heads: int = 2,
) -> Leaves:  # fmt: skip
    """Everything that has a gradient, fp32, by name: n tokens of TTT-Linear (`linear`) or TTT-MLP (`mlp`)."""
    generator = torch.Generator().manual_seed(d + b)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    given = {name: normal(batch, n, heads, d).transpose(1, 2) for name in ("k", "v", "q")}
    given["eta"] = normal(batch, n, heads).sigmoid().transpose(1, 2) / d
    if tau != "none":
        given["tau"] = 1 / torch.arange(1.0, b + 1) + 0.1 * normal(heads if tau == "per_head" else 1, b)
    given |= {"scale": 1 + 0.1 * normal(heads, d), "shift": 0.1 * normal(heads, d)}
    shapes = ((d, d), (d,)) if kind == "linear" else ((d, hidden), (hidden,), (hidden, d), (d,))
    for name, shape in zip(WEIGHTS, shapes, strict=False):
        if bias or name[0] == "w":
            given[name] = normal(batch, heads, *shape) * 0.3 * (shape[0] ** -0.5 if name[0] == "w" else 1)
    return given


def given_of(x: Leaves, b: int = 16, group_size: int | None = None) -> MiniBatches:
    """As the inner loop hands it to a kernel, for mini-batches of b tokens."""
    weights = {name: w for name, w in x.items() if name in WEIGHTS}
    tokens = Tokens(Views(x["k"], x["v"], x["q"]), Gates(x["eta"]))
    slow = {"norm_scale": x["scale"], "norm_bias": x["shift"]}
    return MiniBatches(tokens, weights, slow, x.get("tau"), b, x["eta"].dtype, group_size)


def written_out(x: Leaves, b: int = 16) -> tuple[Tensor, Leaves, Leaves]:
    """Predictions, the last weights, and the update since, by the equations, in the type of the tensors."""
    views = [x[name].transpose(1, 2) for name in ("q", "k", "v", "eta")]
    weights = [x.get(name) for name in WEIGHTS[: 4 if "w2" in x else 2]]
    y, state = naive(*views, x["scale"], x["shift"], tau=x.get("tau"), mini_batch_size=b, initial_state=weights)
    after, update = (
        {name: w for name, w in zip(WEIGHTS, part, strict=False) if name in x}
        for part in (state[: len(weights)], state[len(weights) :])
    )
    return y.transpose(1, 2), after, update


def part(x: MiniBatches, first: int, last: int, weights: Leaves | None = None) -> MiniBatches:
    """Some of its tokens, from weights that others left."""
    tokens = x.tokens.map(lambda t: t[:, :, first:last])
    return x._replace(tokens=tokens, weights=x.weights if weights is None else weights)


def rearranged(x: Leaves) -> Leaves:
    """The same sizes in other memory: rows with gaps, rows that are not contiguous, and one value for several places."""
    x = x | {name: x[name].mT.contiguous().mT for name in ("k", "scale", "shift")}
    x["q"] = torch.cat([x["q"], x["q"]], -1)[..., x["q"].shape[-1] :]
    x["eta"] = x["eta"][..., :1].expand_as(x["eta"])
    x |= {name: x[name][:1].expand_as(x[name]) for name in ("v", *WEIGHTS) if name in x}
    return x | ({"tau": torch.stack([x["tau"], x["tau"]], -1)[..., 0]} if "tau" in x else {})


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory is full of NaN before it is written."""

    def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def wrapped(*args: Any, **kwargs: Any) -> Tensor:
            x = make(*args, **kwargs)
            return x.fill_(torch.nan) if x.is_floating_point() else x

        return wrapped

    with ExitStack() as patches:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty")):
            patches.enter_context(mock.patch.object(owner, name, poisoned(getattr(owner, name))))
        yield
