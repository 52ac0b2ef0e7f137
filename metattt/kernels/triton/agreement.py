"""Whether a Triton operation computes, as it was compiled for a device, what its equations say.

In Triton's interpreter all kernels do. On the first card that ran them, compiled by Triton 3.6 (an H100, results/gpu),
some of 16 bits did not: a register was read before it held what it should. So no kernel for sequences is used on a
device before it has been compared there, once for every type, size and number of heads, which are what is compiled
anew. (Those that decode single tokens were right there, and are not compared.)
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from metattt.kernels.naive import naive

log = logging.getLogger("metattt")

OPERATIONS = {"ttt_linear": ("w", "b"), "ttt_mlp": ("w1", "b1", "w2", "b2")}  #: folder → names of its weights
MINI_BATCHES = 17  #: more than a segment of the backward pass
AT_MOST = {torch.float32: 1e-2, torch.bfloat16: 0.1, torch.float16: 0.1}
"""Relative errors of outputs, of gradients of W0 and norms, and of those of the tokens of any mini-batch. Rounding
gives a tenth of that (the derivatives of token steps cancel, and are not compared); wrong code gave 0.7 and more."""

_FOUND: dict[tuple[object, ...], str | None] = {}


@torch.compiler.assume_constant_result
def disagreement(
    name: str, device: torch.device, dtype: torch.dtype, width: int, size: int, heads: int, biased: bool, tau: bool,
    derivatives: bool,
) -> str | None:  # fmt: skip
    """How far an operation is off on a device, or None if it agrees; found out once.

    Args:
        name: of the operation, a key of `OPERATIONS`.
        dtype: of the views.
        width, size, heads: d, b and H.
        biased, tau: whether there are biases and token steps.
        derivatives: whether gradients are compared, too: they take kernels of their own, which only training needs.
    """
    key = (name, device, dtype, width, size, heads, biased, tau, derivatives)
    if key not in _FOUND:
        with _apart(device):
            errors = _errors(*key)
        worst = max(errors, key=lambda part: errors[part])
        wrong = errors[worst] > AT_MOST[dtype]
        off = f"{errors[worst]:.0%} off" if errors[worst] < torch.inf else "not finite"
        told = f"on {device} its {worst} is {off} for {heads} heads of {width} in {str(dtype)[6:]}"
        _FOUND[key] = told if wrong else None
        if wrong:
            log.warning("%s: %s, as compiled there: the dual form computes instead, more slowly", name, told)
        else:
            log.debug("%s on %s: within %.1e of its equations", name, device, errors[worst])
    return _FOUND[key]


def _errors(
    name: str, device: torch.device, dtype: torch.dtype, width: int, size: int, heads: int, biased: bool, tau: bool,
    derivatives: bool,
) -> dict[str, float]:  # fmt: skip
    """By the name of an output or gradient; NaN is infinitely wrong."""
    weights = OPERATIONS[name]
    run = getattr(importlib.import_module(f"metattt.kernels.{name}.op"), name)
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int, std: float) -> Tensor:
        return torch.randn(shape, generator=draw) * std

    length, hidden = MINI_BATCHES * size, 4 * width
    views = {part: normal(2, length, heads, width, std=1 if part == "v" else width**-0.5).to(dtype) for part in "qkv"}
    mlp = [(width, hidden), (hidden,), (hidden, width), (width,)]
    shapes = [(width, width), (width,)] if len(weights) == 2 else mlp
    given: dict[str, Any] = {**views, "eta": torch.rand(2, length, heads, generator=draw) / (16 * width)}
    for part, shape in zip(weights, shapes, strict=True):
        given[part] = normal(heads, *shape, std=shape[0] ** -0.5 / 4) if biased or len(shape) == 2 else None
    given |= {"norm_scale": 1 + normal(heads, width, std=0.1), "norm_bias": normal(heads, width, std=0.1)}
    cotangent = normal(2, length, heads, width, std=1.0)
    steps = (1 / torch.arange(1.0, size + 1)).unsqueeze(0) if tau else None

    def results(function: Callable[..., Any], narrow: bool) -> dict[str, Tensor]:
        there = {part: x.to(device) for part, x in given.items() if x is not None}
        leaves = {part: (x if narrow else x.double()).detach().requires_grad_() for part, x in there.items()}
        taus = None if steps is None else (steps if narrow else steps.double()).to(device)
        with torch.set_grad_enabled(derivatives):
            o = function(**{part: leaves.get(part) for part in given}, tau=taus, mini_batch_size=size)[0]
        if not derivatives:
            return {"output": o}
        found = torch.autograd.grad(o, list(leaves.values()), cotangent.to(o))
        return {"output": o.detach()} | {f"gradient of {part}": x for part, x in zip(leaves, found, strict=True)}

    found, right = results(run, True), results(naive, False)
    of_tokens = {"output", *(f"gradient of {part}" for part in ("q", "k", "v", "eta"))}
    return {
        part: _error(found[part].double(), x, MINI_BATCHES if part in of_tokens else 1) for part, x in right.items()
    }


@contextmanager
def _apart(device: torch.device) -> Iterator[None]:
    """Derivatives in full precision, whatever the call is in that asks first: inference mode, autocast, or a mode in
    which the host may not wait for the device, as it does here."""
    before = torch.cuda.get_sync_debug_mode() if device.type == "cuda" else 0
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        try:
            if before:
                torch.cuda.set_sync_debug_mode(0)
            yield
        finally:
            if before:
                torch.cuda.set_sync_debug_mode(before)


def _error(found: Tensor, right: Tensor, mini_batches: int) -> float:
    """The largest of any mini-batch, of tokens `[2, T, ...]`; a small one counts as a tenth of the mean at least."""
    off, size = (
        x.reshape(2, mini_batches, -1).norm(dim=(0, 2)) if mini_batches > 1 else x.norm().unsqueeze(0)
        for x in (found - right, right)
    )
    share = off / (size.clamp(min=0.1 * float(size.mean())) + 1e-30)
    return float(share.nan_to_num(torch.inf).max())
