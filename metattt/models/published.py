"""Published checkpoints of TTT language models (the PyTorch release): their names for our parameters, and the way there
and back. Linear maps are stored as `(out, in)`, as ours; vectors of the heads have an axis more."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.layer import TTTLayer
from metattt.models.language_model import LanguageModel
from metattt.models.published_config import PublishedConfig
from metattt.optimizers.gradient_descent import GradientDescent

OF_A_BLOCK = {
    "conv_norm.weight": "conv.norm.weight",
    "conv.weight": "conv.conv.weight",
    "conv.bias": "conv.conv.bias",
    "layer_norm.weight": "seq_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "ffn.gate.weight": "mlp.gate_proj.weight",
    "ffn.up.weight": "mlp.up_proj.weight",
    "ffn.down.weight": "mlp.down_proj.weight",
}
OF_A_LAYER = {
    "task.q.weight": "q_proj.weight",
    "task.k.weight": "k_proj.weight",
    "task.v.weight": "v_proj.weight",
    "task.conv_q.weight": "conv_q.weight",
    "task.conv_q.bias": "conv_q.bias",
    "task.conv_k.weight": "conv_k.weight",
    "task.conv_k.bias": "conv_k.bias",
    "learner.init.w1": "W1",
    "learner.init.b1": "b1",
    "learner.init.w2": "W2",
    "learner.init.b2": "b2",
    "learner.slow.norm_scale": "ttt_norm_weight",
    "learner.slow.norm_bias": "ttt_norm_bias",
    "optimizer.lr_weight": "learnable_ttt_lr_weight",
    "optimizer.lr_bias": "learnable_ttt_lr_bias",
    "optimizer.token_step_offset": "learnable_token_idx",
    "norm.weight": "post_norm.weight",
    "norm.bias": "post_norm.bias",
    "gate.weight": "g_proj.weight",
    "out.weight": "o_proj.weight",
}
NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    **{f"blocks.#.{ours}": f"model.layers.#.{theirs}" for ours, theirs in OF_A_BLOCK.items()},
    **{f"blocks.#.layer.{ours}": f"model.layers.#.seq_modeling_block.{theirs}" for ours, theirs in OF_A_LAYER.items()},
}
"""Our names and theirs; `#` is the number of the block."""

ROWS = ("learner.init.b1", "learner.init.b2", "optimizer.lr_weight", "optimizer.lr_bias")
"""Ours `[H, n]` are theirs `[H, 1, n]`."""

FLAT = "optimizer.token_step_offset"
"""Ours `[1, b]` are theirs `[b]`."""


def from_published(state_dict: Mapping[str, Any], config: Mapping[str, Any] | object) -> LanguageModel:
    """A model from a published checkpoint: `model(ids)` gives logits `[B, T, V]`.

    Args:
        state_dict: tensors by published name; `lm_head.weight` may be left out where it is tied. Parameters keep the
            tensors' types.
        config: the published configuration (`config.json`), as a mapping or as an object with these attributes.

    Raises:
        MetaTTTError: a configuration that cannot be used; every name that is unknown, missing or of the wrong shape.
    """
    model = PublishedConfig.read(config).build()
    return fill(model, to_ours(state_dict, model))


def to_published(model: LanguageModel) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by name and configuration of the PyTorch release for `model`; the tensors share memory with it where they
    can.

    Raises:
        MetaTTTError: a model that the release cannot express; the differences are listed.
    """
    keys = PublishedConfig.of(model).published()
    return from_ours(own_tensors(model), model), keys


# -- tensors by name, without a model's values -------------------------------------------------------------------------


