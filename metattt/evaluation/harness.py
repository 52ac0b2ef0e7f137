"""A model of ours for the language model evaluation harness (EleutherAI's lm_eval): its own `HFLM`, around our model
for Transformers.

`metattt eval checkpoint=... tasks=[...]` uses it. lm_eval has no list of other people's models, so its own command
knows ours as `python -m metattt.evaluation.harness --model metattt --model_args checkpoint=runs/... --tasks ...`; in
Python importing this module is enough.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from metattt.checkpoints.record import modules
from metattt.checkpoints.trained import load_model, open_trained
from metattt.composition.settings import NO_CHECKPOINT, pick_device, settings
from metattt.data.text import ByteTokenizer
from metattt.data.tokenizers import FileTokenizer, tokenizer_of
from metattt.errors import MetaTTTError, NotFinite, check_integer
from metattt.models.language_model import LanguageModel
from metattt.optional import need

need("lm_eval.models.huggingface", extra="eval", what="metattt eval tasks=")
from lm_eval.api.registry import register_model  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.utils import simple_parse_args_string  # noqa: E402

from metattt.hf import MetaTTTCache, MetaTTTForCausalLM, to_transformers  # noqa: E402
from metattt.hf.export import generation_config  # noqa: E402

logging.getLogger(HFLM.__module__).setLevel(logging.ERROR)  # it warns of every model that is there already
LONGEST = 2**30  # tokens of a text: there is no longest


@dataclass
class ModelSettings:
    """What `--model_args` may hold; `batch_size` and `device` are lm_eval's own options as well."""

    checkpoint: str
    tokenizer: str | None = None
    device: str = "auto"
    batch_size: int = 16
    segment: int = 2048
    trust: Any = None


@register_model("metattt")
class MetaTTTLM(HFLM):
    """Log-likelihoods and continuations of texts.

    Every text is read from a separator on, as documents in training. There is no longest text: it is read in segments,
    with carried state, and nothing is cut or forgotten.

    Args:
        model: in evaluation mode, on its device.
        config: of its run, or of the model alone; what `metattt.load_model` returns beside it.
        tokenizer: of the model.
        batch_size: texts that are read together.
        segment: tokens per call of the model.
        trust: modules of the user's whose classes the configuration names.

    Raises:
        MetaTTTError: a size that is not allowed, or a model that sees the token that it predicts.
    """

    def __init__(
        self, model: LanguageModel, config: DictConfig, tokenizer: ByteTokenizer | FileTokenizer, batch_size: int = 16,
        segment: int = 2048, trust: Sequence[str] = (),
    ):  # fmt: skip
        check_integer("batch_size", batch_size)
        check_integer("segment", segment)
        model.check_causal()
        made = MetaTTTForCausalLM.of(model, config, trust)
        made.generation_config = generation_config(tokenizer)
        super().__init__(
            made,
            tokenizer=to_transformers(tokenizer),
            batch_size=batch_size,
            max_length=LONGEST,
            softmax_dtype="float32",
        )
        self.segment = segment

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> MetaTTTLM:
        """From the words of `--model_args`: see `ModelSettings`.

        Raises:
            MetaTTTError: a word or a checkpoint that cannot be used.
        """
        extra = {key: value for key, value in (additional_config or {}).items() if value is not None}
        extra.pop("max_batch_size", None)  # lm_eval hands it on; it is for batch_size=auto
        given = {**arg_dict, **extra}
        known = ModelSettings.__dataclass_fields__
        for key in given:
            if key not in known:
                raise MetaTTTError(f"{key} is not among the model_args of metattt: {', '.join(known)}")
        return cls.load(
            settings(ModelSettings, OmegaConf.create({"checkpoint": "???", **given}), checkpoint=NO_CHECKPOINT)
        )

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> MetaTTTLM:
        """As `create_from_arg_obj`, from `checkpoint=runs/...,batch_size=4`."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def load(cls, chosen: ModelSettings) -> MetaTTTLM:
        """The model of a checkpoint.

        Raises:
            MetaTTTError: it cannot be used.
        """
        trust = modules(chosen.trust)
        about = open_trained(chosen.checkpoint, trust=trust)
        if "vocab_size" not in about.config.model:
            raise MetaTTTError(f"{chosen.checkpoint} is a model for images: tasks are for language models")
        tokenizer = tokenizer_of(chosen.checkpoint, about.tokenizer, about.config.model.vocab_size, chosen.tokenizer)
        model, config = load_model(chosen.checkpoint, pick_device(chosen.device), trust)
        return cls(model, config, tokenizer, chosen.batch_size, chosen.segment, trust)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts, each after its separator, which lm_eval adds itself here."""
        self.add_bos_token = False
        try:
            return super().loglikelihood_rolling(requests, disable_tqdm)
        finally:
            self.add_bos_token = None  # type: ignore[assignment]  # as its constructor leaves it

    def _model_call(self, inps: Tensor, attn_mask: Any = None, labels: Any = None) -> Tensor:
        """Logits `[B, T, V]` of texts `[B, T]`, filled up at the end, which no token before it sees."""
        cache = MetaTTTCache()
        with torch.no_grad():
            logits = torch.cat(
                [self.model(part, past_key_values=cache).logits for part in inps.split(self.segment, 1)], 1
            )
        if not bool(logits.isfinite().all()):
            raise NotFinite(
                "the model's predictions are not finite: its weights have diverged; take an earlier checkpoint"
            )
        return logits

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        return super()._model_generate(context, max_length, [text for text in stop if text], **options)


def main() -> int:
    """The command of lm_eval, which then knows `--model metattt`."""
    from lm_eval.__main__ import cli_evaluate

    sys.argv[0] = str(Path(sys.argv[0]).name)
    try:
        cli_evaluate()
    except MetaTTTError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
