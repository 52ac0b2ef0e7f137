"""The configuration of a published TTT language model: its keys, their values here, and back."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn

from metattt.composition.compose import compose
from metattt.composition.instantiate import instantiate_model
from metattt.errors import MetaTTTError
from metattt.layer import TTTLayer
from metattt.models.language_model import LanguageModel

JAX_LAYERS = {  # seq_modeling_block of the JAX trainer: ttt_layer_type, whether q and k are shared and the output gated
    "ttt_linear": ("linear", True),
    "ttt_mlp": ("mlp", True),
    "ttt_linear_base": ("linear", False),
    "ttt_mlp_base": ("mlp", False),
}
NO_DEFAULT = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
HOW_NOT_WHAT = (
    "training", "form", "group_size", "compute_chunk", "changes", "token_step_map", "checkpoint_blocks", "conv_width",
    "fixed", "has_token_steps", "weight_names", "squared_error",
)  # fmt: skip
"""Attributes that never change a result or follow from others, and the map of token steps, which is converted."""


@dataclass(frozen=True)
class PublishedConfig:
    """The keys of a published `config.json` that decide what the model computes, with the published defaults.

    Attributes:
        vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads: V, D, width of the SwiGLU,
            blocks, H.
        ttt_layer_type: `linear` or `mlp`.
        use_gate, share_qk, pre_conv: all on in the Mamba backbone, all off in the Transformer backbone.
        ttt_base_lr: η_base of the inner loop.
        mini_batch_size: b (tokens).
        rope_theta, rms_norm_eps, conv_kernel, tie_word_embeddings, hidden_act: as in Llama; taps of every convolution
            (tokens).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    ttt_layer_type: str = "linear"
    use_gate: bool = False
    share_qk: bool = False
    pre_conv: bool = False
    ttt_base_lr: float = 1.0
    mini_batch_size: int = 16
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    conv_kernel: int = 4
    tie_word_embeddings: bool = True
    hidden_act: str = "silu"

    @classmethod
    def read(cls, config: Mapping[str, Any] | object) -> PublishedConfig:
        """From a `config.json` of the PyTorch release or of the JAX trainer, as a mapping or as an object with
        attributes.

        Keys that do not touch the computation (dropout, token ids, checkpointing) are passed over.

        Raises:
            MetaTTTError: a key that is missing, nearly right, or has a value that is not allowed.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}
        known = (*fields, "seq_modeling_block", "conv_width")
        attributes = {key: getattr(config, key) for key in known if hasattr(config, key)}
        given = _from_jax(dict(config) if isinstance(config, Mapping) else attributes)
        for key in given.keys() - fields.keys():
            guess = difflib.get_close_matches(str(key), fields.keys() - given.keys(), 1, cutoff=0.85)
            if guess:
                raise MetaTTTError(f"`{key}` is not a key of a published configuration. Did you mean `{guess[0]}`?")
        missing = [key for key in NO_DEFAULT if key not in given]
        if missing:
            raise MetaTTTError(f"the published configuration has no {', '.join(missing)}: there is no default")
        return cls(**{key: _typed(key, given[key], str(field.type)) for key, field in fields.items() if key in given})

    def __post_init__(self) -> None:
        if self.ttt_layer_type not in ("linear", "mlp"):
            raise MetaTTTError(f"ttt_layer_type={self.ttt_layer_type} is not a published layer: choose linear or mlp")
        if self.hidden_act != "silu":
            raise MetaTTTError(f"hidden_act={self.hidden_act} is not supported: the published models use silu")

    @classmethod
    def of(cls, model: LanguageModel) -> PublishedConfig:
        """The configuration that makes `model`.

        Raises:
            MetaTTTError: a model that no published configuration makes; the differences are listed.
        """
        block: Any = model.blocks[0]
        layer = block.layer
        if not isinstance(layer, TTTLayer):
            raise MetaTTTError(
                f"this model cannot be written as a published one: its layers are {type(layer).__name__}"
            )
        conv = block.conv or getattr(layer.task, "conv_q", None)
        config = cls(
            vocab_size=model.vocab_size,
            hidden_size=model.embedding.embedding_dim,
            intermediate_size=block.ffn.gate.out_features,
            num_hidden_layers=len(model.blocks),
            num_attention_heads=layer.num_heads,
            ttt_layer_type="mlp" if type(layer.learner).__name__ == "MLP" else "linear",
            use_gate=layer.gate is not None,
            share_qk=getattr(layer.task, "shared_qk", False),
            pre_conv=block.conv is not None,
            ttt_base_lr=getattr(layer.optimizer, "base_lr", 1.0),
            mini_batch_size=layer.optimizer.mini_batch_size,
            rope_theta=getattr(layer.task, "rope_theta", 10000.0),
            rms_norm_eps=block.ffn_norm.eps,
            conv_kernel=4 if conv is None else conv.weight.shape[-1],
            tie_word_embeddings=model.head.weight is model.embedding.weight,
        )
        twin = config.build()
        shapes = {name: list(one.shape) for name, one in twin.named_parameters()}
        differences = _differences(model, twin, "") or [
            f"{name} {list(one.shape)} (published: {shapes.get(name)})"
            for name, one in model.named_parameters()
            if list(one.shape) != shapes.get(name)
        ]
        if differences:
            once = {re.sub(r"^blocks\.\d+", "", one): one for one in reversed(differences)}  # of many blocks, the first
            found = ", ".join(reversed(once.values()))
            raise MetaTTTError(f"this model cannot be written as a published one; it differs in {found}")
        return config

    def compose(self) -> DictConfig:
        """Our configuration of the same model."""
        return compose(
            f"layer=ttt_{self.ttt_layer_type}",
            f"dim={self.hidden_size}",
            f"num_heads={self.num_attention_heads}",
            f"layer.gate={self.use_gate}",
            f"task.views={'shared_qk' if self.share_qk else 'separate'}",
            f"task.conv_width={self.conv_kernel}",
            f"task.rope_theta={self.rope_theta}",
            f"optimizer.base_lr={self.ttt_base_lr}",
            f"optimizer.mini_batch_size={self.mini_batch_size}",
            "optimizer.token_step_map=relu",
            f"model.vocab_size={self.vocab_size}",
            f"model.num_layers={self.num_hidden_layers}",
            f"model.ffn_dim={self.intermediate_size}",
            f"model.pre_conv={self.pre_conv}",
            f"model.conv_width={self.conv_kernel}",
            f"model.norm_eps={self.rms_norm_eps}",
            f"model.tie_embeddings={self.tie_word_embeddings}",
            job="language_model",
        )

    def build(self) -> LanguageModel:
        """The model without values: its parameters are on the meta device."""
        return build_empty(self.compose())

    def published(self) -> dict[str, Any]:
        """The keys of the PyTorch release's `config.json`."""
        return {"model_type": "ttt", **dataclasses.asdict(self)}

    def jax(self) -> dict[str, Any]:
        """The keys of the JAX trainer's configuration."""
        if self.use_gate != self.share_qk:
            raise MetaTTTError(
                f"use_gate={self.use_gate} with share_qk={self.share_qk}: the JAX trainer has both or neither"
            )
        block = next(name for name, parts in JAX_LAYERS.items() if parts == (self.ttt_layer_type, self.use_gate))
        keys = {"seq_modeling_block": block, "conv_width": self.conv_kernel, **dataclasses.asdict(self)}
        for key in ("ttt_layer_type", "use_gate", "share_qk", "conv_kernel", "hidden_act"):
            del keys[key]
        return keys