def own_tensors(model: LanguageModel) -> dict[str, Tensor]:
    """The model's parameters by our name; one that is shared appears once."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def from_ours(tensors: Mapping[str, Tensor], model: LanguageModel) -> dict[str, Tensor]:
    """Tensors of `model` by published names and in their layout. Token steps are made as published models make them,
    max(0, 1/i + δ_i): where ours are made otherwise, by other δ."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, TTTLayer)}
    rules = {f"{name}.optimizer.token_step_offset": layer.optimizer for name, layer in layers.items()}
    found = {}
    for ours, tensor in tensors.items():
        if isinstance(rule := rules.get(ours), GradientDescent):
            tensor = rule.published_offset(tensor)
        found[_named(ours)] = _written(ours, tensor).contiguous()
    return found


def to_ours(tensors: Mapping[str, Any], model: LanguageModel) -> dict[str, Tensor]:
    """Tensors by published names as the parameters of `model`, which may be on the meta device.

    Raises:
        MetaTTTError: every name that is unknown, missing or of the wrong shape, and a tied head that differs from the
            embedding.
    """
    given = dict(tensors)
    wanted = {_named(ours): ours for ours in own_tensors(model)}
    shapes = {_named(ours): _written(ours, tensor).shape for ours, tensor in own_tensors(model).items()}
    problems = []
    head, embedding = NAMES["head.weight"], NAMES["embedding.weight"]
    tied = head not in wanted and head in given and embedding in given
    if tied and not torch.equal(given.pop(head), given[embedding]):
        problems.append(f"{head} differs from {embedding}, to which the configuration ties it (tie_word_embeddings)")
    problems += [f"missing: {_list(wanted.keys() - given.keys())}"] if wanted.keys() - given.keys() else []
    problems += [f"unknown: {_list(given.keys() - wanted.keys())}"] if given.keys() - wanted.keys() else []
    wrong = [name for name in wanted if name in given and given[name].shape != shapes[name]]
    if wrong:
        sizes = (f"{name} {list(given[name].shape)} instead of {list(shapes[name])}" for name in wrong)
        problems.append(f"wrong shape: {', '.join(sizes)}")
    wrong = [f"{name} {given[name].dtype}" for name in wanted if name in given and not given[name].is_floating_point()]
    problems += [f"not floating point: {', '.join(wrong)}"] if wrong else []
    if problems:
        raise MetaTTTError("the tensors do not fit the configuration. " + "; ".join(problems))
    return {ours: _read(ours, given[name]).detach().contiguous() for name, ours in wanted.items()}


def fill(model: LanguageModel, tensors: Mapping[str, Tensor]) -> LanguageModel:
    """Gives a model on the meta device its parameters: copies of the tensors by our name. Evaluation mode is set."""
    tied = model.head.weight is model.embedding.weight
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    if tied:
        copies["head.weight"] = copies["embedding.weight"]
    model.load_state_dict(copies, assign=True)
    if tied:  # assigning made two parameters of it
        model.head.weight = model.embedding.weight
    return model.eval()


def _named(ours: str) -> str:
    """Our name as the release says it."""
    name = NAMES.get(re.sub(r"^blocks\.\d+\.", "blocks.#.", ours))
    if name is None:
        raise MetaTTTError(f"{ours} has no published name: only TTT-Linear and TTT-MLP models have")
    block = re.match(r"blocks\.(\d+)\.", ours)
    return name.replace("#", block[1]) if block else name


def _written(ours: str, tensor: Tensor) -> Tensor:
    """Our tensor in their layout."""
    return tensor.unsqueeze(1) if ours.endswith(ROWS) else tensor.squeeze(0) if ours.endswith(FLAT) else tensor


def _read(ours: str, tensor: Tensor) -> Tensor:
    """Their tensor in our layout."""
    return tensor.squeeze(1) if ours.endswith(ROWS) else tensor.unsqueeze(0) if ours.endswith(FLAT) else tensor


def _list(names: Collection[str]) -> str:
    """The first names in order, and how many more there are."""
    first, more = sorted(names)[:8], len(names) - 8
    return ", ".join(first) + (f" and {more} more" if more > 0 else "")
