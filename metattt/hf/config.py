"""The `config.json` of a model for Transformers: our record of the model, and the sizes that tools look for."""

from __future__ import annotations

import copy
from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar

from omegaconf import DictConfig, OmegaConf

from metattt.checkpoints.record import check_amounts, checked_record, make_record, record_config
from metattt.errors import MetaTTTError
from metattt.optional import need

need("transformers", extra="hf", what="metattt.hf")
from transformers import PreTrainedConfig  # noqa: E402

PARTS = ("model", "layer")  # of a run's configuration: what makes the model, and nothing of data and training
MOST_BLOCKS = 2**14  # that a file may ask for
OF_RECORD = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "num_hidden_layers": "num_layers",
    "tie_word_embeddings": "tie_embeddings",
}
"""Names of Transformers for fields of `model`."""


class MetaTTTConfig(PreTrainedConfig):
    """The configuration of `MetaTTTForCausalLM`.

    Args:
        metattt: what a checkpoint of ours says of its model: `version`, and `config` with components by name
            (`learner=mlp`). Everything that the model computes is in it.
        vocab_size, hidden_size, num_hidden_layers, tie_word_embeddings: V, D, blocks, whether the head is the
            embedding; always those in `metattt`, and there for other programs.
        num_attention_heads: heads of the layers (1 where they differ or have none), because peft asks for it.
        use_cache: a call returns the state after its last token, for the next one.

    Raises:
        MetaTTTError: a `metattt` that is no such record.
    """

    model_type: ClassVar[str] = "metattt"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache"]
    base_model_fsdp_plan: ClassVar[dict[Any, str]] = {}

    metattt: dict[str, Any] | None = None
    vocab_size: int | None = None
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    tie_word_embeddings: bool | None = None
    num_attention_heads: int | None = None
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.metattt is not None:
            self.metattt = checked_record(copy.deepcopy(self.metattt), Path("config.json"))
            model, layer = (self.metattt["config"].get(key) or {} for key in PARTS)
            known = {"tie_embeddings": True, **model}
            if missing := [key for key in OF_RECORD.values() if key not in known]:
                raise MetaTTTError(f"config.json has a model without {', '.join(missing)}: it is damaged")
            for name, key in OF_RECORD.items():
                setattr(self, name, known[key])
            self.num_attention_heads = layer.get("num_heads") or 1
        super().__post_init__(**kwargs)

    @classmethod
    def of(cls, config: DictConfig, **fields: Any) -> MetaTTTConfig:
        """From the configuration of a run, or of a model alone (`metattt.load_model` returns either).

        Raises:
            MetaTTTError: a model for images.
        """
        if "vocab_size" not in config.model:
            raise MetaTTTError("this is a model for images: metattt export takes language models")
        # a model with a pattern of blocks has no layer for all of them
        parts = {key: OmegaConf.to_container(config[key], resolve=True) for key in PARTS if config.get(key) is not None}
        return cls(metattt=make_record(OmegaConf.create(parts)), **fields)

    def composed(self, trust: Collection[str] = ()) -> DictConfig:
        """The configuration that `metattt.composition.instantiate.instantiate_model` takes.

        Args:
            trust: modules of the user's whose classes it may name.

        Raises:
            MetaTTTError: a component that is not known here or not allowed; more of something than any run asks for.
        """
        if self.metattt is None:
            raise MetaTTTError("the configuration has no `metattt`: load one that metattt export has written")
        described = MetaTTTConfig(metattt=self.metattt)
        for name in (*OF_RECORD, "num_attention_heads"):
            if (value := getattr(self, name)) != (true := getattr(described, name)):
                raise MetaTTTError(f"{name}={value} cannot be set: the model that config.json describes has {true}")
        config = record_config(self.metattt, Path("config.json"), (), trust)
        check_amounts(config, "config.json", MOST_BLOCKS)
        return config
