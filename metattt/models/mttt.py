"""MTTT layers from parameters with the names and shapes of the published JAX code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.layer import TTTLayer
from metattt.learners import MLP, Linear
from metattt.optimizers import WholeSequence
from metattt.tasks.mttt import DecodedReconstruction

SHAPES = {  # H heads of width d, D = H d; h hidden units
    "phi/kernel": "H D d", "phi/bias": "H d", "psi/kernel": "H D d", "psi/bias": "H d",
    "g/kernel": "H d D", "g_bias": "1 D", "h/kernel": "H d D", "h_bias": "1 D",
}  # fmt: skip
LINEAR = {"inner_Dense_0/kernel": "H d d"}
MLP_SHAPES = {
    "inner_Dense_0/kernel": "H d h", "inner_Dense_0/bias": "H h", "inner_Dense_1/kernel": "H h d",
    "inner_Dense_1/bias": "H d",
}  # fmt: skip
DECODER_NORM = {"decoder_LN/scale": "H D", "decoder_LN/bias": "H D"}


def mttt_from_published(params: Mapping[str, Any], steps: int = 1) -> TTTLayer:
    """An MTTT layer with published parameters, in their precision.

    MTTT-MLP if there is a second inner map, else MTTT-Linear; with or without decoder norm, as the names say. The
    linear learner's W0 is frozen, as published.

    Args:
        params: arrays or tensors by name, as in a flattened Flax tree of one layer, e.g. `phi/kernel` `[H, D, d]`.
        steps: T, inner steps on all tokens.

    Raises:
        MetaTTTError: names that are missing or unknown, or shapes that do not fit.
    """
    found = {name: torch.as_tensor(value) for name, value in params.items()}
    linear, norm = "inner_Dense_1/kernel" not in found, "decoder_LN/scale" in found
    expected = SHAPES | (LINEAR if linear else MLP_SHAPES) | (DECODER_NORM if norm else {})
    if found.keys() != expected.keys():
        raise MetaTTTError(
            f"published MTTT parameters: missing {sorted(expected.keys() - found.keys())}, unknown "
            f"{sorted(found.keys() - expected.keys())}"
        )
    sizes = _sizes(found)
    for name, axes in expected.items():
        shape = [sizes[axis] for axis in axes.split()]
        if list(found[name].shape) != shape:
            raise MetaTTTError(
                f"published MTTT parameter {name} has shape {list(found[name].shape)}, expected [{axes}] = {shape}"
            )
    learner = (
        Linear(bias=False, residual=False, norm=False, learn_init=False)
        if linear
        else MLP(expansion=sizes["h"] / sizes["d"], init="xavier", residual=False, norm=False)
    )
    layer = TTTLayer(
        sizes["D"],
        sizes["H"],
        DecodedReconstruction(decoder_norm=norm),
        learner,
        WholeSequence(steps),
        output_norm=False,
        output_bias=True,
    )
    layer.to(found["phi/kernel"].dtype)
    ours = dict(layer.named_parameters())
    with torch.no_grad():
        for name, value in to_ours(found).items():
            ours[name].copy_(value)
    return layer


def to_ours(published: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Published parameters (or their gradients) by our names, in our layout."""
    ours: dict[str, Tensor] = {}
    for name, value in published.items():
        match name.split("/"):
            case [("phi" | "psi") as view, "kernel"]:
                ours[f"task.{view}.weight"] = value.mT.flatten(0, 1)
            case [("phi" | "psi") as view, "bias"]:
                ours[f"task.{view}.bias"] = value.flatten()
            case ["g", "kernel"]:
                ours["task.decoder"] = value
            case ["g_bias"]:
                ours["task.decoder_bias"] = value[0]
            case ["h", "kernel"]:
                ours["out.weight"] = value.flatten(0, 1).mT
            case ["h_bias"]:
                ours["out.bias"] = value[0]
            case ["decoder_LN", kind]:
                ours[f"task.norm_{kind}"] = value
            case [inner, kind]:
                ours[f"learner.init.{'w' if kind == 'kernel' else 'b'}{int(inner[-1]) + 1}"] = value
    return ours


def _sizes(found: Mapping[str, Tensor]) -> dict[str, int]:
    """H, D, d and h, from two kernels that every layer has."""
    phi, inner = found["phi/kernel"], found["inner_Dense_0/kernel"]
    if phi.ndim != 3 or inner.ndim != 3 or phi.shape[1] != phi.shape[0] * phi.shape[2]:
        raise MetaTTTError(
            f"published MTTT parameter phi/kernel has shape {list(phi.shape)}, expected [H, D, d] with D = H d"
        )
    return {"1": 1, "H": phi.shape[0], "D": phi.shape[1], "d": phi.shape[2], "h": inner.shape[2]}
