"""Checks that a layer does not see the future: by what its parts declare, and by a test on a few tokens."""

from __future__ import annotations

import inspect
import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from metattt.errors import MetaTTTError

TOKENS = 9  # less than a usual mini-batch: no kernel is compiled for them; a square, which may be a map
PARTS = ("optimizer", "learner", "task")


def require_causal(layer: nn.Module, dim: int) -> None:
    """Checks one layer of a model that predicts the next token.

    Args:
        layer: called as `y, state = layer(x, state, mask=..., reset=...)`.
        dim: D, width of its tokens.

    Raises:
        MetaTTTError: an output depends on a later token, by the declarations of the layer's parts (`causal`) or in the
            test. The test is skipped if parameters have no values (meta device), or if the layer cannot run here
            (kernels of another device, a fixed length).
    """
    reason = declared(layer)
    if reason is None and found_out(layer, dim):
        reason = (
            f"{type(layer).__name__} changes its outputs of earlier tokens when later ones change, though it does not "
            "declare causal = False: mask the later tokens, or choose another layer"
        )
    if reason is not None:
        raise MetaTTTError(f"a model that predicts the next token must not see it: {reason}")


def declared(layer: nn.Module) -> str | None:
    """Why a layer declares that it sees the future, with the override that fixes it; None if it does not."""
    for group in PARTS:
        part = getattr(layer, group, None)
        if part is None or getattr(part, "causal", True):
            continue
        name = type(part).__name__
        if group != "optimizer":
            return (
                f"the {group} {name} uses all tokens of a call for every output: choose a causal layer, e.g. "
                "layer=attention (see metattt layers)"
            )
        given = inspect.signature(type(part)).parameters.get("read")
        usual = "inclusive" if given is not None and given.default == "inclusive" else "previous"
        mended = "optimizer=minibatch" if given is None else f"optimizer.read={usual}"
        return (
            f"optimizer.read={part.read} ({name}) reads weights that later tokens have trained: "
            f"set {mended}, or choose a causal layer, e.g. layer=ttt_linear (see metattt layers)"
        )
    if not getattr(layer, "causal", True):
        return (
            f"{type(layer).__name__} declares causal = False: choose a causal layer, e.g. layer=attention (see "
            "metattt layers), and direction=forward"
        )
    return None


def found_out(layer: nn.Module, dim: int) -> bool | None:
    """Whether earlier outputs change with later tokens, tested on random tokens; None if the layer cannot run on a few
    tokens here."""
    tensors = [*layer.parameters(), *layer.buffers()]
    if any(tensor.is_meta for tensor in tensors):
        return None
    like = next((tensor for tensor in tensors if tensor.is_floating_point()), torch.empty(0))
    generator = torch.Generator().manual_seed(0)
    x, other = torch.randn(2, 2, TOKENS, dim, generator=generator).to(like)
    changed = x.clone()
    cuts = (TOKENS // 2 + 1, TOKENS - 1)
    for row, cut in enumerate(cuts):
        changed[row, cut:] = other[row, cut:]
    try:
        before, after = (run_apart(layer, tokens)[0] for tokens in (x, changed))
    except Exception:  # a foreign layer may raise anything; it is raised again where the layer is used
        return None
    if not (before.isfinite().all() and after.isfinite().all()):
        return None
    return not all(same(before[row, :cut], after[row, :cut]) for row, cut in enumerate(cuts))


def same(one: Tensor, other: Tensor) -> bool:
    """Equal but for rounding, measured against the largest entry."""
    bound = max(1e-5, 4 * torch.finfo(one.dtype).eps) * one.abs().max()
    return bool(((one - other).abs() <= bound).all())


@torch.no_grad()
def run_apart(layer: nn.Module, x: Tensor, state: Any = None) -> Any:
    """What a call with `x` `[B, T, D]` returns, with `visible` parameters. The layer stays as it is, buffers and the
    state of the random generators included."""
    values = {name: visible(parameter) for name, parameter in layer.named_parameters()}
    values |= {name: buffer.clone() for name, buffer in layer.named_buffers()}
    before = random.getstate()  # of Python, which a layer may draw from as well (to leave out a block, say)
    try:
        with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
            torch.manual_seed(0)
            random.seed(0)
            return functional_call(layer, values, (x, state), {"mask": None, "reset": None})
    finally:
        random.setstate(before)


def visible(parameter: Tensor) -> Tensor:
    """A parameter, or small numbers if it is all zeros: a zero output projection or gate would hide every
    dependency."""
    if parameter.any():
        return parameter
    waves = torch.linspace(1, 50, parameter.numel(), dtype=parameter.dtype, device=parameter.device).sin()
    return waves.view_as(parameter) / 8
