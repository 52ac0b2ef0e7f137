"""A model of ours for the language model evaluation harness (EleutherAI's lm_eval), as `metattt eval tasks=[...]` uses
it: its own `HFLM`, around our model for Transformers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from metattt.checkpoints.trained import load_model, open_trained
from metattt.data.text import ByteTokenizer
from metattt.data.tokenizers import FileTokenizer, tokenizer_of
from metattt.errors import check_integer
from metattt.evaluation.output import finite
from metattt.models.language_model import LanguageModel, tokens_per_call
from metattt.optional import need

need("lm_eval.models.huggingface", extra="eval", what="metattt eval tasks=")
from lm_eval.models.huggingface import HFLM  # noqa: E402

from metattt.hf import MetaTTTCache, MetaTTTForCausalLM, to_transformers  # noqa: E402
from metattt.hf.export import generation_config  # noqa: E402

logging.getLogger(HFLM.__module__).setLevel(logging.ERROR)  # it warns of every model that is there already
LONGEST = 2**30  # tokens of a text: there is no longest


class MetaTTTLM(HFLM):
    """Log-likelihoods and continuations of texts.

    Every text is read from a separator on, as documents in training. There is no longest text: it is read in segments,
    with carried state, and nothing is cut or forgotten.

    Args:
        model: in evaluation mode, on its device.
        config: of its run, or of the model alone; what `metattt.load_model` returns beside it.
        tokenizer: of the model.
        batch_size: texts that are read together.
        segment: tokens per call of the model; all of a text where a layer's mini-batch is a whole call.
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
            prefix_token_id=tokenizer.separator,
        )
        self.segment = segment
        self.tokenizer.bos_token = None  # else texts that begin with its name in letters would get no separator

    @classmethod
    def load(
        cls, checkpoint: Path | str, device: torch.device, tokenizer: str | None = None, batch_size: int = 16,
        segment: int = 2048, trust: Sequence[str] = (),
    ) -> MetaTTTLM:  # fmt: skip
        """The model of a checkpoint; `tokenizer` is what the user says in place of the model's own."""
        about = open_trained(checkpoint, trust=trust)
        vocab_size = about.config.model.get("vocab_size")
        found = tokenizer_of(str(checkpoint), about.tokenizer, vocab_size, tokenizer)
        model, config = load_model(checkpoint, device, trust)
        return cls(model, config, found, batch_size, segment, trust)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
        """The tokens of a text, after a separator unless `add_bos_token` or an argument say otherwise."""
        given = self.add_bos_token is not False if add_special_tokens is None else add_special_tokens
        found: list[int] = super().tok_encode(string, add_special_tokens=given, **options)
        return found

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
        segment = tokens_per_call(self.model, self.segment, inps.shape[1])
        with torch.no_grad():
            parts = [self.model(part, past_key_values=cache).logits for part in inps.split(segment, 1)]
        return finite(torch.cat(parts, 1))

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        return super()._model_generate(context, max_length, [text for text in stop if text], **options)
