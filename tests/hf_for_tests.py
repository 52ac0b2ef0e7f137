"""Small models on disk, for what reads them elsewhere: made, not trained, with weights large enough to tell them apart."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from metattt.checkpoints.folder import write_model
from metattt.checkpoints.record import make_record
from metattt.composition.compose import compose
from metattt.composition.instantiate import instantiate_model
from metattt.models import LanguageModel
from metattt.models.published import own_tensors

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the libraries are imported, which is after this module

GOLDEN = Path(__file__).parent / "golden"
LAYERS = {name: [f"layer={name}", "model.num_layers=1"] for name in ("ttt_linear", "ttt_mlp", "delta_net", "attention")}
LAYERS["hybrid"] = ["model.blocks=[ttt_mlp,attention]", "model.num_layers=2"]
PUBLISHED = "linear_mamba"  # of the golden vectors


def made(*overrides: str, seed: int = 0) -> tuple[LanguageModel, object]:
    """A small language model of bytes and its configuration."""
    cfg = compose("dim=16", "num_heads=2", *overrides, job="language_model")
    torch.manual_seed(seed)
    model = instantiate_model(cfg).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model, cfg


def write_made(folder: Path, *overrides: str, tokenizer: str | None = None) -> LanguageModel:
    """Writes such a model as `metattt convert` does."""
    model, cfg = made(*overrides)
    write_model(folder, make_record(cfg), own_tensors(model), tokenizer)  # type: ignore[arg-type]
    return model


def golden(kind: str) -> Any:
    """Vectors of a published language model: parameters, tokens, logits, the loss and its gradients."""
    return np.load(GOLDEN / f"lm_{kind}.npz")


def part(vectors: Any, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): torch.from_numpy(vectors[name]) for name in vectors if name.startswith(prefix)}


def published_config(kind: str) -> dict[str, Any]:
    layer, backbone = kind.split("_")
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    parts = dict.fromkeys(("use_gate", "share_qk", "pre_conv"), backbone == "mamba")
    return {**sizes, **parts, "ttt_layer_type": layer, "ttt_base_lr": 1.0 if layer == "linear" else 0.1, "mini_batch_size": 16}


def write_checkpoint(folder: Path, kind: str, name: str = "model.safetensors") -> dict[str, Tensor]:
    """A published checkpoint in a folder, as its authors would save it."""
    tensors = part(golden(kind), "param:")
    folder.mkdir(exist_ok=True)
    if name.endswith(".safetensors"):
        save_file(tensors, folder / name)
    else:
        torch.save(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, folder / name)
    (folder / "config.json").write_text(json.dumps(published_config(kind)))
    return tensors


def write_published(folder: Path) -> None:
    """One with a tokenizer of characters."""
    write_checkpoint(folder, PUBLISHED)
    (folder / "tokenizer.json").write_text(characters())


def llama(kind: str = "Llama", **settings: int) -> Any:
    """A small model of Transformers with two blocks of 16 features, or of settings of its own."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes | settings)).eval()


def characters() -> str:
    """A tokenizer.json with a beginning, an end, and a token for each of a few characters."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {token: number for number, token in enumerate(["<s>", "</s>", *"abcdefghijklmnopqrstuvwxyzĠ"])}
    built = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    built.add_special_tokens(["<s>", "</s>"])
    built.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = tokenizers.decoders.ByteLevel()
    text: str = built.to_str()
    return text
