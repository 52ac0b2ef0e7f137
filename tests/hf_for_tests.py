"""Small models on disk, for what reads them elsewhere: made, not trained, with weights large enough to tell them apart."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

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


def write_published(folder: Path) -> None:
    """A published checkpoint with a configuration and a tokenizer of characters."""
    folder.mkdir()
    vectors = np.load(GOLDEN / f"lm_{PUBLISHED}.npz")
    tensors = {name.removeprefix("param:"): torch.from_numpy(vectors[name]) for name in vectors if name.startswith("param:")}
    save_file(tensors, folder / "model.safetensors")
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    parts = dict.fromkeys(("use_gate", "share_qk", "pre_conv"), True)
    (folder / "config.json").write_text(json.dumps({**sizes, **parts, "ttt_layer_type": "linear", "ttt_base_lr": 1.0}))
    (folder / "tokenizer.json").write_text(characters())


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