def build_empty(cfg: DictConfig) -> LanguageModel:
    """The model of a configuration, with parameters on the meta device: names and shapes, no values."""
    with torch.device("meta"):
        return instantiate_model(cfg)


def _from_jax(given: dict[str, Any]) -> dict[str, Any]:
    """The JAX trainer's keys under the names of the PyTorch release."""
    given = dict(given)
    if "seq_modeling_block" in given:
        name = given.pop("seq_modeling_block")
        if name not in JAX_LAYERS:
            raise MetaTTTError(
                f"seq_modeling_block={name} is not a published TTT layer: choose from {', '.join(JAX_LAYERS)}"
            )
        kind, mamba = JAX_LAYERS[name]
        given |= {"ttt_layer_type": kind, "use_gate": mamba, "share_qk": mamba}
    if "conv_width" in given:
        given["conv_kernel"] = given.pop("conv_width")
    return given


def _typed(key: str, value: Any, kind: str) -> Any:
    """The value, if its type is right; an integer passes for a float."""
    if kind == "float" and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value).__name__ != kind:
        raise MetaTTTError(f"{key}={value!r} in the published configuration is not allowed: expected {kind}")
    return value


def _differences(model: nn.Module, twin: nn.Module, path: str) -> list[str]:
    """Where two modules would compute different functions: parts of another class, and settings with another value."""
    if type(model) is not type(twin):
        return [f"{path} = {type(model).__name__} (published: {type(twin).__name__})"]
    found = []
    for name, value in vars(twin).items():
        plain = value is None or isinstance(value, (bool, int, float, str, tuple))
        if plain and not name.startswith("_") and name not in HOW_NOT_WHAT and vars(model).get(name) != value:
            found.append(f"{path}.{name} = {vars(model).get(name)} (published: {value})".lstrip("."))
    ours, theirs = dict(model.named_children()), dict(twin.named_children())
    for name in sorted(ours.keys() | theirs.keys()):
        place = f"{path}.{name}".lstrip(".")
        if name in ours and name in theirs:
            found += _differences(ours[name], theirs[name], place)
        else:
            found.append(f"{place} {'is not in' if name in ours else 'is needed by'} the published models")
    return found
